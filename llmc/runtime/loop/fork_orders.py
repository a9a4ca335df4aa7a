"""Orders of a request to the scheduler while it reads its logits, executed afterwards."""

from collections.abc import Callable

from llmc.runtime.requests.request import Forks, Request


class ForkOrders:
    """Forks that are carried out later: the scheduler's own work is outside the boundary of the request."""

    def __init__(self) -> None:
        self._orders: list[Callable[[Forks], None]] = []

    def fork(self, parent: Request, child: Request) -> None:
        self._orders.append(lambda forks: forks.fork(parent, child))

    def resume(self, request: Request) -> None:
        self._orders.append(lambda forks: forks.resume(request))

    def remove(self, request: Request) -> None:
        self._orders.append(lambda forks: forks.remove(request))

    def carry_out(self, forks: Forks) -> None:
        """Carry out the orders in the order of their arrival."""
        for order in self._orders:
            order(forks)

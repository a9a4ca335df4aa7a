"""Why a rewrite or a kernel does not apply to a candidate."""

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Refusal:
    """The reason why a rewrite or kernel does not apply.

    Args:
        reason: The reason, with actual values such as dtypes, shapes and users.
        node: The node that prevents the rewrite.
        expected: The expected side, if the reason compares two values.
        found: The actual side, if the reason compares two values.
        users: The users of the node that prevent the rewrite.
        is_asked: Whether the user or the checkpoint requires it, so that nothing is missing.
    """

    reason: str
    node: fx.Node
    expected: str | None = None
    found: str | None = None
    users: tuple[fx.Node, ...] = ()
    is_asked: bool = False


class Refused(Exception):
    """A Refusal as an exception, which ends a precondition at once.

    Args:
        reason: As in Refusal.
        node: As in Refusal.
        expected: As in Refusal.
        found: As in Refusal.
        users: As in Refusal.
    """

    def __init__(
        self,
        reason: str,
        node: fx.Node,
        expected: str | None = None,
        found: str | None = None,
        users: tuple[fx.Node, ...] = (),
    ) -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason, node, expected, found, users)

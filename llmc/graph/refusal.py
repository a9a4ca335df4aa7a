"""Why a rewrite or a kernel does not apply to a candidate."""

from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True)
class Refusal:
    """The reason why a rewrite or kernel does not apply. reason: with actual values (dtypes, shapes, users). node: the
    node that prevents the rewrite.

    expected, found: the two sides of the reason, where it compares. users: of the node, those that are in the way.
    is_asked: the user, or the checkpoint, wants it so: nothing is missing.
    """

    reason: str
    node: fx.Node
    expected: str | None = None
    found: str | None = None
    users: tuple[fx.Node, ...] = ()
    is_asked: bool = False


class Refused(Exception):
    """A Refusal that is raised, which ends a precondition where it is found."""

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

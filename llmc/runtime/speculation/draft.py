"""Draft tokens for a request: a chain, or a tree with at most one accepted path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.speculation.acceptance import Acceptance, Probabilities

# Maximum nodes of a tree: with the request's last token they have 64 rows, the reach of a mask.
MOST_NODES = 63


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for one request and one step.

    parents: for each token the index of its predecessor, which comes before it, or None if it follows the request's
    last token; None as a whole for a chain, in which each token follows the previous one. acceptance: how the tokens of
    a chain are judged; None accepts those that would have been drawn. probabilities: their distributions, [vocabulary]
    each; None for a certain token, and as a whole if all were certain or distributions are not needed.
    """

    tokens: Sequence[int]
    parents: Sequence[int | None] | None = None
    acceptance: Acceptance | None = None
    probabilities: Sequence[Probabilities | None] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def parent(self, index: int) -> int | None:
        """The token that this one follows, None for the request's last one."""
        if self.parents is not None:
            return self.parents[index]
        return index - 1 if index else None

    def child(self, node: int | None, token: int) -> int | None:
        """The index of a node's child with this token; None if it was not guessed. The request's last token is node
        None."""
        if self.parents is None:
            following = 0 if node is None else node + 1
            return following if following < len(self.tokens) and self.tokens[following] == token else None
        for index in range(0 if node is None else node + 1, len(self.tokens)):
            if self.parents[index] == node and self.tokens[index] == token:
                return index
        return None

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The indices of the draft's nodes that match these tokens, as far as they match."""
        nodes: list[int] = []
        for token in tokens:
            node = self.child(nodes[-1] if nodes else None, token)
            if node is None:
                break
            nodes.append(node)
        return nodes

    def without(self, unwanted: Callable[[Sequence[int]], bool]) -> Draft:
        """The draft without tokens whose paths from the request's last token are unwanted, and without the tokens after
        them."""
        kept: dict[int | None, int | None] = {None: None}
        paths: dict[int | None, list[int]] = {None: []}
        for node, token in enumerate(self.tokens):
            parent = self.parent(node)
            if parent in kept and not unwanted(path := [*paths[parent], token]):
                kept[node], paths[node] = len(kept) - 1, path
        if len(kept) == len(self.tokens) + 1:
            return self
        nodes = [node for node in kept if node is not None]
        parents = None if self.parents is None else [kept[self.parents[node]] for node in nodes]
        drawn_from = None if self.probabilities is None else [self.probabilities[node] for node in nodes]
        return replace(self, tokens=[self.tokens[node] for node in nodes], parents=parents, probabilities=drawn_from)

    def depths(self) -> list[int]:
        """Return each token's distance from the request's last token: 1 for a token that follows that one."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent is None else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        """The maximum number of accepted tokens."""
        return len(self.tokens) if self.parents is None else max(self.depths(), default=0)

    def masks(self) -> list[int]:
        """Return each token's mask, as for Step.tree_masks: bit d means that the row d places before it is not on its
        path."""
        if self.parents is None:
            return [0] * len(self.tokens)
        masks: list[int] = []
        for index, parent in enumerate(self.parents):
            # All since the parent are hidden, and what is hidden from that.
            back = index + 1 if parent is None else index - parent
            hidden = (1 << back) - 2
            masks.append(hidden if parent is None else hidden | masks[parent] << back)
        return masks


NO_DRAFT = Draft(())

"""A request's draft under construction: the best candidates after the nodes that are read next become its nodes.

A level of the tree takes one step of the drafter, regardless of its width. Each step reads the nodes whose children may
belong to the best tree of the maximum size; because children are worth at most as much as their parents, these are
nodes of that tree themselves. A confident drafter grows deep trees, an uncertain one grows broad trees in fewer steps
(Li et al. 2024, "EAGLE-2: faster inference of language models with dynamic draft trees").
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from llmc.runtime.speculation.best_tree import Candidate, best_nodes
from llmc.runtime.speculation.draft import MOST_NODES, Draft
from llmc.runtime.speculation.hidden_rows import Hidden


class Level(NamedTuple):
    """Nodes that are read together, in consecutive rows. first: rows of the tree before them. depths, masks: as for a
    Draft. hidden: [nodes, width], the draft's hidden states at their parents."""

    nodes: Sequence[int]
    first: int
    tokens: Sequence[int]
    depths: Sequence[int]
    masks: Sequence[int]
    hidden: Hidden


class GrowingTree:
    """A tree of drafts that grows level by level. most: maximum nodes of the draft. width: nodes that are read at once;
    1 for a chain. tokens: the tokens of all nodes."""

    def __init__(self, most: int, width: int) -> None:
        self._most, self._width = min(most, MOST_NODES), width
        self.tokens: list[int] = []
        self._parents: list[int | None] = []
        self._shares: list[float] = []
        self._worth: list[float] = []
        self._hidden: dict[int | None, Hidden] = {}
        # The nodes that were read, in the order of their rows.
        self._read: list[int] = []

    def grow(self, node: int | None, candidates: Sequence[Candidate], hidden: Hidden) -> None:
        """Add the candidates after a node, or after the request's last token, without duplicates, and the drafter's
        hidden state there."""
        if node in self._hidden:
            return
        self._hidden[node] = hidden
        worth = 1.0 if node is None else self._worth[node]
        for token, share in candidates:
            if share > 0:
                self.tokens.append(token)
                self._parents.append(node)
                self._shares.append(share)
                self._worth.append(worth * share)

    def next_level(self) -> Level | None:
        """The nodes to be read next; None if no more nodes can improve the draft."""
        # The last one of the best could only have a child in its own place.
        best = sorted(range(len(self.tokens)), key=lambda node: -self._worth[node])[: self._most - 1]
        # There is one row per node: half of the remaining rows are reserved for deeper nodes.
        room = min(self._width, -(-(self._most - len(self._read)) // 2))
        unread = [node for node in best if node not in self._hidden][:room]
        if not unread:
            return None
        first = len(self._read)
        self._read += unread
        rows = {node: row for row, node in enumerate(self._read)}
        # Nodes of a chain were read in rows before those of the tree, like the request's last token.
        parents = [None if (parent := self._parents[node]) is None else rows.get(parent) for node in self._read]
        read = Draft([self.tokens[node] for node in self._read], parents)
        masks, depths = read.masks(), read.depths()
        if len(unread) == 1 and masks[-1]:
            first -= 1  # GPUs apply masks of two tokens or more: the one before is read again.
        nodes = self._read[first:]
        hidden = np.stack([self._hidden[self._parents[node]] for node in nodes])
        return Level(nodes, first, read.tokens[first:], depths[first:], masks[first:], hidden)

    def path(self, node: int | None) -> list[int]:
        """The tokens that lead to a node, and its own."""
        tokens: list[int] = []
        while node is not None:
            tokens.append(self.tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def draft(self) -> Draft:
        """The best tree of the nodes added until now."""
        return best_nodes(Draft(self.tokens, self._parents), self._shares, self._most)

"""Where rows leave the tables of a request: blocks from there on have separate digests.

The keys and values of a token depend on the rows that its layers attend to. Behind a cut they therefore depend on the
tokens, on the policy with its options, and on the cuts until there. A request with another policy, or with cuts at
other tokens, must not find them, nor begin after such rows. So each cut is part of the digest of the block that begins
after it, and through the chain of digests part of all later ones.
"""

from collections.abc import Iterator, Sequence

from llmc.program import CachePolicy, Cut


class CutMarks:
    """The cuts of one request.

    Args:
        policies: The policies of the groups of caches, for this request.
        prompt: Number of tokens of the request's prompt.
        block_size: Number of tokens of a block.
    """

    def __init__(self, policies: Sequence[CachePolicy], prompt: int, block_size: int) -> None:
        self._size = block_size
        self._cuts = [_Cuts(policy, policy.all_cuts(prompt)) for policy in policies if policy.drops_rows]
        self._marks: dict[int, bytes] = {}

    def before(self, index: int) -> bytes:
        """The bytes that stand for the rows that leave where the index-th block begins; empty if none leave there."""
        for cuts in self._cuts:
            for end, mark in cuts.until(index * self._size):
                self._marks[end // self._size] = self._marks.get(end // self._size, b"") + mark
        return self._marks.get(index, b"")


class _Cuts:
    """The cuts of one policy, each once."""

    def __init__(self, policy: CachePolicy, cuts: Iterator[tuple[int, Cut]]) -> None:
        self._name, self._cuts = str(policy), cuts
        self._next = next(cuts, None)
        self._before, self._has_dropped = b"", False

    def until(self, tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield the cuts after at most this many tokens that were not yielded yet, from the first one on at which rows
        leave. Its mark also stands for those before it, whose scores decide which rows leave."""
        while self._next is not None and self._next[0] <= tokens:
            end, cut = self._next
            self._next = next(self._cuts, None)
            self._before += f" cut {self._name} {end} {cut.dropped} {cut.chosen} {cut.queries} {cut.pinned}".encode()
            self._has_dropped |= cut.dropped > 0
            if self._has_dropped:
                yield end, self._before
                self._before = b""


NO_MARKS = CutMarks((), 0, 1)

"""Blocks that a request has filled since the prefix cache last processed them."""

from dataclasses import dataclass, field

from llmc.runtime.prefix_cache.cut_marks import NO_MARKS, CutMarks


@dataclass(eq=False, slots=True)
class Chain:
    """Consecutive blocks that one request has filled and that are not hashed yet.

    tokens: the request's, which may grow. begin: the first of the blocks is its begin-th. parent: the digest of the
    block before that one, under which the chain is folded as long as it has blocks. marks: the request's cuts.
    """

    tokens: list[int]
    begin: int
    parent: bytes
    marks: CutMarks = NO_MARKS
    blocks: list[int] = field(default_factory=list)

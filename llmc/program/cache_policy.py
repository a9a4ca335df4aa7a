"""The cache policy of a group of layers: which rows of a sequence its caches keep (docs/cache-policy.md)."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from itertools import count, islice, pairwise, takewhile
from typing import Any, ClassVar, NamedTuple, TypeVar

from llmc.program.limits import Limits
from llmc.program.step_outputs import GROUP_INPUTS

Row = TypeVar("Row")
# Rows before a token's own that a tree may hide from it: it counts them in its window, and kernels read that far back.
TREE_REACH = 63
# A pool has at least one block for this many blocks of group 0, because most sequences are shorter than the longest.
_SHORTER = 8
# Slots are numbered in int32.
MAX_SLOTS = 2**31 - 1


class UnfitError(ValueError):
    """Options that a policy cannot have.

    Args:
        problem: Why not.
        fix: Which ones to give.
    """

    def __init__(self, problem: str, fix: str) -> None:
        self.fix = fix
        super().__init__(problem)


@dataclass(frozen=True)
class Visible:
    """The rows of its sequence's cache that a token sees: [0, pinned) and [first(row), row].

    window: number of rows nearest to the token, its own included. chunk: rows before the multiple of it at or before
    the token's own row are hidden. None: no limit.
    """

    window: int | None = None
    chunk: int | None = None
    pinned: int = 0

    @property
    def near(self) -> int | None:
        """The most rows that a token sees after the pinned ones; None for all."""
        return min((size for size in (self.window, self.chunk) if size is not None), default=None)

    @property
    def most(self) -> int | None:
        """The most rows that a token sees; None for all."""
        return None if self.near is None else self.near + self.pinned

    def first(self, row: int) -> int:
        """The first row after the pinned ones that a token in this row, or in a later one, sees."""
        by_window = 0 if self.window is None else row - self.window + 1
        by_chunk = 0 if self.chunk is None else row - row % self.chunk
        return max(0, by_window, by_chunk)


@dataclass(frozen=True)
class Cut:
    """The change of a table that is full.

    Args:
        leaving: rows that leave it, in order; the others move up. Whole blocks.
        sources: rows that are copied before. Ranges, so that a cut takes no memory until a table is cut.
        destinations: the rows that they are copied to; every source is read first.
        chosen: number of first rows that ops of the graph write before (llmc/passes/compaction): they do the moves, or
            choose what moves by layer and head. 0: there are no such ops.
        queries: number of last queries that these ops read; None for all that `CachePolicy.queries` holds.
        pinned: number of first rows that these ops keep whatever their scores, and leave where they are.
        reads: most tokens that the model reads again at once before, until it has read all tokens up to the cut. The
            queries of these tokens choose (runtime/requests/second_reading.py). 0: it reads none again.
    """

    leaving: tuple[range, ...]
    sources: Sequence[int] = ()
    destinations: Sequence[int] = ()
    chosen: int = 0
    queries: int | None = None
    pinned: int = 0
    reads: int = 0

    @property
    def dropped(self) -> int:
        """Number of rows that leave."""
        return sum(map(len, self.leaving))

    @property
    def moves(self) -> Iterator[tuple[int, int]]:
        """The rows that are copied, from and to."""
        return zip(self.sources, self.destinations, strict=True)

    def left(self, rows: Sequence[Row]) -> list[Row]:
        """The rows of a table after the cut. rows: those before it."""
        kept = list(rows)
        for source, destination in self.moves:
            kept[destination] = rows[source]
        for gone in reversed(self.leaving):
            del kept[gone.start : gone.stop]
        return kept


class Progress(NamedTuple):
    """The past cuts of a request's table.

    prompt: tokens of the request's prompt. dropped: rows that have left the table. cut_at: number of tokens at its last
    cut, 0 for none.
    """

    prompt: int
    dropped: int = 0
    cut_at: int = 0

    def after(self, end: int, cut: Cut) -> "Progress":
        """The past cuts after a further one."""
        return Progress(self.prompt, self.dropped + cut.dropped, end)


@dataclass(frozen=True)
class CachePolicy:
    """Keeps every row. A policy that keeps less derives from this class.

    Its fields are its options: whole numbers, or None for options that are not given. An option whose default is a word
    of a StrEnum takes the words of that enum. NAME: how text names the policy; empty for a class of them.
    """

    NAME: ClassVar[str] = "everything"
    # Options that the engine says, such as the rows of a block.
    SAID: ClassVar[tuple[str, ...]] = ()

    @property
    def visible(self) -> Visible:
        """The rows that a token sees of those that its cache still holds. A table that is cut shows all of them."""
        return Visible(window=self.fills_at)

    @property
    def fills_at(self) -> int | None:
        """Number of rows at which a request's table is cut; None if it never is, or if `next_cut` says more.

        A multiple of the block size.
        """
        return None

    def leaving(self) -> Sequence[range]:
        """The rows that leave a table of `fills_at` rows, in order; the others move up. Whole blocks."""
        return ()

    @property
    def drops_rows(self) -> bool:
        """Whether tables are cut, so that rows are not positions."""
        return self.fills_at is not None

    def next_cut(self, done: Progress) -> int | None:
        """Number of tokens after which a table is cut next; None for never."""
        return None if self.fills_at is None else self.fills_at + done.dropped

    def cut(self, done: Progress) -> Cut:
        """The next cut. done: the cuts before it."""
        return Cut(tuple(self.leaving()))

    def most_rows(self, tokens: int) -> int:
        """The most rows in the table of a sequence of at most this many tokens."""
        return tokens if self.fills_at is None else min(tokens, self.fills_at)

    @property
    def newest(self) -> int | None:
        """Number of newest tokens whose rows every cut leaves in order at the end of the table; None for all.

        A policy whose cuts differ from one another says more than this, which is about the first one of `fills_at`.
        """
        if not self.drops_rows:
            return None
        if self.fills_at is None:
            return 0
        cut = self.cut(Progress(self.fills_at))
        ends = [rows.stop for rows in cut.leaving] + [to + 1 for to in cut.destinations] + [cut.chosen]
        return self.fills_at - max(ends)

    @property
    def renumbers(self) -> bool:
        """Whether positions are rows of the policy's tables, in all layers."""
        return False

    @property
    def recomputes(self) -> bool:
        """Whether a request whose table was cut can be computed again from its tokens, to the same bits. One that
        cannot is swapped out where the pool has no room for it (docs/kv-offloading.md), or fails."""
        return True

    def cut_problem(self, block_size: int) -> tuple[str, str] | None:
        """Return why tables with blocks of this size cannot be cut as the policy says, and the fix; None if they can,
        or never are."""
        if self.fills_at is None:
            return None
        ends = [end for rows in self.leaving() for end in (rows.start, rows.stop)]
        wrong = next((row for row in (self.fills_at, *ends) if row % block_size), None)
        if wrong is not None:
            problem = f"cuts tables at row {wrong}, which is not a multiple of block_size={block_size}"
            return problem, f"give options for multiples of {block_size} rows, or build with another block_size"
        fix = "correct the policy's class"
        if not ends or any(before > after for before, after in pairwise((0, *ends, self.fills_at))):
            return f"cuts tables of {self.fills_at} rows, but {list(self.leaving())} are not some of them in order", fix
        if self.visible != Visible(window=self.fills_at):
            return f"cuts tables, and hides rows of them besides: {self.visible}", fix
        return None

    @property
    def inputs(self) -> tuple[str, ...]:
        """The additional step inputs of a group with this policy."""
        return tuple(name for name in GROUP_INPUTS if self.drops_rows or name != "context_lens")

    def cuts(self, tokens: int, prompt: int | None = None) -> Iterator[int]:
        """The numbers of tokens, all below `tokens`, after which a table is cut. prompt: tokens of it; None for all
        tokens."""
        return (end for end, _ in self.cuts_before(tokens, tokens if prompt is None else prompt))

    def cuts_before(self, tokens: int, prompt: int) -> Iterator[tuple[int, Cut]]:
        """The same, each with its cut. For eager runs, in which nothing is read again: a cut that needs it is left
        out."""
        return takewhile(lambda made: made[0] < tokens and not made[1].reads, self.all_cuts(prompt))

    def all_cuts(self, prompt: int) -> Iterator[tuple[int, Cut]]:
        """The cuts of a request's table, and the tokens after which they happen."""
        done = Progress(prompt)
        while (end := self.next_cut(done)) is not None:
            cut = self.cut(done)
            yield end, cut
            done = done.after(end, cut)

    def held(self, tokens: int, prompt: int | None = None) -> list[int]:
        """The positions whose rows a table holds after this many tokens, in order."""
        cuts = self.all_cuts(tokens if prompt is None else prompt)
        return list(next(islice(self._tables(cuts), tokens, None)))

    def seen(self, tokens: int, prompt: int | None = None) -> Iterator[list[int]]:
        """Yield for each token of a sequence the positions whose keys it sees, in order. The arguments are those of
        `cuts_before`."""
        visible, cuts = self.visible, self.cuts_before(tokens, tokens if prompt is None else prompt)
        for position, before in enumerate(islice(self._tables(cuts), tokens)):
            first, rows = visible.first(len(before)), [*before, position]
            yield [*rows[: min(visible.pinned, first)], *rows[first:]]

    def _tables(self, cuts: Iterator[tuple[int, Cut]]) -> Iterator[list[int]]:
        """The positions whose rows a table holds after 0, 1, 2, … tokens; always the same list."""
        kept = list[int]()
        end, cut = next(cuts, (None, Cut(())))
        for position in count():
            yield kept
            kept.append(position)
            if position + 1 == end:
                kept[:] = cut.left(kept)
                end, cut = next(cuts, (None, cut))

    def sequence_blocks(self, limits: Limits, tokens: int) -> int:
        """The most blocks that one sequence holds while a step adds `tokens` tokens to it."""
        visible, size = self.visible, limits.block_size
        rows = min(visible.near or limits.max_model_len, limits.max_model_len) - 1 + tokens
        # They may begin with the last row of a block.
        blocks = limits.blocks_for(visible.pinned) + limits.blocks_for(rows + size - 1)
        return min(blocks, limits.blocks_for(self.most_rows(limits.max_model_len)))

    def fitted(self, block_size: int) -> "CachePolicy":
        """The policy for blocks of this size."""
        return self

    @property
    def queries(self) -> "CachePolicy | None":
        """The policy of the group that holds queries, for scores of keys; None if no scores are made."""
        return None

    @property
    def per_request(self) -> bool:
        """Whether requests may choose another policy for the group, among them one that keeps everything."""
        return False

    def pool_blocks(self, limits: Limits, blocks: int) -> int:
        """Blocks of the group's pool where group 0 has `blocks`.

        They suffice for the number of sequences of max_model_len that group 0 holds. They are at least an eighth of the
        blocks of group 0 beyond its first sequence, up to the need of max_sequences. Each sequence counts the rows that
        a token sees and those of drafts; the tokens of a whole step are added once.
        """
        whole, kept = limits.blocks_for(limits.max_model_len), self.sequence_blocks(limits, 1 + TREE_REACH)
        of_longest = -(-blocks * kept // whole)
        of_all = max(of_longest, min((blocks - whole) // _SHORTER, limits.max_sequences * kept))
        return min(blocks, of_all + limits.blocks_for(limits.max_batch_tokens + TREE_REACH))

    def __str__(self) -> str:
        """`NAME:option=value,…`, which `from_text` reads."""
        return self._text(())

    @property
    def shown(self) -> str:
        """The same for messages, as a user may write it: without options that the engine says."""
        return self._text(self.SAID)

    def _text(self, without: Collection[str]) -> str:
        given = [(field.name, getattr(self, field.name)) for field in fields(self) if field.name not in without]
        options = ",".join(f"{name}={value}" for name, value in given if value is not None)
        return f"{self.NAME}:{options}" if options else self.NAME

    @staticmethod
    def from_text(text: str, **said: int) -> "CachePolicy":
        """The policy of such a text. Raises ValueError that says what is wrong.

        said: the options that the engine says, for a text without them.
        """
        name, _, given = text.partition(":")
        kinds = {kind.NAME: kind for kind in _kinds(CachePolicy) if kind.NAME}
        if name not in kinds:
            known = ", ".join(sorted(kinds))
            raise ValueError(f"{text!r:.200} is not a cache policy that is imported. Known policies: {known}")
        options = dict[str, Any]()
        for option in given.split(",") if given else ():
            key, _, value = option.partition("=")
            if key in options:
                raise ValueError(f"{text!r:.200} gives {key} twice")
            try:
                options[key] = _option(kinds[name], key, value)
            except ValueError as error:
                raise ValueError(f"{text!r:.200}: {option!r} is not {error}") from None
        needed = [field.name for field in fields(kinds[name]) if field.default is field.default_factory is MISSING]
        missing = [option for option in needed if option not in options]
        if missing:
            ways = " and ".join(f"{option}=NUMBER" for option in missing)
            raise UnfitError(f"{text!r:.200}: it lacks {' and '.join(missing)}", f"add {ways}")
        return kinds[name](**{key: size for key, size in said.items() if key in kinds[name].SAID} | options)


@dataclass(frozen=True)
class Nearest(CachePolicy):
    """Keeps the rows of a window, of a chunk, or what lies in both; None: no limit."""

    NAME: ClassVar[str] = "nearest"
    window: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"a {name} of {size} tokens leaves nothing to see")

    @property
    def visible(self) -> Visible:
        return Visible(self.window, self.chunk)


EVERYTHING = CachePolicy()


def group_blocks(policies: Sequence[CachePolicy], limits: Limits, blocks: int, *, has_first: bool) -> tuple[int, ...]:
    """The number of blocks of each cache group, given that of the first group that holds whole sequences.

    That group is group 0, unless it has no caches (`has_first` is False) and another group holds whole sequences. The
    blocks of group 0 are then only numbers, one for each block that sequences may need. policies: The policies of the
    groups from 1 on.
    """
    first = blocks
    if not has_first and any(policy.per_request for policy in policies):
        most = limits.max_sequences * limits.blocks_for(limits.max_model_len)
        first = max(blocks, min(most, MAX_SLOTS // limits.block_size - 1))
    return first, *(policy.pool_blocks(limits, blocks) for policy in policies)


def _kinds(kind: type[CachePolicy]) -> Iterator[type[CachePolicy]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


def _option(kind: type[CachePolicy], key: str, value: str) -> int | StrEnum:
    """The value of an option. Raises ValueError that says what it should be."""
    options = {field.name: field.default for field in fields(kind)}
    known = ", ".join(name for name in options if name not in kind.SAID)
    default = options.get(key)
    if isinstance(default, StrEnum):
        word = next((word for word in type(default) if word == value), None)
        if word is None:
            raise ValueError(f"one of {', '.join(f'{key}={word}' for word in type(default))}")
        return word
    if key not in options or not (value.isascii() and value.isdecimal()):
        raise ValueError(f"OPTION=NUMBER with an option of {kind.NAME} ({known})")
    if len(value) > len(str(MAX_SLOTS)) or int(value) > MAX_SLOTS:
        raise ValueError(f"a number up to {MAX_SLOTS}, the most rows of a cache")
    return int(value)

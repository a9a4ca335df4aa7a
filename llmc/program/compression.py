"""The cache policies that `kv_compression` names (docs/kv-compression.md), and which of them an engine can run.

A table is cut only by its request's own length, always where a block begins.
"""

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, ClassVar

from llmc.errors import OptionError, did_you_mean
from llmc.program.cache_policy import EVERYTHING, CachePolicy, UnfitError, Visible
from llmc.program.limits import Limits

# The value of kv_compression that keeps everything.
NONE = "none"
_FORM = f"give {NONE} or NAME:OPTION=VALUE,…, such as stride:step=4,recent=512 (docs/kv-compression.md)"
# Every block size divides it.
LARGEST_BLOCK = 128


@dataclass(frozen=True)
class Compression(CachePolicy):
    """A policy that `kv_compression` can ask for. Requests choose their own, so kernels show all rows of a table."""

    NAME: ClassVar[str] = ""
    # Whether ops of the graph do the policy's work, so that an engine has to be built for it.
    IN_GRAPH: ClassVar[bool] = False
    # Whether these ops need numbers that a calibration text gives, so that the build asks for one.
    NEEDS_TEXT: ClassVar[bool] = False
    # Whether a cut may need that the model reads tokens again.
    READS_AGAIN: ClassVar[bool] = False
    # Options that are parts of the graph: requests cannot change them.
    BUILT: ClassVar[tuple[str, ...]] = ()
    # The option that says how many newest rows stay; None if there is none.
    NEWEST_BY: ClassVar[str | None] = "recent"

    @property
    def visible(self) -> Visible:
        return Visible()

    @property
    def drops_rows(self) -> bool:
        return True

    @property
    def newest(self) -> int | None:
        return 0 if self.NEWEST_BY is None else int(getattr(self, self.NEWEST_BY))

    def cut_problem(self, block_size: int) -> tuple[str, str] | None:
        """Return why it does not fit blocks of this size, and the fix, or None."""
        for name in self.in_blocks():
            size = getattr(self, name)
            if size % block_size:
                problem = f"{name}={size} is not a multiple of block_size={block_size}"
                return problem, f"give multiples of {block_size}, or build with a smaller block_size"
        return None

    def in_blocks(self) -> tuple[str, ...]:
        """The options that count rows in whole blocks."""
        return ()

    @property
    def kept_by(self) -> str:
        """The options that say how many rows stay, in words."""
        return "budget"

    @property
    def per_request(self) -> bool:
        return True

    def pool_blocks(self, limits: Limits, blocks: int) -> int:
        return blocks

    def runs(self, other: "CachePolicy") -> bool:
        """Whether an engine that was built for this policy can serve a request with another one."""
        if isinstance(other, Compression):
            return isinstance(other, type(self)) or not other.IN_GRAPH
        return other == EVERYTHING


def parse_compression(text: str, **said: int) -> CachePolicy:
    """The policy that `kv_compression` names; NONE keeps everything. said: as in CachePolicy.from_text. Raises
    OptionError."""
    if not isinstance(text, str):
        raise _unknown(text, f"it is {type(text).__name__}, and not a text")
    if text in (NONE, str(EVERYTHING)):
        return EVERYTHING
    name, known = text.partition(":")[0], sorted(compressions())
    if name == NONE:
        raise _unknown(text, f"{NONE} has no options")
    if name not in known:
        near = did_you_mean(name.lower(), (NONE, *known))
        raise _unknown(text, f"{name!r:.100} is not a policy. Policies: {', '.join((NONE, *known))}", near + _FORM)
    try:
        return CachePolicy.from_text(text, **said)
    except ValueError as error:
        other = f"give other options of {name} (docs/kv-compression.md), or {NONE}"
        fix = error.fix if isinstance(error, UnfitError) else other
        raise _unknown(text, str(error).removeprefix(f"{text!r:.200}: "), fix) from None


def fitted_compression(text: str, block_size: int) -> CachePolicy:
    """The same for blocks of this size. Raises OptionError, also for a text that names another size."""
    policy = parse_compression(text, block=block_size)
    fitted = policy.fitted(block_size)
    if fitted != policy:
        raise _unknown(text, f"blocks have {block_size} rows; block need not be given")
    return fitted


def compressions(kind: type[Compression] = Compression) -> dict[str, type[Compression]]:
    """The policies that are imported, by name."""
    found = {kind.NAME: kind} if kind.NAME else {}
    for subclass in kind.__subclasses__():
        found |= compressions(subclass)
    return found


def _unknown(text: object, problem: str, fix: str = _FORM) -> OptionError:
    return OptionError(
        f"kv_compression cannot be {text!r:.200}: {problem}",
        at=f"kv_compression={text!r:.200}",
        fix=fix,
    )


def compression_problem(built: CachePolicy, asked: CachePolicy) -> tuple[str, str] | None:
    """Return why an engine that was built for a policy cannot serve a request with another one, and the fix, or None.

    built: EVERYTHING for an engine without KV compression.
    """
    rebuilt = "build without kv_compression" if asked == EVERYTHING else f"build with kv_compression={asked.shown}"
    if not isinstance(built, Compression):
        problem = f"the engine was built without KV compression, and {asked.shown} was requested"
        return (problem, rebuilt) if asked.drops_rows else None
    if built.runs(asked):
        return None
    problem = f"the engine was built for {built.shown}, which cannot run {NONE if asked == EVERYTHING else asked.shown}"
    names = built.BUILT if type(built) is type(asked) else ()
    fixed = {name: getattr(built, name) for name in names if getattr(built, name) != getattr(asked, name)}
    if not fixed:
        return problem, rebuilt
    problem += f": {', '.join(f'{name}={value}' for name, value in fixed.items())} cannot change"
    try:
        near = replace(asked, **fixed)
    except ValueError:  # The other options do not fit these.
        return problem, rebuilt
    return problem, f"give kv_compression={near.shown}, or {rebuilt}" if built.runs(near) else rebuilt


def unused_compression(policy: CachePolicy, limits: Limits) -> str | None:
    """Return a warning if a policy drops no row of any sequence within the limits, or None."""
    longest, size = limits.max_model_len, limits.block_size
    # Rows leave soonest after a short prompt, after a prompt of about half the length, or after the longest ones.
    prompts = {1, longest // 2, (longest - 1) // size * size, longest - 1}
    if not isinstance(policy, Compression) or any(_drops(policy, prompt, longest) for prompt in prompts):
        return None
    return (
        f"kv_compression={policy.shown} has no effect: it drops no row of sequences of up to {longest} tokens "
        f"(max_model_len). Give a smaller {policy.kept_by}, or a larger max_model_len"
    )


def _drops(policy: CachePolicy, prompt: int, tokens: int) -> bool:
    """Whether a row leaves a table before the sequence has this many tokens."""
    return any(cut.dropped for _, cut in takewhile(lambda made: made[0] < tokens, policy.all_cuts(prompt)))


def check_cuts(policy: CachePolicy, block_size: int) -> None:
    """Raise OptionError for a policy that cannot cut tables with blocks of this size."""
    found = policy.cut_problem(block_size)
    if found is not None:
        raise OptionError(f"{policy.shown}: {found[0]}", at=f"kv_compression={policy.shown}", fix=found[1])


def check_newest(policy: CachePolicy, rows: int, block_size: int) -> None:
    """Raise OptionError for a policy whose cuts drop some of the newest rows, or renumber them. The arguments are those
    of newest_problem."""
    found = newest_problem(policy, rows, block_size)
    if found is not None:
        raise OptionError(found[0], at=f"kv_compression={policy.shown}", fix=found[1])


def newest_problem(policy: CachePolicy, rows: int, block_size: int) -> tuple[str, str] | None:
    """Return why the newest rows of a table cannot also be kept exact, and the fix; None if they can.

    Args:
        policy: The policy of the table.
        rows: Number of newest rows that attention reads from other caches (`kv_cache=FORMAT:recent=N`). The last rows
            of the table have to be those of the same tokens.
        block_size: Rows of a block.
    """
    if policy.renumbers:
        problem = (
            f"{policy.shown} renumbers positions, and the newest {rows} rows, which are also kept exact, keep theirs"
        )
        return problem, "build with kv_cache=FORMAT without :recent=, or with another policy"
    if policy.newest is None or policy.newest >= rows:
        return None
    problem = (
        f"{policy.shown} always keeps only the newest {policy.newest} rows, but attention reads the newest {rows} "
        "from a cache where they are exact"
    )
    fewer = "without :recent=" if not policy.newest else f"with kv_cache=FORMAT:recent={policy.newest}"
    if not isinstance(policy, Compression) or policy.NEWEST_BY is None:
        return problem, f"build {fewer}"
    least = _keeping_newest(policy, rows, block_size)
    return problem, f"build {fewer}" if least is None else f"give {least} or more, or build {fewer}"


def _keeping_newest(policy: Compression, rows: int, block_size: int) -> str | None:
    """Return the least values of options that keep this many newest rows, as `NAME=VALUE and NAME=VALUE`, or None."""
    option = policy.NEWEST_BY
    assert option is not None
    whole = -(-rows // block_size) * block_size
    changes: dict[str, Any] = {option: whole if option in policy.in_blocks() else rows}
    # A budget has to have room for them.
    more = (changes[option] + int(getattr(policy, "sinks", 0))) // block_size * block_size + block_size
    for values in (changes, changes | {"budget": more}):
        try:
            replace(policy, **values)
        except (TypeError, ValueError):
            continue
        return " and ".join(f"{name}={value}" for name, value in values.items())
    return None

"""How a quantized KV cache is spelled and how many bytes it takes; its byte layout is in ops/cache_codes.py."""

from dataclasses import dataclass

from llmc.errors import OptionError
from llmc.formats.code_format import CODE_FORMATS

CACHE_CODES = ("int8", "int4", "fp8")
# Four bits are too few for a whole head's range.
_INT4_GROUP = 32


@dataclass(frozen=True)
class CacheFormat:
    """codes: int8, int4 or fp8. group: channels that share a scale; None: all of a head's."""

    codes: str
    group: int | None

    def __str__(self) -> str:
        if self.group is None:
            return f"{self.codes}:head" if self.has_minima else self.codes
        return f"{self.codes}:g{self.group}"

    @property
    def has_minima(self) -> bool:
        """Whether each scale has a minimum beside it, which codes are counted from."""
        return self.codes == "int4"

    def groups(self, channels: int) -> int:
        """How many scales a head has at each position."""
        return 1 if self.group is None else channels // self.group

    def code_bytes(self, channels: int) -> int:
        """Of one head's codes at one position."""
        return channels * CODE_FORMATS[self.codes].bits // 8

    def position_bytes(self, channels: int) -> int:
        """Of one head at one position, scales included."""
        return self.code_bytes(channels) + self.groups(channels) * (4 if self.has_minima else 2)


def parse_cache_format(text: str) -> CacheFormat:
    """`int8`, `int4`, `fp8`, with `:gN` for groups of N channels or `:head` for one scale a head.

    Plain int4 has groups of 32 channels. Raises OptionError.
    """
    codes, *rest = text.split(":")
    if codes not in CACHE_CODES:
        raise OptionError(
            f"unknown KV cache format {text!r}",
            at=f"kv_cache={text}",
            fix=f"known: auto, {', '.join(CACHE_CODES)}; with :g32 for groups of 32 channels, :head for a scale a head",
        )
    if rest == ["head"]:
        return CacheFormat(codes, None)
    if not rest:
        return CacheFormat(codes, _INT4_GROUP if codes == "int4" else None)
    if len(rest) == 1 and rest[0][:1] == "g" and rest[0][1:].isdecimal() and int(rest[0][1:]) > 1:
        return CacheFormat(codes, int(rest[0][1:]))
    raise OptionError(
        f"{codes} has no option {':'.join(rest)!r}",
        at=f"kv_cache={text}",
        fix=f"write {codes}, {codes}:g32 or {codes}:head",
    )

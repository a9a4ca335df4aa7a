"""How a quantized KV cache is spelled and how many bytes it takes; its byte layout is in ops/cache_codes.py."""

from dataclasses import dataclass, replace

from llmc.errors import OptionError
from llmc.formats.code_format import CODE_FORMATS

CACHE_CODES = ("int8", "int4", "fp8")
# Four bits are too few for a whole head's range.
_INT4_GROUP = 32
_ROTATED = ":rotated"


@dataclass(frozen=True)
class CacheFormat:
    """How the KV cache is quantized.

    codes: int8, int4 or fp8. group: channels that share a scale; None: all of a head's. rotated: whether queries, keys
    and values are rotated before (llmc/ops/rotate_heads.py).
    """

    codes: str
    group: int | None
    rotated: bool = False

    def __str__(self) -> str:
        whole = ":head" if self.has_minima else ""
        group = whole if self.group is None else f":g{self.group}"
        return f"{self.codes}{group}{_ROTATED if self.rotated else ''}"

    @property
    def stored(self) -> str:
        """The name of the stored form in a cache, without the rotation before it."""
        return str(replace(self, rotated=False))

    @property
    def has_minima(self) -> bool:
        """Whether each scale has a minimum, from which codes are counted."""
        return self.codes == "int4"

    def groups(self, channels: int) -> int:
        """Number of scales per head and position."""
        return 1 if self.group is None else channels // self.group

    def code_bytes(self, channels: int) -> int:
        """Bytes of one head's codes at one position."""
        return channels * CODE_FORMATS[self.codes].bits // 8

    def position_bytes(self, channels: int) -> int:
        """Bytes of one head at one position, including scales."""
        return self.code_bytes(channels) + self.groups(channels) * (4 if self.has_minima else 2)


def parse_cache_format(text: str) -> CacheFormat:
    """Parse `int8`, `int4` or `fp8` with options: `:gN` or `:head`, and `:rotated`.

    Args:
        text: the format. `:gN` means one scale per N channels, `:head` one per head. The default is one per head for
            int8 and fp8, and one per 32 channels for int4.

    Raises:
        OptionError: for an unknown format or option.
    """
    codes, *options = text.split(":")
    if codes not in CACHE_CODES:
        raise OptionError(
            f"unknown KV cache format {text!r}",
            at=f"kv_cache={text}",
            fix=f"known: auto, {', '.join(CACHE_CODES)}; with :g32 for groups of 32 channels, :head for one scale "
            "per head, :rotated",
        )
    rotated = options[-1:] == [_ROTATED[1:]]
    match options[: len(options) - rotated]:
        case []:
            return CacheFormat(codes, _INT4_GROUP if codes == "int4" else None, rotated)
        case ["head"]:
            return CacheFormat(codes, None, rotated)
        case [group] if group[:1] == "g" and group[1:].isdecimal() and int(group[1:]) > 1:
            return CacheFormat(codes, int(group[1:]), rotated)
    raise OptionError(
        f"{codes} has no option {':'.join(options)!r}",
        at=f"kv_cache={text}",
        fix=f"write {codes}, {codes}:g32 or {codes}:head, with :rotated at the end or without",
    )

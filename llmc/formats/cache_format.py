"""How a quantized KV cache is spelled and how many bytes it takes; its byte layout is in ops/cache_codes.py."""

from dataclasses import dataclass, replace

from llmc.errors import OptionError
from llmc.formats.code_format import CODE_FORMATS

CACHE_CODES = ("int8", "int4", "fp8")
# Four bits are too few for a whole head's range.
_INT4_GROUP = 32
_ROTATED = ":rotated"
_RECENT = ":recent="
# Between the format of keys and that of values.
_BESIDE = "/"


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


@dataclass(frozen=True)
class CacheFormats:
    """How the caches of keys and of values are quantized.

    keys, values: their formats. Both are rotated, or neither is. recent: number of newest rows of a sequence that are
    also kept unencoded and read in the place of their codes; None: none are.
    """

    keys: CacheFormat
    values: CacheFormat
    recent: int | None = None

    def __str__(self) -> str:
        recent = "" if self.recent is None else f"{_RECENT}{self.recent}"
        if self.keys == self.values:
            return f"{self.keys}{recent}"
        return f"{replace(self.keys, rotated=False)}{_BESIDE}{self.values}{recent}"

    @property
    def of_codes(self) -> "CacheFormats":
        """The formats of the caches of codes alone."""
        return replace(self, recent=None)

    @property
    def rotated(self) -> bool:
        """Whether queries, keys and values are rotated before."""
        return self.keys.rotated

    @property
    def stored(self) -> str:
        """The name of the stored forms, without the rotation before them."""
        return self.keys.stored if self.keys == self.values else f"{self.keys.stored}{_BESIDE}{self.values.stored}"

    def of(self, part: str) -> CacheFormat:
        """The format of one of the caches. part: "k" or "v"."""
        return self.keys if part == "k" else self.values


def parse_cache_formats(text: str) -> CacheFormats:
    """Parse one format for keys and values, or `KEYS/VALUES`, such as `int8/int4:rotated`, and `:recent=N`.

    Args:
        text: the formats. `:rotated` at the end is for both, and so is `:recent=N` after it.

    Raises:
        OptionError: for an unknown format or option.
    """
    codes, is_given, rows = text.partition(_RECENT)
    if not is_given:
        return _parse_pair(codes)
    recent = _parse_recent(text, rows)
    if not codes.startswith(CACHE_CODES):
        raise OptionError(
            f"recent={recent} keeps the newest rows exact next to codes, and {codes!r} has none",
            at=f"kv_cache={text}",
            fix=f"write {codes or 'auto'}, whose rows are all exact, or codes, such as int4{_ROTATED}{_RECENT}{recent}",
        )
    return replace(_parse_pair(codes), recent=recent)


def exact_rows(kv_cache: str, *limits: int | None) -> int | None:
    """Return how many newest rows of a layer are also kept exact, apart from its codes; None if no rows are.

    Args:
        kv_cache: the formats, or `auto`.
        limits: numbers of rows beyond which the layer reads none; None or 0 for no limit. Within the newest rows there
            are no codes to keep.
    """
    rows = None if kv_cache == "auto" else parse_cache_formats(kv_cache).recent
    return None if rows is None or any(limit and limit <= rows for limit in limits) else rows


def _parse_pair(text: str) -> CacheFormats:
    before, beside, last = text.partition(_BESIDE)
    values = parse_cache_format(last if beside else before)
    if not beside:
        return CacheFormats(values, values)
    keys = parse_cache_format(before)
    if keys.rotated:
        raise OptionError(
            "keys and values are rotated together",
            at=f"kv_cache={text}",
            fix=f"write :rotated once, at the end: {keys.stored}{_BESIDE}{values.stored}{_ROTATED}",
        )
    return CacheFormats(replace(keys, rotated=values.rotated), values)


def _parse_recent(text: str, rows: str) -> int:
    # Ten digits may exceed int32, in which kernels count rows.
    if rows.isascii() and rows.isdecimal() and len(rows) <= 9 and int(rows) > 0:
        return int(rows)
    raise OptionError(
        f"recent={rows} is not a whole number from 1 to 999999999",
        at=f"kv_cache={text}",
        fix=f"write the number of newest rows that stay exact at the end, such as {_RECENT}128",
    )


def parts_of_pair(text: str | None) -> tuple[str | None, str | None]:
    """The names of the formats of keys and of values, as ops take them; None for caches of numbers."""
    if text is None:
        return None, None
    formats = parse_cache_formats(text)
    return str(formats.keys), str(formats.values)


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
            "per head, :rotated; int8/int4 for keys and values in different formats; codes with :recent=128 for exact "
            "newest rows",
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

"""How quantities are written on the command line: bytes, rates and times in units that people read."""


def in_bytes(count: float) -> str:
    """1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def in_seconds(seconds: float) -> str:
    """0.00123 → "1.23 ms"."""
    if seconds < 1e-5:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def ago(seconds: float) -> str:
    """7300 → "2 hours ago"."""
    for unit, length in (("day", 86400.0), ("hour", 3600.0), ("minute", 60.0)):
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def counted(count: int, noun: str) -> str:
    """1, "launch" → "1 launch"; 1200, "launch" → "1,200 launches"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{count:,} {noun}{ending}"

"""Format bytes, rates and times for the command line, in readable units."""


def in_bytes(count: float) -> str:
    """1500 → "1.5 kB", in decimal units, as data sheets of GPUs use."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def in_rate(bytes_a_second: float) -> str:
    """3.35e12 → "3350 GB/s"."""
    return f"{bytes_a_second / 1e9:.{0 if bytes_a_second >= 1e11 else 1}f} GB/s"


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

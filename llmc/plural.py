"""Numbers of things in words."""


def counted(count: int, noun: str) -> str:
    """1, "launch" → "1 launch"; 12, "launch" → "12 launches"."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"

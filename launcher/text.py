"""Text that a model or a data file wrote, made safe for a terminal."""


def printable(text: str) -> str:
    """Escape what could move the cursor or cannot be encoded; keep the rest as it is."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)

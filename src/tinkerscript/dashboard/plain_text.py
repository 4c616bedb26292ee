"""Text that a model or a program wrote, for the terminal: control characters could rewrite what it shows."""

from __future__ import annotations


def plain(text: str) -> str:
    """`text` with control characters, but for new lines and tabs, and lone surrogates escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """`plain(text)` with one space for all white space in a row."""
    return plain(" ".join(text.split()))

"""What people look at during a run and at its end. It only renders.

Text that a model or a program wrote goes through `plain` or `one_line`: its control characters could
rewrite the terminal.
"""

from __future__ import annotations


def plain(text: str) -> str:
    """`text` with its control characters (except newlines and tabs) and lone surrogates escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """`plain(text)`, with each run of white space as one space."""
    return plain(" ".join(text.split()))

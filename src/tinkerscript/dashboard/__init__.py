"""What people look at during a run and at its end. It only renders.

Text that a model or a program wrote goes through `plain` or `one_line`: its control characters could
rewrite the terminal.
"""

from __future__ import annotations

import re

_COMMAND = re.compile(r"((?:.*?  )?)(tinkerscript .*)")
"""A command, at the beginning of a line or behind two spaces."""

_SHELL_WORD = re.compile(r"""\s*(?:'[^']*'|"[^"]*"|[^\s'"]|['"])+""")
_WORD = re.compile(r"\s*\S+")


def plain(text: str) -> str:
    """`text` with its control characters (except newlines and tabs) and lone surrogates escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """`plain(text)`, with each run of white space as one space."""
    return plain(" ".join(text.split()))


def wrapped(text: str, width: int) -> str:
    """`text` with its lines broken between words where they are longer than `width`.

    A command, which begins a line or stands behind two spaces, goes on after a backslash, so that a shell
    takes what is copied. Words that are too long by themselves stay whole.
    """
    return "\n".join(piece for line in text.split("\n") for piece in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    if found := _COMMAND.fullmatch(line):
        label, command = found.groups()
        pieces = _filled(label, _SHELL_WORD.findall(command), " " * (len(label) + 4), width - 2)
        return [f"{piece} \\" for piece in pieces[:-1]] + pieces[-1:]
    return _filled("", _WORD.findall(line), " " * (len(line) - len(line.lstrip())), width)


def _filled(label: str, words: list[str], indent: str, width: int) -> list[str]:
    """Lines of words, each with the space before it; `indent` begins those after the first."""
    lines = [label + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) <= width:
            lines[-1] += word
        else:
            lines.append(indent + word.lstrip())
    return lines


def counted(number: int, noun: str, plural: str = "") -> str:
    """Such as `1 claim` and `1,200 claims`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"

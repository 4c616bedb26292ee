"""Terminal output of a run.

Pass foreign text through `plain` or `one_line`: control characters could rewrite the terminal.
"""

from __future__ import annotations

import re

# A command begins a line or follows two spaces.
_COMMAND = re.compile(r"((?:.*?  )?)(tinkerscript .*)")

_SHELL_WORD = re.compile(r"""\s*(?:'[^']*'|"[^"]*"|[^\s'"]|['"])+""")
_WORD = re.compile(r"\s*\S+")


def plain(text: str) -> str:
    """Escape lone surrogates and control characters, except newlines and tabs."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    return plain(" ".join(text.split()))


def wrapped(text: str, width: int) -> str:
    """Wrap between words; a longer word stays whole. Commands get a backslash at each break."""
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
    lines = [label + words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) <= width:
            lines[-1] += word
        else:
            lines.append(indent + word.lstrip())
    return lines


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 claim` or `1,200 claims`."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"

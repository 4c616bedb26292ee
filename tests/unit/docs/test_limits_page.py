"""The table of limits in docs/protocol.md is that of `limits.BOUNDS`; a failure prints the table to paste."""

from __future__ import annotations

from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.config.server_section import ClientConfig, InterchangeConfig
from tinkerscript.limits import BOUNDS, SECTION, Bound

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB"}


def default_of(bound: Bound) -> int:
    """The default of the setting that says the limit."""
    model = RunConfig
    if bound.name.startswith(SECTION):
        model = ClientConfig if ".clients." in bound.name else InterchangeConfig
    return int(model.model_fields[bound.name.rpartition(".")[2]].default)


def amount(bound: Bound) -> str:
    limit = bound.limit or default_of(bound)
    if bound.unit.startswith("bytes"):
        size, unit = next(each for each in UNITS.items() if limit % each[0] == 0)
        shown = f"{limit // size} {unit}{bound.unit.removeprefix('bytes')}"
    elif limit > 2**30 and limit & (limit + 1) == 0:
        shown = f"2^{limit.bit_length()} - 1 {bound.unit}"
    elif limit > 2**30 and limit == 10 ** (digits := len(str(limit)) - 1):
        shown = f"10^{digits} {bound.unit}"
    else:
        shown = f"{limit:,} {bound.unit}"
    return shown if bound.limit else f"{shown} by default"


def table() -> str:
    """A row for each limit of a scope, in the order of `BOUNDS`; fields with the same limit share a row."""
    scopes: dict[str, dict[int, dict[str, list[str]]]] = {}
    for bound in BOUNDS.values():
        limits = scopes.setdefault(bound.scope, {}).setdefault(bound.status, {})
        limits.setdefault(amount(bound), []).append(f"`{bound.name}`")
    lines = ["| of each (status beyond it) | limit | at most |", "|---|---|---|"]
    for scope, statuses in scopes.items():
        for status, limits in statuses.items():
            firsts = [f" {scope} ({status}) ", *[" "] * (len(limits) - 1)]
            rows = zip(firsts, limits.items(), strict=True)
            lines += [f"|{first}| {', '.join(names)} | {most} |" for first, (most, names) in rows]
    return "\n".join(lines)


def test_the_table_is_that_of_the_bounds() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Limits\n")[2].partition("\n## ")[0]
    assert table() in section, f"paste this into docs/protocol.md:\n{table()}"

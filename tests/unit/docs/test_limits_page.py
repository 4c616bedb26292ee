"""The table of limits in docs/protocol.md is that of `limits.BOUNDS`; a failure prints the table to paste."""

from __future__ import annotations

from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.config.server_section import ClientConfig, InterchangeConfig
from tinkerscript.limits import BOUNDS, SECTION, Bound

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


def default_of(bound: Bound) -> int:
    """The default of the setting that says the limit."""
    model = RunConfig
    if bound.name.startswith(SECTION):
        model = ClientConfig if ".clients." in bound.name else InterchangeConfig
    return int(model.model_fields[bound.name.rpartition(".")[2]].default)


def entry(bound: Bound) -> str:
    if not bound.limit:
        return f"`{bound.name}`: {default_of(bound):,} {bound.unit} by default"
    return f"`{bound.name}`: {bound.limit:,} {bound.unit}"


def table() -> str:
    """A row for each scope and status, in the order of `BOUNDS`."""
    rows: dict[tuple[str, int], list[str]] = {}
    for bound in BOUNDS.values():
        rows.setdefault((bound.scope, bound.status), []).append(entry(bound))
    head = ["| of each | beyond it | limits |", "|---|---|---|"]
    return "\n".join(
        [*head, *(f"| {scope} | {status} | {'; '.join(row)} |" for (scope, status), row in rows.items())]
    )


def test_the_table_is_that_of_the_bounds() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Limits\n")[2].partition("\n## ")[0]
    assert table() in section, f"paste this into docs/protocol.md:\n{table()}"

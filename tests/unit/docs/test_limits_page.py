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


def row(bound: Bound) -> str:
    limit = str(bound.limit) if bound.limit else f"{default_of(bound)} (a setting)"
    return f"| `{bound.name}` | {bound.scope} | {limit} {bound.unit} | {bound.status} |"


def test_the_table_is_that_of_the_bounds() -> None:
    table = "\n".join(
        ["| limit | of each | allows | beyond it |", "|---|---|---|---|", *map(row, BOUNDS.values())]
    )
    section = PAGE.read_text(encoding="utf-8").partition("## Limits\n")[2].partition("\n## ")[0]
    assert table in section, f"paste this into docs/protocol.md:\n{table}"

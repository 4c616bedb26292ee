"""Rollouts in the formats of other trainers. A converter that would lose something raises and names it.

`to_datum` and `to_scoring_datum` need the tinker package and are imported on first use; tables need
`tinkerscript[datasets]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkerscript.rollouts.convert.marin import to_marin_batch, to_marin_group
from tinkerscript.rollouts.convert.prime_rl import to_prime_rl
from tinkerscript.rollouts.convert.slime import to_slime
from tinkerscript.rollouts.convert.table import (
    from_dataset,
    from_table,
    read_parquet,
    to_dataset,
    to_table,
    write_parquet,
)
from tinkerscript.rollouts.convert.traits import TRAITS
from tinkerscript.rollouts.convert.verl import to_verl

if TYPE_CHECKING:
    from tinkerscript.rollouts.convert.tinker_datum import to_datum, to_scoring_datum

__all__ = [
    "TRAITS",
    "from_dataset",
    "from_table",
    "read_parquet",
    "to_dataset",
    "to_datum",
    "to_marin_batch",
    "to_marin_group",
    "to_prime_rl",
    "to_scoring_datum",
    "to_slime",
    "to_table",
    "to_verl",
    "write_parquet",
]


def __getattr__(name: str) -> object:
    if name not in {"to_datum", "to_scoring_datum"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tinkerscript.rollouts.convert import tinker_datum  # noqa: PLC0415 (needs tinker)

    return getattr(tinker_datum, name)

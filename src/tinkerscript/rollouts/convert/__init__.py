"""Rollouts in the formats of other trainers. A converter that would lose something raises and names it.

`CONVERTERS` is the table of them: a form is one module here and one entry there. A module is imported when
one of its functions is first used, since some need packages of their own: `to_datum` the tinker package,
tensors torch, tables `tinkerscript[datasets]`.
"""

from __future__ import annotations

import importlib

from tinkerscript.rollouts.convert.traits import TRAITS

__all__ = ["CONVERTERS", "TRAITS"]

CONVERTERS: dict[str, str] = {
    "from_dataset": "table",
    "from_table": "table",
    "read_parquet": "table",
    "to_areal": "areal",
    "to_dataset": "table",
    "to_datum": "tinker_datum",
    "to_marin_batch": "marin",
    "to_marin_group": "marin",
    "to_prime_rl": "prime_rl",
    "to_scoring_datum": "tinker_datum",
    "to_skyrl": "skyrl",
    "to_slime": "slime",
    "to_table": "table",
    "to_trl": "trl",
    "to_verl": "verl",
    "write_parquet": "table",
}
"""Function -> its module in this package. Each can be imported from the package, too."""


def __getattr__(name: str) -> object:
    if name not in CONVERTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{CONVERTERS[name]}"), name)

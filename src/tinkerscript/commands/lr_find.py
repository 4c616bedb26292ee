from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from tinkerscript.config import load_config
from tinkerscript.train.learning_rates import steps_at_rates

LIMIT = 0.01
"""Nats per token that a step should move at most: the lower end for PPO in OpenAI's Spinning Up."""


async def lr_find_command(run: Path, overrides: list[str], console: Console) -> int:
    table = Table("learning rate", "KL of a step", "update / weights")
    within: list[str] = []
    async for step in steps_at_rates(load_config(run / "config.yaml", overrides), run, console.print):
        ratio = "" if step.update_ratio is None else f"{step.update_ratio:.2g}"
        table.add_row(f"{step.rate:.2g}", f"{step.kl:.2g}", ratio)
        if step.kl <= LIMIT:
            within.append(f"{step.rate:.2g}")
    console.print(table)
    said = f"training.learning_rate: {within[-1]} is the highest" if within else "no rate here is low enough"
    console.print(f"{said}, at a limit of {LIMIT} nats a token", highlight=False, soft_wrap=True)
    return 0

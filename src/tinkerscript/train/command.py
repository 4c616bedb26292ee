"""What `tinkerscript train` does around a run: the terminal, and what to try next."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from tinkerscript.config import load_config
from tinkerscript.dashboard.report import print_summary
from tinkerscript.dashboard.terminal import TerminalWatcher
from tinkerscript.train.run import run_training


async def train_command(path: Path, overrides: list[str], console: Console) -> int:
    """Train; print the table. The exit code is 0, or 1 when episodes were lost."""
    config = load_config(path, overrides)
    with TerminalWatcher(console, steps=config.training.steps) as watcher:
        folder = await run_training(config, watcher)
    summary = json.loads((folder.path / "summary.json").read_text())
    print_summary(console, summary, folder.path)
    checkpoint = folder.path / "checkpoints" / "final"
    console.print(
        f"\nrun folder      {folder.path}   (learning_curve.png, rollouts/, metrics.jsonl)\n"
        f"serve the model tinkerscript serve --checkpoint {checkpoint}",
        highlight=False,
        soft_wrap=True,
    )
    return 1 if summary["episodes_lost"] else 0

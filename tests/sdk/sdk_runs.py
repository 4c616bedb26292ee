"""Runs, one after the other, with this environment's SDK: from standard input to standard output, as JSON.

A run is {"config": {...}, "resume": folder or null}, and how it went {"notes": [...], "episodes": n, "error":
text}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tinkerscript.config import RunConfig
from tinkerscript.errors import TinkerScriptError
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training


async def run(config: dict[str, Any], resume: str | None) -> dict[str, Any]:
    reporter, error = QuietReporter(), ""
    try:
        path = Path(resume) if resume else None
        await run_training(RunConfig.model_validate(config), reporter, path=path)
    except TinkerScriptError as raised:
        error = f"{type(raised).__name__}: {raised}"
    notes = [note for note in reporter.notes if not note.startswith("interchange server at")]
    return {"notes": notes, "episodes": reporter.episodes, "error": error}


async def main() -> None:
    outcomes = [await run(job["config"], job["resume"]) for job in json.load(sys.stdin)]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    asyncio.run(main())

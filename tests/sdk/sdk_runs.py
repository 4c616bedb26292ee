"""Runs, one after the other, with this environment's SDK: from standard input to standard output, as JSON.

A run is {"config": {...}, "resume": folder or null}, and how it went {"notes": [...], "episodes": n, "error":
text}. With an old SDK, the last outcome is that of `tinkerscript engine --port 0`, which cannot start then.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from tinkerscript.commands.serve_engine import serve_tinker
from tinkerscript.config import RunConfig
from tinkerscript.errors import TinkerScriptError
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training

OLD = find_spec("tinker.types.join_sampling_session_request") is None


async def run(config: dict[str, Any], resume: str | None) -> dict[str, Any]:
    reporter, error = QuietReporter(), ""
    try:
        path = Path(resume) if resume else None
        await run_training(RunConfig.model_validate(config), reporter, path=path)
    except TinkerScriptError as raised:
        error = f"{type(raised).__name__}: {raised}"
    notes = [note for note in reporter.notes if not note.startswith("interchange server at")]
    return {"notes": notes, "episodes": reporter.episodes, "error": error}


async def serve() -> str:
    try:
        await serve_tinker(
            "tiny",
            Console(file=sys.stderr),
            state_dir=Path("engine"),
            name="",
            host="127.0.0.1",
            port=0,
            full=False,
            threads=1,
            max_batch=1,
            max_runs=1,
            device="cpu",
            dtype="float32",
            activation_checkpointing=False,
        )
    except TinkerScriptError as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def main() -> None:
    outcomes = [await run(job["config"], job["resume"]) for job in json.load(sys.stdin)]
    if OLD:
        outcomes.append({"notes": [], "episodes": 0, "error": await serve()})
    print(json.dumps(outcomes))


if __name__ == "__main__":
    asyncio.run(main())

"""The addition problems and their split, taken from `examples/arithmetic.py`, which owns the rule."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

TASK_FILE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic.py"

Pair = tuple[int, int]


def _load_task() -> object:
    spec = importlib.util.spec_from_file_location("arithmetic", TASK_FILE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"cannot load {TASK_FILE}; run the script from a checkout that has examples/")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_task = _load_task()
question: Callable[[int, int], str] = _task.question  # type: ignore[attr-defined]
split_pairs: Callable[[str], list[Pair]] = _task.split_pairs  # type: ignore[attr-defined]

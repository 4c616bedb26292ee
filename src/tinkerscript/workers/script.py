"""Loading a user's Python file: a worker's script, or one with a task in it.

Invariant: a file that cannot be used raises a WorkerError that says what it, or its folder, holds instead.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from tinkerscript.client.episode import RolloutFunction
from tinkerscript.errors import WorkerError

FUNCTION = "rollout"


def load_rollout(script: str | Path) -> RolloutFunction:
    """The `rollout` function of a script, plain or async.

    The script's folder comes first in `sys.path`, as when Python runs the script. Raises WorkerError for a
    missing file or function, listing what is there, and for a script that cannot be imported.
    """
    path = Path(script).expanduser().resolve()
    module = load_module(path)
    rollout: Any = getattr(module, FUNCTION, None)
    if not callable(rollout):
        raise WorkerError(f"{path} defines no function {FUNCTION}(episode); it defines {_functions(module)}")
    _check_signature(path, rollout)
    return cast("RolloutFunction", rollout)


def load_module(path: Path) -> ModuleType:
    """The module of a Python file. Raises WorkerError for a file that is missing or cannot be imported."""
    path = path.resolve()
    if not path.is_file():
        raise WorkerError(f"no script at {path}; {_beside(path)}")
    name = f"tinkerscript_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WorkerError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, so that dataclasses and pickling inside the script find their module.
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise WorkerError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _check_signature(path: Path, rollout: Callable[..., object]) -> None:
    try:
        inspect.signature(rollout).bind(object())
    except TypeError as error:
        raise WorkerError(f"{path}: {FUNCTION} must take one argument, the episode: {error}") from error


def _functions(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return ", ".join(sorted(names)) or "no function"


def _beside(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    scripts = sorted(file.name for file in path.parent.glob("*.py"))
    return f"{path.parent} holds {', '.join(scripts[:20]) or 'no Python file'}"

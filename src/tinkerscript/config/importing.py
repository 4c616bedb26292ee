"""`import_name`: code of the user's own that a config names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from tinkerscript.errors import ConfigError


def import_name(text: str, *, what: str) -> object:
    """The object that `text` names in the user's own code: `module:name`, or `path/to/file.py:name`.

    `what`: the config key it comes from. Raises ConfigError with both, for a name that cannot be imported.
    """
    source, separator, name = text.rpartition(":")
    if not (separator and source and name):
        raise ConfigError(f"{what}: {text!r} is not of the form module:name or file.py:name")
    try:
        return getattr(_module_from(source), name)
    except Exception as error:
        remedy = "check the path" if source.endswith(".py") else f"is {source} installed or on PYTHONPATH?"
        if not isinstance(error, ImportError | AttributeError | OSError):
            remedy = f"importing it raised {type(error).__name__}"
        raise ConfigError(f"{what}: cannot import {text!r}: {error}; {remedy}") from error


def _module_from(source: str) -> Any:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).expanduser()
    spec = importlib.util.spec_from_file_location(f"_user_code_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up there.
    spec.loader.exec_module(module)
    return module

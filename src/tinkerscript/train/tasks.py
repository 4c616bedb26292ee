"""Loading a task that the user names: whatever goes wrong there is one line that says where."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from inspect_tinker_bridge import BridgeError, InspectTaskInfo, load_inspect_task
from tinkerscript.errors import ConfigError


def load_task(name: str, args: Mapping[str, Any]) -> InspectTaskInfo:
    """The task, made with `args`. Raises ConfigError, also for what the task's own code raises."""
    try:
        return load_inspect_task(name, **args)
    except BridgeError as error:
        raise ConfigError(f"task: {error}") from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"task: {name!r} with {dict(args)} raised {type(error).__name__}: {error} "
            f"({where.filename}, line {where.lineno})"
        ) from error

"""`verifiers:ENV`: environments of the verifiers library, with their own dataset, rollout and rubric.

Which API a package is written for decides what runs it: `verifiers_slots` (0.4), or `verifiers_legacy` (a
package with a `load_environment`, which verifiers 0.3 still runs).
"""

# verifiers is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import verifiers

from tinkerscript.errors import ConfigError
from tinkerscript.workers.base_task import Task

BUNDLED = "verifiers.v1.tasksets"


def load_verifiers(environment: str, /, **args: Any) -> Task:
    """The environment, by the API that its package is written for.

    Raises ConfigError for one that is not installed, one of another API than the installed verifiers', and
    what the environment refuses.
    """
    if not _is_legacy(environment):
        environments: Any = importlib.import_module("tinkerscript.workers.environments.verifiers_slots")
        return environments.VerifiersEnvironment(environment, **args)
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError(
            f"verifiers:{environment} is written for an API that verifiers {verifiers.__version__} no longer "
            "has: pip install 'verifiers<0.4', in an environment of its own"
        )
    legacy: Any = importlib.import_module("tinkerscript.workers.environments.verifiers_legacy")
    return legacy.LegacyEnvironment(environment, **args)


def _is_legacy(environment: str) -> bool:
    """Whether the environment's package has a `load_environment`. Raises ConfigError if it is not
    installed."""
    name = environment.rpartition("/")[2].partition("@")[0].replace("-", "_")
    if name.isidentifier() and find_spec(f"{BUNDLED}.{name}") is not None:
        return False
    try:
        return hasattr(importlib.import_module(name), "load_environment")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"verifiers:{environment} needs the module {error.name!r}, which is not installed: install the "
            "environment's package"
        ) from error

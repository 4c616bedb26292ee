"""`tinkerscript init`: an example to start from."""

from __future__ import annotations

import shutil
from pathlib import Path

from tinkerscript.errors import ConfigError

STARTER = Path(__file__).parents[1] / "starter"
FILES = ("task.py", "train.yaml", "agent.py")


def write_example(folder: Path) -> str:
    """Write `FILES` to `folder`; returns what to do with them. Raises ConfigError if one exists."""
    if existing := [name for name in FILES if (folder / name).exists()]:
        raise ConfigError(f"{folder} already has {', '.join(existing)}; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            shutil.copyfile(STARTER / name, folder / name)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    config, agent = folder / "train.yaml", folder / "agent.py"
    return (
        f"wrote {', '.join(FILES)} to {folder.resolve()}\n\n"
        f"train on the task         tinkerscript train {config}\n"
        f"look at what happened     tinkerscript show runs/latest\n"
        f"let the agent solve it    tinkerscript train {config} --set workers.script={agent}"
    )

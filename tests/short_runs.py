"""Short runs of the demo in this process, whole or cut in the middle, and the curves that they leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinkerscript.config import RunConfig
from tinkerscript.testing import QuietReporter

ARITHMETIC = Path(__file__).parents[1] / "examples" / "arithmetic.py"


def short_run(folder: Path | str, *, networked: bool = False, **sections: Any) -> RunConfig:
    """A config of the demo without evaluations; with `networked`, a server and a worker run its episodes."""
    config: dict[str, Any] = {
        "experiment_dir": str(folder),
        "enable_tinkerscript_mode": networked,
        "task": {"name": f"{ARITHMETIC}@arithmetic"},
        "evaluation": {"episodes": 0},
        "interchange_server": {"interchange_server_port": 0},
    }
    if networked:
        config["workers"] = {"count": 1, "concurrency": 8}
    for name, section in sections.items():
        whole = isinstance(section, dict) and isinstance(config.get(name), dict)
        config[name] = config[name] | section if whole else section
    return RunConfig.model_validate(config)


def curve(folder: Path) -> list[dict[str, float]]:
    """What a run logged: a line of metrics for each step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class CutError(Exception):
    """The run ends here."""


class Cut(QuietReporter):
    """Ends the run when so many episodes have ended."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def advance(self, episodes: int) -> None:
        super().advance(episodes)
        if self.episodes >= self._after:
            raise CutError

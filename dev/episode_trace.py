"""What an episode passes: the modules at work between its claim and the published weights, in a real run.

`tinkerscript train` runs one step of the demo's task over the network, with one local worker and without an
evaluation. Each process records which modules of `src/` are at work and when (`tracer/sitecustomize.py`); the
time between the first claim and the publication of the trained weights is cut out of these records.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from source_tree import Module, read_modules

TRACER = Path(__file__).parent / "tracer"
TIMEOUT_S = 240.0
PUBLISHER = "tinkerscript/train/"
"""Where the `publish` is whose return ends the trace."""

PROCESSES = {
    "worker": "claims an episode, runs its program, and hands in the result",
    "server": "hands episodes out, answers their model calls, and delivers their outcomes to the trainer",
    "trainer": "samples, collects the outcomes, trains on them, and publishes the weights",
}
SETTINGS = {
    "experiment_dir": "run",
    "interchange_server.interchange_server_port": 0,
    "training.steps": 1,
    "training.groups_per_step": 1,
    "training.group_size": 2,
    "training.minibatches": 1,
    "evaluation.episodes": 0,
    "evaluation.every_steps": 0,
    "workers.count": 1,
    "workers.concurrency": 8,
}


@dataclass(frozen=True)
class EpisodeTrace:
    """The modules that one training step's episodes pass."""

    stops: Mapping[str, Mapping[str, float]]
    """Process -> module -> seconds from the first claim until it is first at work; in this order."""

    modules: Mapping[str, Module]

    @property
    def union(self) -> set[str]:
        """The modules of all processes."""
        return {name for names in self.stops.values() for name in names}

    def lines(self, names: set[str]) -> int:
        """Physical lines of these modules."""
        return sum(self.modules[name].lines for name in names)

    def as_text(self) -> str:
        """Every stop with what its module says that it is."""
        parts = [f"An episode passes {len(self.union)} modules ({self.lines(self.union)} lines)."]
        for process, stops in self.stops.items():
            size = f"{len(stops)} modules, {self.lines(set(stops))} lines"
            parts.append(f"\n{process} ({size}) {PROCESSES[process]}")
            parts += [f"{at:8.3f} s  {name:44} {self.modules[name].summary}" for name, at in stops.items()]
        return "\n".join(parts)


def trace_episode(root: Path) -> EpisodeTrace:
    """Train one step with the `src/` and the demo of a checkout. Raises RuntimeError if it fails."""
    modules = read_modules(root / "src")
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trace").mkdir()
        _train(root, folder)
        return EpisodeTrace(stops_of(folder / "trace", modules), modules)


def _train(root: Path, folder: Path) -> None:
    path = [str(TRACER), str(root / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "EPISODE_TRACE": str(folder / "trace"),
        "EPISODE_TRACE_SRC": str(root / "src"),
    }
    examples = root / "examples"
    settings = {"task.name": f"{examples / 'arithmetic.py'}@arithmetic", **SETTINGS}
    options = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "tinkerscript", "train", str(examples / "arithmetic.yaml"), *options]
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if run.returncode not in (0, 3):  # 3: two episodes whose rewards are equal train nothing.
        raise RuntimeError(
            f"the traced run ended with exit status {run.returncode}:\n{run.stdout}{run.stderr}"
        )


Events = dict[str, list[tuple[int, str]]]
"""Kind -> when, and in which file."""


def stops_of(folder: Path, modules: Mapping[str, Module]) -> dict[str, dict[str, float]]:
    """Cut the window out of what every process recorded. Raises RuntimeError if its ends are not there."""
    processes = [_events(path) for path in folder.iterdir()]
    claims = [at for events in processes for at, _ in events["claim"]]
    published = [at for events in processes for at, _ in _publications(events)]
    if not claims or not published:
        raise RuntimeError(
            f"the run made {len(claims)} claims and returned {len(published)} times from a `publish` of "
            f"{PUBLISHER}: adapt PUBLISHER and tracer/sitecustomize.py to where they are made now"
        )
    start, end = min(claims), max(published)
    names = {module.path.as_posix(): name for name, module in modules.items()}
    stops: dict[str, dict[str, float]] = {process: {} for process in PROCESSES}
    for events in processes:
        process = "worker" if events["claim"] else "trainer" if _publications(events) else "server"
        for at, file in events["run"]:
            if start <= at <= end:
                stops[process].setdefault(names[file], (at - start) / 1e9)
    return stops


def _events(path: Path) -> Events:
    events: Events = defaultdict(list)
    for line in path.read_text().splitlines():
        kind, at, file = line.split(" ", 2)
        events[kind].append((int(at), file))
    return events


def _publications(events: Events) -> list[tuple[int, str]]:
    return [(at, file) for at, file in events["publish"] if file.startswith(PUBLISHER)]

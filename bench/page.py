"""What the page of a run costs: its reader's time, its server's, and the run's.

    python bench/page.py [--scale F] [--rounds N] [--parts reader streams stalls recording] [--runs FOLDER]

`reader`: a run of 10,000 steps and 1,000,000 episodes, made from a seed, behind a real `tinkerscript view`,
in Chromium. The reference is a run of 30 steps and 1,920 episodes in the same rounds: a screen should take
the same time. `streams` and `stalls`: see `event_streams.py`; `recording`: see `recording_cost.py`.
`--scale 0.01` makes 100 steps and 10,000 episodes. `--runs` keeps the made runs for another time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import uvloop

from browsing_speed import Reader, Screen, chromium, reader
from event_streams import noted, page_stalls, server_stalls, streams_part, viewed
from recording_cost import long_episode, recording_part, written

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))


from made_run import MadeRun  # noqa: E402
from tinkerscript.files import LEDGER_FILE  # noqa: E402
from tinkerscript.ledger.reader import LedgerReader  # noqa: E402

STEPS, GROUPS, GROUP_SIZE = 10_000, 10, 10
TOKENS_EVERY = 10
"""Of the large run's episodes of training, one in so many has its calls and tokens; evaluations' all have."""

SCROLLED = ("steps", "episodes", "search, a word", "evaluations", "alignment")
PAGE = 50
MORE = 8
"""Times that "Show more" is clicked before a list is scrolled: 450 rows."""

TURNS, TOKENS = 100, 50_000
"""Of the long episode."""

CURVES = ("reward/mean", "eval/score", "train/entropy", "train/loss", "time/rollout_s", "turns/mean")
LARGE, SMALL = "large", "small"
MADE = "made.json"


@dataclass
class Made:
    """What was made."""

    folder: Path
    steps: int
    facts: dict[str, Any]

    @property
    def long_episode(self) -> str:
        return self.facts["long_episode"]


def made_runs(folder: Path, scale: float) -> Made:
    """The large run and the small one in `folder`, made unless they are there."""
    steps = max(1, round(STEPS * scale))
    note = folder / MADE
    if note.exists():
        facts = json.loads(note.read_text())
        if facts["steps"] != steps:
            raise SystemExit(
                f"{folder} has a run of {facts['steps']} steps; remove it, or choose another folder"
            )
        return Made(folder, steps, facts)
    began = time.process_time()
    large = MadeRun(
        folder / LARGE, steps=steps, groups=GROUPS, group_size=GROUP_SIZE, tokens_every=TOKENS_EVERY
    )
    large.write()
    facts: dict[str, Any] = {
        "steps": steps,
        "long_episode": large.long_episode(turns=TURNS, tokens=TOKENS),
        "episodes": LedgerReader(folder / LARGE).number("SELECT count(*) FROM episodes"),
        "made_cpu_s": round(time.process_time() - began),
        "ledger_mb": round((folder / LARGE / LEDGER_FILE).stat().st_size / 1e6),
    }
    MadeRun(folder / SMALL).write()
    note.write_text(json.dumps(facts))
    return Made(folder, steps, facts)


def evaluated_sample(folder: Path) -> str:
    """The digest of a sample of every evaluation."""
    found = LedgerReader(folder).row(
        "SELECT sample FROM episodes WHERE step = 0 AND label = 'before' LIMIT 1"
    )
    assert found is not None
    return found[0].hex()


def screens(step: int, sample: str) -> list[Screen]:
    """What is opened in every run, with a step in its middle."""
    rows = "document.querySelectorAll('tbody tr').length"
    charts = "document.querySelectorAll('.chart canvas').length"
    return [
        Screen("step", f"steps/{step}", "document.querySelectorAll('a.cell').length >= 64"),
        Screen("steps", "steps", f"{rows} > 20"),
        Screen("episodes", "episodes", f"{rows} >= 50"),
        Screen("failed episodes", "episodes?show=failed", f"{rows} > 20"),
        Screen("cut-off episodes", "episodes?show=truncated", f"{rows} > 3"),
        Screen("search, a word", "episodes?q=calculator", f"{rows} >= 50"),
        Screen("search, a word in a step", f"episodes?q=calculator%20step%3D{step}", rows),
        Screen("search, a condition", "episodes?q=reward%3D0", f"{rows} >= 50"),
        Screen("all curves", "curves", f"{charts} >= 20"),
        Screen("evaluations", "evaluations", f"{charts} && {rows} > 20"),
        Screen("alignment", "alignment", f"{charts} >= 3"),
        Screen("sample", f"samples/{sample}", f"{charts} && {rows} >= 3"),
    ]


@dataclass
class Figures:
    """By name, the values of the rounds."""

    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    def add(self, name: str, value: float) -> None:
        self.values.setdefault(name, []).append(value)

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(values), 3) for name, values in self.values.items()}


class Costs:
    """Processor time, of the tab's main thread and of the page's process, between two looks."""

    def __init__(self, tab: Reader, process: psutil.Process) -> None:
        self._tab = tab
        self._process = process
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return self._tab.cpu_ms(), 1000 * (times.user + times.system)

    def since(self) -> tuple[float, float]:
        before, self._before = self._before, self._now()
        tab = self._before[0] - before[0]
        return tab if tab >= 0 else self._before[0], self._before[1] - before[1]  # A reload begins at 0.


class Rounds:
    """What the rounds of one run found."""

    def __init__(self, folder: Path, run: str, step: int) -> None:
        self.run = run
        self.screens = screens(step, evaluated_sample(folder / run))
        self.times = Figures()
        self.cpu = Figures()
        """Of tab and page process together."""

        self.others = Figures()

    def read(self, tab: Reader, process: psutil.Process) -> None:
        """A first visit, a reload, every screen."""
        costs = Costs(tab, process)

        def add(name: str, shown_ms: float) -> None:
            self.times.add(name, shown_ms)
            self.cpu.add(name, sum(costs.since()))
            self.others.add("nodes", tab.nodes())

        shown, received = tab.first_screen(self.run)
        add("first screen", shown)
        self.others.add("first screen, kB", received / 1000)
        add("reload", tab.reload())
        for screen in self.screens:
            add(screen.name, tab.open(self.run, screen))

    def read_long_episode(self, tab: Reader, process: psutil.Process, uuid: str) -> None:
        """Open the long episode, and go through its tokens."""
        ready = "document.querySelectorAll('.message').length >= 40 && document.querySelector('.tokens .t')"
        costs = Costs(tab, process)
        self.times.add("long episode", tab.open("", Screen("episode", f"#/episode/{uuid}", ready)))
        self.cpu.add("long episode", sum(costs.since()))
        self._scroll(tab, "tokens", ".tokens")

    def scroll_lists(self, tab: Reader) -> None:
        for screen in self.screens:
            if screen.name in SCROLLED:
                tab.open(self.run, screen)
                rows = sum(tab.more() for _ in range(MORE)) * PAGE + PAGE
                if screen.name == "episodes":
                    self.others.add("rows after 'Show more'", rows)
                self._scroll(tab, "lists", "html")
        tab.blank()
        self._scroll(tab, "plain text", "html")

    def _scroll(self, tab: Reader, name: str, box: str) -> None:
        found = tab.scroll(box)
        self.others.add(f"{name}: frames within 33 ms", found.within_33_ms)
        self.others.add(f"{name}: longest frame, ms", found.longest_ms)
        self.others.add("nodes", found.nodes)


def reader_part(made: Made, rounds: int) -> dict[str, Any]:
    """Medians of the large run, and its ratios to the small one's."""
    with viewed(made.folder) as (url, process), chromium() as browser:
        for number in range(rounds + 1 if rounds > 1 else 1):
            if number < 2:  # The first of several rounds warms up.
                large = Rounds(made.folder, LARGE, made.steps // 2 + 1)
                small = Rounds(made.folder, SMALL, 15)
            for each in (large, small)[:: 1 if number % 2 else -1]:
                with reader(browser, url) as tab:
                    each.read(tab, process)
            with reader(browser, url) as tab:
                tab.first_screen(LARGE)
                large.read_long_episode(tab, process, made.long_episode)
                large.scroll_lists(tab)
        memory = process.memory_full_info().uss / 2**20
    return {
        "screens": {
            name: {
                "ms": value,
                "of the small run's": round(value / small.times.medians()[name], 2)
                if name in small.times.values
                else None,
                "processor ms": large.cpu.medians()[name],
            }
            for name, value in large.times.medians().items()
        },
        "others": large.others.medians(),
        "most nodes": max(large.others.values["nodes"]),
        "page process, MiB": round(memory),
    }


def loops_part(made: Made, claims: int) -> dict[str, Any]:
    """The longest turns of the server's loop and of the page's."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found: dict[str, Any] = {"server": runner.run(server_stalls(claims))}
        with (
            tempfile.TemporaryDirectory() as name,
            noted(Path(name)) as notes,
            viewed(made.folder) as (url, _),
        ):
            run, sample = f"/api/runs/{LARGE}", evaluated_sample(made.folder / LARGE)
            names = "&".join(f"name={each}" for each in CURVES)
            paths = [
                *(run, "/api/runs", f"{run}/metrics", f"{run}/curves?points=300&{names}", f"{run}/steps"),
                *(f"{run}/steps/{made.steps // 2 + 1}", f"{run}/evaluations", f"{run}/comparison"),
                *(
                    f"{run}/samples/{sample}",
                    f"{run}/episodes",
                    f"{run}/episodes?show=truncated",
                ),
                *(f"{run}/search?q=calculator", f"{run}/alignment", f"/api/episodes/{made.long_episode}"),
                *(f"/api/episodes/{made.long_episode}/tokens?start=0&end=8192", "/page/vendor/uplot.js"),
            ]
            found["page"] = runner.run(page_stalls(url, notes, LARGE, paths))
    return found


PARTS = ("reader", "streams", "stalls", "recording")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the run's steps")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000, help="claims of each load")
    parser.add_argument("--claims", type=int, default=20_000, help="open ones under GET /fleet")
    parser.add_argument("--train-steps", type=int, default=5, help="of each run whose recording is measured")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--runs", type=Path, help="folder that keeps the made runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        made = made_runs(options.runs or Path(name), options.scale)
        tell("made", made.facts)
        if "reader" in options.parts:
            tell("reader", reader_part(made, options.rounds))
        if "streams" in options.parts:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                tell("streams", runner.run(streams_part(options.rounds, options.requests)))
        if "stalls" in options.parts:
            tell("stalls", loops_part(made, options.claims))
        if "recording" in options.parts:
            tell("writing", written(made.folder / SMALL, options.rounds))
            tell("recording", recording_part(options.rounds, options.train_steps))
            tell("long episode", long_episode(made.folder / LARGE, made.long_episode))


def tell(name: str, found: dict[str, Any]) -> None:
    print(json.dumps({name: found}, indent=1), flush=True)


if __name__ == "__main__":
    main()

"""`tinkerscript show`: what the page of a run shows, in a terminal or as JSON, also while the run goes on.

Invariant: it reads a run by the page's views alone, so that `--json` is what the page's API answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from rich.console import Console

from tinkerscript.commands.episode_text import print_episode, print_tokens
from tinkerscript.commands.run_text import (
    print_alignment,
    print_comparison,
    print_episodes,
    print_findings,
    print_run,
    print_runs,
    print_step,
    print_steps,
)
from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.page.episode_view import EpisodeView, episode_view, find_episode
from tinkerscript.page.findings import AlignmentView, FindingPage, alignment_view, found_in
from tinkerscript.page.held_out import Change, Comparison, ComparisonQuery, compare
from tinkerscript.page.lines import EpisodePage, Show, newest
from tinkerscript.page.overview import RunView, evaluations, overview, run_list
from tinkerscript.page.search import SearchPage, search
from tinkerscript.page.steps import GroupFilter, Step, StepPage, step_page, step_view
from tinkerscript.page.token_view import Tokens, token_view
from tinkerscript.record.reader import Record, find_runs
from tinkerscript.record.schema import RECORD_FILE

TEXTS: dict[type[BaseModel], Callable[[Any, Console], None]] = {
    StepPage: print_steps,
    Step: print_step,
    EpisodePage: print_episodes,
    SearchPage: print_episodes,
    Comparison: print_comparison,
    AlignmentView: print_alignment,
    FindingPage: print_findings,
}
"""What prints a view that needs nothing else."""

PIPE_COLUMNS = 120
"""At least, for tables that no terminal shows."""

TOKENS_SHOWN = 1000
"""Of each sequence below an episode."""

EPISODES_NAMED = 5
"""In the message about one that there is not."""


@dataclass(frozen=True)
class Wanted:
    """What of a run to show; without any of these, its first screen."""

    episode: str = ""
    """The beginning of a uuid."""

    sequence: int | None = None
    """Of the episode: the tokens of this training sequence."""

    steps: bool = False
    step: str = ""
    """A number, or the label of an evaluation."""

    episodes: bool = False
    search: str | None = None
    compare: str = ""
    """Two labels as `before..after`; where one is missing, the first or the last evaluation."""

    findings: bool = False
    finding: str = ""
    """Such as `warning/not_canonical`."""

    filter: str = "all"
    limit: int = 50
    start: int | None = None
    """`next` of the page before."""

    color_by: str = "logprob"

    def views(self) -> list[str]:
        """The options that ask for a view of their own."""
        given = {
            "EPISODE": self.episode,
            "--steps": self.steps,
            "--step": self.step,
            "--episodes": self.episodes,
            "--search": self.search is not None,
            "--compare": self.compare,
            "--findings": self.findings,
            "--finding": self.finding,
        }
        return [name for name, value in given.items() if value]


def show_command(root: Path, wanted: Wanted, console: Console, *, as_json: bool) -> int:
    """Print a view of the run in `root`, or of the runs. Raises ConfigError, and NotRecordedError for what a
    run has not."""
    if len(wanted.views()) > 1:
        raise ConfigError(f"{' and '.join(wanted.views())} are views of their own: give one at a time")
    if wanted.sequence is not None and not wanted.episode:
        raise ConfigError("--sequence is of an EPISODE: give the beginning of its uuid")
    if not console.is_terminal:
        console.width = max(console.width, PIPE_COLUMNS)
    runs = runs_in(root)
    if len(runs) > 1 or not ((root / RECORD_FILE).is_file() or wanted.views()):
        if wanted.views():
            raise ConfigError(
                f"{root} has {len(runs)} runs; name one, such as {next(reversed(runs.values()))}"
            )
        listed = run_list({name: Record(folder) for name, folder in runs.items()})
        if as_json:
            _print_json(listed, console)
        else:
            print_runs(listed, console)
        return 0
    ((name, folder),) = runs.items()
    record = Record(folder)
    view = _view(name, record, wanted)
    if as_json:
        _print_json(view, console)
    else:
        _print(view, record, wanted, console, root)
    return 0


def _print_json(view: BaseModel, console: Console) -> None:
    console.file.write(f"{view.model_dump_json()}\n")


def _print(view: BaseModel, record: Record, wanted: Wanted, console: Console, root: Path) -> None:
    if isinstance(view, RunView):
        print_run(view, step_page(record, limit=wanted.limit), console, root)
    elif isinstance(view, EpisodeView):
        print_episode(view, _tokens(record, view, console), console, wanted.color_by)
    elif isinstance(view, Tokens):
        print_tokens(view, console, wanted.color_by)
    elif isinstance(view, Step) and not view.groups and record.facts().get("recording") == "off":
        print_step(view, console)
        console.print("This run keeps no episodes (recording: off); journal.jsonl has them.")
    else:
        TEXTS[type(view)](view, console)


def _tokens(record: Record, view: EpisodeView, console: Console) -> list[Tokens]:
    """The beginning of each sequence's tokens, for a terminal with colors."""
    if console.color_system is None or console.no_color or not view.recorded:
        return []
    uuid = view.line.uuid
    return [token_view(record, uuid, sequence.number, end=TOKENS_SHOWN) for sequence in view.sequences]


def runs_in(root: Path) -> dict[str, Path]:
    """Name -> folder. Raises ConfigError that names what is there instead."""
    if not root.exists():
        there = sorted(path.name for path in root.parent.glob("*") if path.is_dir())[-5:]
        has = f"; {root.parent} has {', '.join(there)}" if there else ""
        raise ConfigError(f"there is no {root}{has}")
    try:
        return find_runs(root)
    except ConfigError as error:
        if (root / "journal.jsonl").is_file():
            raise ConfigError(
                f"{root} has no record (record.sqlite): an earlier version made this run, or no trainer "
                "has begun it. Its steps are in metrics.jsonl, its episodes in journal.jsonl and rollouts/"
            ) from error
        raise


def _view(name: str, record: Record, wanted: Wanted) -> BaseModel:
    limit, start = wanted.limit, wanted.start
    if wanted.episode:
        uuid = _episode(record, wanted.episode)
        if wanted.sequence is not None:
            return token_view(record, uuid, wanted.sequence, start=start or 0)
        return episode_view(name, record, uuid)
    if wanted.steps:
        return step_page(record, before=start, limit=limit)
    if wanted.step:
        return _step(record, wanted)
    if wanted.episodes:
        return newest(record, show=_filter(wanted, Show), before=start, limit=limit)
    if wanted.search is not None:
        return search(record, wanted.search, before=start, limit=limit)
    if wanted.compare:
        before, dots, after = wanted.compare.partition("..")
        if not dots:
            raise ConfigError(
                f"--compare: give two evaluations such as before..after, not {wanted.compare!r}"
            )
        show = _filter(wanted, Change, "all")
        return compare(record, ComparisonQuery(before=before, after=after, show=show, offset=start or 0))
    if wanted.finding:
        return found_in(record, *_kind_and_name(wanted.finding))
    return alignment_view(record) if wanted.findings else overview(name, record)


def _filter(wanted: Wanted, kind: Any, *more: str) -> Any:
    known = [*more, *get_args(kind)]
    if wanted.filter not in known:
        raise ConfigError(f"--filter: {wanted.filter!r} is none of {', '.join(known)}, which fit here")
    return wanted.filter


def _kind_and_name(finding: str) -> tuple[str, str]:
    kind, slash, name = finding.partition("/")
    if not slash:
        raise ConfigError(f"--finding: give it as --findings lists it, such as warning/{finding}")
    return kind, name


def _episode(record: Record, prefix: str) -> str:
    """Raises NotRecordedError that names episodes that there are."""
    try:
        return find_episode(record, prefix)
    except NotRecordedError as error:
        some = [line.uuid[:8] for line in newest(record, limit=EPISODES_NAMED).episodes]
        if "several" in str(error):
            raise
        has = f"the newest are {', '.join(some)}" if some else no_episodes(record)
        raise NotRecordedError(f"{error} in {record.folder}; {has}") from error


def no_episodes(record: Record) -> str:
    """Why a record has no episode."""
    if record.facts().get("recording") == "off":
        return "it keeps none (recording: off); journal.jsonl has them"
    return "none has ended yet"


def _step(record: Record, wanted: Wanted) -> BaseModel:
    """A step, or the episodes of an evaluation. Raises NotRecordedError that names those that there are."""
    every = {each.label: each for each in evaluations(record)}
    if wanted.step in every:
        query = f"label:{wanted.step} step={every[wanted.step].step}"
        return search(record, query, before=wanted.start, limit=wanted.limit)
    last = record.number("SELECT max(step) FROM steps")
    if wanted.step.isdecimal() and last is not None and 0 < int(wanted.step) <= last:
        show = _filter(wanted, GroupFilter)
        return step_view(record, int(wanted.step), show=show, offset=wanted.start or 0)
    steps = f"steps 1 to {int(last)}" if last else "no finished step"
    labels = f", and the evaluations {', '.join(every)}" if every else ""
    raise NotRecordedError(f"--step: the run has no {wanted.step!r}; it has {steps}{labels}")

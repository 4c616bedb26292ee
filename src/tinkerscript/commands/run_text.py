"""The page's views of a run as text: its first screen, steps, evaluations, episodes in a list, findings.

Invariant: text that a model or a program wrote is shown as text. Control characters are escaped: they could
rewrite the reader's terminal.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerscript.dashboard.plain_text import one_line, plain
from tinkerscript.dashboard.run_table import whole_time
from tinkerscript.page.findings import AlignmentView, FindingPage
from tinkerscript.page.held_out import Comparison
from tinkerscript.page.lines import EpisodeLine, EpisodePage
from tinkerscript.page.overview import RunList, RunView
from tinkerscript.page.search import SearchPage
from tinkerscript.page.steps import Step, StepPage

STATES = {"running": "green", "finished": "", "stopped": "yellow", "failed": "red"}


def say(console: Console, text: str | Text, style: str = "") -> None:
    """Print a line, or lines, as they are."""
    shown = plain(text) if isinstance(text, str) else text
    console.print(shown, style=style, highlight=False, soft_wrap=True, markup=False)


def number(value: float | None, text: str = "{:.3f}") -> str:
    return "" if value is None else text.format(value)


def table(*titles: str) -> Table:
    """Columns of which the last one takes what room is left. A column of numbers begins with a `>`."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for each in titles:
        is_last = each is titles[-1]
        made.add_column(
            each.removeprefix(">"),
            justify="right" if each.startswith(">") else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if is_last and not each.startswith(">") else None,
        )
    made.expand = not titles[-1].startswith(">")
    return made


def row(*cells: str | Text) -> list[Text]:
    return [cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in cells]


def print_runs(view: RunList, console: Console) -> None:
    shown = table("run", "state", ">step", ">held out", ">reward", "model and tasks")
    for run in view.runs:
        score = f"{number(run.score_before)} → {number(run.score)}" if run.score is not None else ""
        what = f"{run.model}: {', '.join(Path(task).name for task in run.tasks) or run.method}"
        state = Text(run.state, STATES[run.state])
        shown.add_row(*row(run.name, state, f"{run.step}/{run.steps}", score, number(run.reward), what))
    console.print(shown)


def print_run(view: RunView, steps: StepPage, console: Console, root: Path) -> None:
    """The first screen, and the last steps. `root`: what the user called the run."""
    tasks = ", ".join(Path(task).name for task in view.tasks)
    say(console, Text(one_line(view.folder), "bold"))
    say(console, f"{view.method} of {view.model}" + (f" on {tasks}" if tasks else ""))
    done = f"{view.state} after {view.step} steps" if view.step == view.steps else view.state
    at = "" if view.step == view.steps else f" at step {view.step} of {view.steps}"
    left = "" if view.time_left_s is None else f", about {whole_time(view.time_left_s)} left"
    say(console, Text(f"{done}{at}{left}", STATES[view.state]))
    for line in [view.failure, *_now(view)]:
        if line:
            say(console, line, "red" if line is view.failure else "")
    for words in _health(view):
        say(console, words)
    if steps.steps:
        print_steps(steps, console)
    for each in view.evaluations:
        failed = f", {each.failed} failed" if each.failed else ""
        counted = f"{each.accepted} episodes{failed}"
        say(console, f"evaluation {each.label}: {number(each.score)}  ({counted})")
    if view.newest:
        say(console, "\nnewest episodes")
        console.print(_episodes(view.newest))
    elif view.recording == "off":
        say(console, "\nThis run keeps no episodes (recording: off); journal.jsonl has them.")
    say(
        console,
        f"\nmore: tinkerscript show {root} [EPISODE | --step N | --compare .. | --search WORDS | --findings]",
    )


def _now(view: RunView) -> list[str]:
    lines: list[str] = []
    if view.phase:
        of = f" of {view.phase.total:,}" if view.phase.total else ""
        lines.append(f"sampling {view.phase.label}: {view.phase.done:,}{of} episodes")
    if view.waiting:
        lines.append(
            f"waiting for {view.waiting.what}, for {whole_time(max(0.0, time.time() - view.waiting.since))}"
        )
    return lines


def _health(view: RunView) -> list[str]:
    health = view.health
    lines: list[str] = []
    if health.failures:
        lines.append("failed episodes:")
    for each in health.failures:
        example = f"   (episode {each.example.uuid[:8]})" if each.example else ""
        words = each.example.preview if each.example else each.kind
        lines.append(f"  {each.count} x {one_line(words)}{example}")
    groups = health.groups_trained + health.groups_same_reward + health.groups_dropped
    counts = {
        f"{health.retried:,} episodes retried": health.retried,
        f"{health.stale:,} stale": health.stale,
        f"{health.groups_same_reward:,} of {groups:,} groups without signal": health.groups_same_reward,
        f"{health.groups_dropped:,} groups dropped": health.groups_dropped,
        f"{health.truncated_share or 0:.1%} of the last replies cut off": health.truncated_share,
        f"{health.findings:,} steps misaligned": health.findings,
        f"{health.sequences_with_errors:,} sequences with alignment errors": health.sequences_with_errors,
    }
    found = [words for words, value in counts.items() if value]
    return [*lines, *([f"look at: {', '.join(found)}"] if found else [])]


def print_steps(view: StepPage, console: Console) -> None:
    """Oldest first, as a log reads."""
    titles = (">step", ">reward", ">accepted", ">failed", ">trained", ">lag", ">policy", "ended")
    shown = table(*titles)
    for step in reversed(view.steps):
        counts = (str(step.accepted), str(step.failed or ""), str(step.trained))
        lag = "" if step.max_lag is None else str(step.max_lag)
        ended = time.strftime("%H:%M:%S", time.localtime(step.time))
        shown.add_row(
            *row(str(step.step), number(step.reward), *counts, lag, str(step.policy_version), ended)
        )
    console.print(shown)
    _more(view.next, console)


def print_step(view: Step, console: Console) -> None:
    line = view.line
    say(console, Text(f"step {line.step}", "bold"))
    counts = f"{line.accepted} accepted, {line.failed} failed, {line.trained} trained"
    say(console, f"reward {number(line.reward)}, {counts}")
    most = max((each.count for each in view.histogram), default=1)
    for each in view.histogram:
        values = f"{each.low:g}" if each.low == each.high else f"{each.low:.3g} to {each.high:.3g}"
        say(
            console,
            f"{values:>18}  {'█' * max(1, round(30 * each.count / most)) if each.count else ''} {each.count}",
        )
    for group in view.groups:
        mean = number(group.mean_reward, ", mean reward {:.3f}")
        say(console, Text(f"\n{one_line(group.group_id)}{mean}", "bold"))
        console.print(_episodes(group.episodes))
    if view.groups_found > len(view.groups):
        say(console, f"{len(view.groups)} of {view.groups_found} groups")
    _more(view.next, console)


def print_episodes(view: EpisodePage | SearchPage, console: Console) -> None:
    if not view.episodes:
        say(console, "no episodes" + (" so far" if view.next else ""))
    else:
        console.print(_episodes(view.episodes))
    _more(view.next, console)


def _episodes(lines: Iterable[EpisodeLine]) -> Table:
    titles = (
        "episode",
        "for",
        ">reward",
        ">advantage",
        ">calls",
        ">tokens",
        "training",
        "last reply, or why it failed",
    )
    shown = table(*titles)
    for line in lines:
        what = line.label or f"step {line.step}"
        reward = number(line.reward, "{:g}") if line.status == "accepted" else Text(line.status, "red")
        advantage = number(line.advantage, "{:+.3f}")
        counts = (str(line.calls or ""), str(line.sampled_tokens or ""))
        outcome = (line.outcome or "").replace("_", " ")
        shown.add_row(*row(line.uuid[:8], what, reward, advantage, *counts, outcome, line.preview))
    return shown


def print_comparison(view: Comparison, console: Console) -> None:
    before, after = view.before, view.after
    say(console, Text(f"{before.label} {number(before.score)} → {after.label} {number(after.score)}", "bold"))
    say(console, f"{view.better} samples better, {view.worse} worse, {view.same} the same")
    shown = table("sample", f">{before.label}", f">{after.label}", "change", "episodes", "input")
    styles = {"better": "blue", "worse": "red", "same": ""}
    for each in view.samples:
        episodes = " → ".join((uuid or "")[:8] or "none" for uuid in (each.before_uuid, each.after_uuid))
        change = Text(each.change, styles[each.change])
        shown.add_row(*row(each.id, number(each.before), number(each.after), change, episodes, each.input))
    console.print(shown)
    _more(view.next, console)


def print_alignment(view: AlignmentView, console: Console) -> None:
    for name, curve in view.curves.items():
        say(
            console,
            f"{name.removeprefix('alignment/'):<24} {curve.mean[-1]:.3g} now, at most {max(curve.high):.3g}",
        )
    if not view.kinds:
        say(console, "nothing was found: every sequence is exactly what was sampled")
        return
    shown = table("finding", ">count", ">steps", "first and last", "meaning")
    for kind in view.kinds:
        steps = f"{kind.first_step} to {kind.last_step}"
        name = f"{kind.kind}/{kind.name}"
        shown.add_row(*row(name, str(kind.count), str(kind.steps), steps, kind.meaning))
    console.print(shown)


def print_findings(view: FindingPage, console: Console) -> None:
    shown = table(">step", ">count", "episode", "detail")
    for each in view.found:
        uuid = each.episode.uuid[:8] if each.episode else ""
        shown.add_row(*row(str(each.step), str(each.count), uuid, each.detail))
    console.print(shown)


def _more(start: int | None, console: Console) -> None:
    if start is not None:
        say(console, f"there is more: add --start {start}", "dim")

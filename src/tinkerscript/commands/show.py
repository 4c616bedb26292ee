from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerscript.dashboard import counted, one_line, plain
from tinkerscript.dashboard.run_table import whole_time
from tinkerscript.dashboard.terminal import print_wrapped
from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.ledger.health import HealthRow
from tinkerscript.ledger.reader import LedgerReader, find_runs, is_run
from tinkerscript.page.episode_view import CallView, EpisodeView, SequenceLine, episode_view, find_episode
from tinkerscript.page.lines import EpisodeLine, newest
from tinkerscript.page.overview import RunList, RunView, overview, run_list
from tinkerscript.page.steps import StepLine, step_page

HEALTH_STYLES = {"good": "", "warn": "yellow", "bad": "red"}
STATE_STYLES = {"running": "green", "finished": "", "stopped": "yellow", "failed": "red"}

PIPE_COLUMNS = 120

RULE = 60
EPISODES_NAMED = 5


def show_command(root: Path, what: str, console: Console, *, limit: int = 30, as_json: bool = False) -> int:
    """`what`: the beginning of an episode's uuid, or a path such as `/steps/3`."""
    if not console.is_terminal:
        console.width = max(console.width, PIPE_COLUMNS)
    runs = runs_in(root)
    if len(runs) > 1 or not (is_run(root) or what):
        if what and not what.startswith("/api/"):
            raise ConfigError(
                f"{root} has {len(runs)} runs; name one, such as {next(reversed(runs.values()))}"
            )
        if what or as_json:
            console.file.write(_answer(root, what or "/api/runs"))
        else:
            _print_runs(run_list(_readers(runs, console)), console)
        return 0
    ((name, folder),) = runs.items()
    ledger = LedgerReader(folder)
    uuid = _episode(ledger, what) if what and not what.startswith("/") else ""
    if as_json or what.startswith("/"):
        path = f"/api/episodes/{quote(uuid, safe='')}" if uuid else what
        base = "" if path.startswith("/api/") else f"/api/runs/{quote(name, safe='')}"
        console.file.write(_answer(root, base + path))
    elif uuid:
        _print_episode(episode_view(name, ledger, uuid), console)
    else:
        _print_run(overview(name, ledger), step_page(ledger, limit=limit).steps, console, root)
    return 0


def _readers(runs: Mapping[str, Path], console: Console) -> dict[str, LedgerReader]:
    readers: dict[str, LedgerReader] = {}
    for name, folder in runs.items():
        try:
            readers[name] = LedgerReader(folder)
        except ConfigError as error:
            console.print(f"{name}: {error}", style="yellow", markup=False)
    return readers


def _answer(root: Path, path: str) -> str:
    from tinkerscript.page.web_app import create_page  # noqa: PLC0415 - Takes a second; `train` imports this.

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_page(root, admin_token=None))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.get(path)

    reply = asyncio.run(ask())
    if reply.is_error:
        raise NotRecordedError(f"{path}: {reply.json().get('failure_reason') or reply.text}")
    return f"{reply.text}\n"


def runs_in(root: Path) -> dict[str, Path]:
    """Return the folders by name. Errors say what exists instead."""
    if not root.exists():
        there = sorted(path.name for path in root.parent.glob("*") if path.is_dir())[-5:]
        where = "this folder" if root.parent == Path() else root.parent
        has = f"; {where} has {', '.join(there)}" if there else ""
        raise ConfigError(f"there is no folder {root}{has}; `tinkerscript train` makes one per run")
    return find_runs(root)


def _episode(ledger: LedgerReader, prefix: str) -> str:
    try:
        return find_episode(ledger, prefix)
    except NotRecordedError as error:
        if "several" in str(error):
            raise
        some = [line.uuid[:8] for line in newest(ledger, limit=EPISODES_NAMED).episodes]
        has = f"the newest are {', '.join(some)}" if some else "none has ended yet"
        raise NotRecordedError(f"{error} in {ledger.folder}; {has}") from error


def say(console: Console, text: str | Text, style: str = "") -> None:
    if isinstance(text, Text):
        text, style = text.plain, str(text.style)
    print_wrapped(console, plain(text), style)


def health_lines(rows: Sequence[HealthRow]) -> list[Text]:
    return [
        Text(f"look at: {row.line()}", HEALTH_STYLES[row.kind])
        for kind in ("bad", "warn")
        for row in rows
        if row.kind == kind
    ]


def _number(value: float | None, text: str = "{:.3f}") -> str:
    return "" if value is None else text.format(value)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """`>` before a title right-aligns its column."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=not titles[-1].startswith(">"))
    for title in titles:
        numbers = title.startswith(">")
        made.add_column(
            title.removeprefix(">"),
            justify="right" if numbers else "left",
            no_wrap=True,
            ratio=1 if title is titles[-1] and not numbers else None,
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row))
    return made


def _print_runs(view: RunList, console: Console) -> None:
    rows: list[Sequence[str | Text]] = []
    for run in view.runs:
        before = "" if run.score_before is None else f"{_number(run.score_before)} → "
        score = f"{before}{_number(run.score)}" if run.score is not None else ""
        what = f"{run.model}: {', '.join(Path(task).name for task in run.tasks) or run.method}"
        what += f"  ({', '.join(run.tags)})" if run.tags else ""
        state = Text(run.state, STATE_STYLES[run.state])
        rows.append((run.name, state, f"{run.step}/{run.steps}", score, _number(run.reward), what))
    console.print(_table(("run", "state", ">step", ">held out", ">reward", "model and tasks"), rows))


def _print_run(view: RunView, steps: Sequence[StepLine], console: Console, root: Path) -> None:
    tasks = ", ".join(Path(task).name for task in view.tasks)
    say(console, Text(one_line(view.folder), "bold"))
    say(console, f"{view.method} of {view.model}" + (f" on {tasks}" if tasks else ""))
    at = f"at step {view.step} of {view.steps}"
    if view.step == view.steps:
        at = f"after {counted(view.step, 'step')}"
    left = "" if view.time_left_s is None else f", about {whole_time(view.time_left_s)} left"
    say(console, Text(f"{view.state} {at}{left}", STATE_STYLES[view.state]))
    if view.failure:
        say(console, view.failure, "red")
    for words in (", ".join(view.tags), view.note):
        if words:
            say(console, words, "italic")
    if view.phase:
        of = f" of {view.phase.total:,}" if view.phase.total else ""
        say(console, f"sampling {view.phase.label}: {view.phase.done:,}{of} episodes")
    if view.waiting:
        waited = whole_time(max(0.0, time.time() - view.waiting.since))
        say(console, f"waiting for {view.waiting.what}, for {waited}")
    for each in view.health.failures:
        words = each.example.preview if each.example else each.kind
        episode = f"   (episode {each.example.uuid[:8]})" if each.example else ""
        say(console, f"failed: {each.count} x {one_line(words)}{episode}")
    for line in health_lines(view.health.rows):
        say(console, line)
    if view.times:
        say(console, f"time: {view.times.words}")
    if steps:
        console.print(_steps(steps))
    for each in view.evaluations:
        failed = f", {each.failed} failed" if each.failed else ""
        score = _number(each.score)
        say(console, f"evaluation {each.label}: {score}  ({counted(each.accepted, 'episode')}{failed})")
    for each in view.pending:
        of = f"{each.done:,} of {counted(each.total, 'episode')}"
        said = "pending" if view.state == "running" else "not ended; a resumed run makes it again"
        say(console, f"evaluation {each.label}: {said} ({of})")
    if view.newest:
        say(console, "\nnewest episodes")
        console.print(_episodes(view.newest))
    say(console, f"\nan episode: tinkerscript show {root} EPISODE; everything else: tinkerscript view {root}")


def _steps(steps: Sequence[StepLine]) -> Table:
    titles = (">step", ">reward", ">accepted", ">failed", ">trained", ">lag", ">policy", "ended")
    rows = [
        (
            *(str(step.step), _number(step.reward), str(step.accepted), str(step.failed or "")),
            *(str(step.trained), _number(step.max_lag, "{}"), str(step.policy_version)),
            time.strftime("%H:%M:%S", time.localtime(step.time))
            + (f", stopped: {step.stopped}" if step.stopped else ""),
        )
        for step in reversed(steps)
    ]
    return _table(titles, rows)


def _episodes(lines: Iterable[EpisodeLine]) -> Table:
    titles = ("episode", "for", ">reward", ">advantage", ">calls", ">tokens", "training")
    rows: list[Sequence[str | Text]] = [
        (
            *(line.uuid[:8], line.label or f"step {line.step}"),
            _number(line.reward, "{:g}") if line.status == "accepted" else Text(line.status, "red"),
            *(_number(line.advantage, "{:+.3f}"), str(line.calls or ""), str(line.sampled_tokens or "")),
            *((line.outcome or "").replace("_", " "), line.preview),
        )
        for line in lines
    ]
    return _table((*titles, "last reply, or why it failed"), rows)


def _print_episode(view: EpisodeView, console: Console) -> None:
    for line in _facts(view):
        say(console, line)
    for words, style in _conversations(view.turns):  # Not wrapped, to keep the model's line breaks.
        console.print(plain(words), style=style, highlight=False, soft_wrap=True, markup=False)
    if not view.recorded:
        say(console, "\nIts calls were dropped to keep the ledger small (recording_limit_mb).")
    for sequence in view.sequences:
        say(console, f"\n{_sequence(sequence, trains=view.line.type != 'eval')}", "bold")


def _facts(view: EpisodeView) -> list[str]:
    line = view.line
    end = line.status if line.status != "accepted" else f"reward {_number(line.reward, '{:g}')}"
    lines = [f"{line.type} episode {line.uuid}, group {line.group_id}: {end}"]
    if line.attempt:
        versions = f"policy versions {line.first_version} to {line.last_version}"
        queued = "" if view.queued_s is None else f", after {whole_time(view.queued_s)} in the queue"
        lines.append(f"attempt {line.attempt} of {line.client}{queued}, {versions}")
    lines += [f"attempt {a.attempt} of {a.client} failed: {a.kind}: {a.message}" for a in view.attempts]
    lines += [f"sample {view.sample_id} of {view.task}, target: {view.target}"] if view.sample_id else []
    for use in view.uses:
        advantage = _number(use.advantage, ", advantage {:+.3f}")
        why = f": {use.reason}" if use.reason else ""
        lines.append(f"step {use.step}: {use.outcome.replace('_', ' ')}{advantage}{why}")
    if view.verdict is not None:
        found = "failed" if view.verdict.reward is None else f"gave {view.verdict.reward:g}"
        lines.append(
            f"the judge of its group {found}" + (f": {view.verdict.words}" if view.verdict.words else "")
        )
    for score in view.scores:
        answer = f", answer {score.answer}" if score.answer else ""
        why = f"; {score.explanation}" if score.explanation else ""
        lines.append(f"score {score.name}: {score.value}{answer}{why}")
    rest = {name: value for name, value in view.metadata.items() if name not in ("scores", "explanations")}
    for name, values in {"metrics": view.metrics, "metadata": rest}.items():
        if values:
            lines.append(f"{name}: {json.dumps(values, ensure_ascii=False)}")
    return lines


def _conversations(turns: Sequence[CallView]) -> list[tuple[str, str]]:
    calls = {turn.call_id: turn for turn in turns}
    extended = {turn.parent_id for turn in turns}
    leaves = [turn for turn in turns if turn.call_id not in extended]
    lines: list[tuple[str, str]] = []
    for place, leaf in enumerate(leaves, 1):
        because = f", forked: {leaf.fork_reason}" if leaf.fork_reason else ""
        if len(leaves) > 1:
            lines.append((f"\n{'═' * 8} sequence {place} of {len(leaves)}{because} {'═' * 8}", "dim"))
        chain = [leaf]
        while (parent := calls.get(chain[0].parent_id or "")) is not None:
            chain.insert(0, parent)
        for turn in chain:
            for message in [*turn.messages, turn.reply]:
                lines += _message(message)
            lines.append((_call(turn), "dim"))
    sampled = sum(turn.sampled_tokens for turn in turns)
    counts = f"\n{counted(len(turns), 'call')}, {counted(sampled, 'token')} sampled"
    return [*lines, (counts, "dim")] if turns else []


def _call(turn: CallView) -> str:
    stopped = "" if turn.stop_reason == "stop" else f", ended by {turn.stop_reason}"
    logprob = _number(turn.mean_logprob, ", mean logprob {:.3f}")
    side = ", a side call" if turn.side else ""
    ignored = f", ignored: {', '.join(turn.ignored)}" if turn.ignored else ""
    last = turn.policy_version_end
    version = f"policy version {turn.policy_version}" + (f" to {last}" if last is not None else "")
    earned = _number(turn.reward, ", earned {:g}")
    return f"({counted(turn.sampled_tokens, 'token')}{earned}, {version}{logprob}{stopped}{side}{ignored})"


def _message(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    role = str(message.get("role"))
    title = f"\n── {role} " + "─" * max(0, RULE - len(role))
    lines = [(title, "bold cyan" if role == "assistant" else "bold")]
    if reasoning := message.get("reasoning_content"):
        lines.append((str(reasoning), "dim italic"))
    if content := message.get("content"):
        lines.append((content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), ""))
    for call in message.get("tool_calls") or []:
        function = call["function"]
        lines.append((f"-> {function['name']}({function['arguments']})", "yellow"))
    return lines


def _sequence(line: SequenceLine, *, trains: bool) -> str:
    shared = counted(line.fork, "token")
    fork = f", shares {shared} with sequence {line.parent}" if line.parent is not None else ""
    reason = f"; did not train: {line.reason.replace('_', ' ')}" if line.reason else ""
    counts = f"{counted(line.tokens, 'token')}, {line.sampled:,} sampled"
    counts += f", {line.trained:,} that train" if trains else ""
    role = f" of role {line.role}" if line.role else ""
    return f"training sequence {line.number}{role}: {counts}{fork}{reason}"

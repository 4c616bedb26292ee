"""`tinkerscript show`: what a run's folder holds, and one episode of it to read, also while the run goes on.

Invariant: text that a model or a program wrote is shown as text. Control characters are escaped: they could
rewrite the reader's terminal.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tinkerscript.config import RunConfig, load_config
from tinkerscript.dashboard.plain_text import one_line, plain
from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.call import Call, conversation_of
from tinkerscript.train.journal import (
    AnyEvent,
    EpisodeAccepted,
    EpisodeFailed,
    EpisodeRegistered,
    Outcome,
    StepConsumed,
    read_journal,
)

MAX_ROWS = 30
COLUMNS = {
    "reward/mean": ("reward", "{:.3f}"),
    "eval/score": ("held out", "{:.3f}"),
    "train/nll": ("nll", "{:.4f}"),
    "held_out/nll": ("held-out nll", "{:.4f}"),
    "episodes/accepted": ("episodes", "{:.0f}"),
    "episodes/failed": ("failed", "{:.0f}"),
    "train/sequences": ("trained", "{:.0f}"),
    "alignment/max_abs_dlogp": ("max |dlogp|", "{:.0e}"),
}
"""Metric -> its column and format."""


def show_run(folder: Path, step: str, console: Console) -> int:
    """Print a run's steps, why episodes failed, and the episodes of one step.

    `step`: a training step, or an evaluation such as `before`; empty: the last step. Raises ConfigError.
    """
    events = _events(folder)
    config = load_config(folder / "config.yaml")
    console.print(_heading(folder, config), highlight=False, soft_wrap=True)
    metrics = _metrics(folder / "metrics.jsonl")
    if metrics:
        console.print(_steps_table(metrics))
    outcomes = [event for event in events if isinstance(event, EpisodeAccepted | EpisodeFailed)]
    for line in _failures(outcomes):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if config.method == "grpo":
        label, shown = _episodes_of(step, events, outcomes)
        console.print(_episodes_table(label, shown))
        console.print(f"\none episode: tinkerscript show {folder} EPISODE", highlight=False, soft_wrap=True)
    return 0


def show_episode(folder: Path, prefix: str, console: Console) -> int:
    """Print one episode, by the beginning of its uuid. Raises ConfigError unless exactly one begins so."""
    events = _events(folder)
    outcomes = {e.episode_uuid: e for e in events if isinstance(e, EpisodeAccepted | EpisodeFailed)}
    registered = {e.episode_uuid for e in events if isinstance(e, EpisodeRegistered)}
    found = [uuid for uuid in sorted(outcomes.keys() | registered) if uuid.startswith(prefix)]
    if len(found) != 1:
        some = ", ".join((found or list(outcomes))[:5])
        problem = f"{len(found)} episodes begin with" if found else "no episode begins with"
        raise ConfigError(f"{problem} {prefix!r} in {folder}" + (f"; there are {some}" if some else ""))
    outcome = outcomes.get(found[0])
    if outcome is None:
        console.print(f"episode {found[0]} has not ended", highlight=False)
        return 0
    for line in _facts(outcome):
        console.print(plain(line), highlight=False, soft_wrap=True, markup=False)
    if isinstance(outcome, EpisodeAccepted):
        for line, style in _conversations(outcome.calls):
            console.print(plain(line), style=style, highlight=False, soft_wrap=True, markup=False)
    return 0


def _events(folder: Path) -> list[AnyEvent]:
    path = folder / "journal.jsonl"
    if not path.is_file():
        raise ConfigError(f"{folder} holds no run (no journal.jsonl); give the folder of a run")
    return list(read_journal(path))


def _metrics(path: Path) -> dict[int, dict[str, float]]:
    """Step -> its metrics, of all of its lines."""
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            values: dict[str, float] = json.loads(line)
        except ValueError:  # The run is writing this line, or was killed while it did.
            continue
        steps.setdefault(int(values["step"]), {}).update(values)
    return steps


def _heading(folder: Path, config: RunConfig) -> str:
    summary = folder / "summary.json"
    state = "not finished"
    if summary.is_file():
        state = f"finished after {json.loads(summary.read_text(encoding='utf-8'))['steps']} steps"
    tasks = ", ".join(Path(task.name).name for task in config.all_tasks) or "samples that clients register"
    what = f"chats of {config.sft.data}" if config.method == "sft" else tasks
    return f"{folder.resolve()}: {config.method} of {config.engine.model} on {what}; {state}"


def _steps_table(metrics: Mapping[int, Mapping[str, float]]) -> Table:
    columns = {name: each for name, each in COLUMNS.items() if any(name in row for row in metrics.values())}
    rows = sorted(metrics.items())
    left_out = len(rows) - MAX_ROWS
    title = f"the last {MAX_ROWS} steps" if left_out > 0 else None
    table = Table("step", title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for header, _ in columns.values():
        table.add_column(header, justify="right")
    for step, row in rows[-MAX_ROWS:]:
        cells = [text.format(row[name]) if name in row else "" for name, (_, text) in columns.items()]
        table.add_row(str(step), *cells)
    return table


def _failures(outcomes: Iterable[Outcome]) -> list[str]:
    """The reasons for which episodes failed, each with an example."""
    reasons: Counter[str] = Counter()
    example: dict[str, str] = {}
    for outcome in outcomes:
        if isinstance(outcome, EpisodeFailed) and not outcome.is_cancelled and outcome.failures:
            reason = _failure(outcome.failures[-1])
            reasons[reason] += 1
            example.setdefault(reason, outcome.episode_uuid)
    lines = [f"  {n} x {reason}   (episode {example[reason][:8]})" for reason, n in reasons.most_common(5)]
    return ["failed episodes:", *map(plain, lines)] if lines else []


def _failure(failure: Mapping[str, Any]) -> str:
    return f"{failure.get('kind')}: {failure.get('message')}"


def _episodes_of(
    step: str, events: Sequence[AnyEvent], outcomes: Sequence[Outcome]
) -> tuple[str, list[Outcome]]:
    """The title and the episodes of a step or evaluation. Raises ConfigError for one that there is not."""
    steps = {str(event.step): set(event.episode_uuids) for event in events if isinstance(event, StepConsumed)}
    last = next(reversed(steps), "")
    for outcome in outcomes:
        if outcome.episode_type == "eval":
            label = outcome.group_id.partition("/")[0].removeprefix("eval-")
            steps.setdefault(label, set()).add(outcome.episode_uuid)
            last = last or label
    if step and step not in steps:
        raise ConfigError(f"--step: the run has no {step!r}; it has {', '.join(steps) or 'none yet'}")
    step = step or last
    title = f"step {step}" if step.isdecimal() else f"evaluation {step}" if step else "episodes so far"
    shown = [outcome for outcome in outcomes if not step or outcome.episode_uuid in steps[step]]
    return title, sorted(shown, key=lambda outcome: outcome.group_id)


def _episodes_table(title: str, episodes: Sequence[Outcome]) -> Table:
    left_out = len(episodes) - MAX_ROWS
    more = f" (the first {MAX_ROWS} of {len(episodes)})" if left_out > 0 else ""
    table = Table(title=f"{title}{more}", title_justify="left", box=box.SIMPLE_HEAD, expand=True)
    table.add_column("episode", no_wrap=True)
    table.add_column("group", no_wrap=True)
    for header in ("reward", "calls", "tokens"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("last reply, or why it failed", no_wrap=True, overflow="ellipsis", ratio=1)
    for outcome in episodes[:MAX_ROWS]:
        names = [outcome.episode_uuid[:8], outcome.group_id.rpartition("/")[2]]
        if isinstance(outcome, EpisodeAccepted):
            sampled = sum(len(call.sampled_ids) for call in outcome.calls)
            numbers = [f"{outcome.reward:g}", str(len(outcome.calls)), str(sampled)]
            table.add_row(*names, *numbers, _cell(_last_reply(outcome.calls)))
        else:
            reason = _failure(outcome.failures[-1]) if outcome.failures else ""
            table.add_row(*names, "failed", "", "", _cell(reason))
    return table


def _cell(text: str) -> Text:
    return Text(one_line(text))


def _last_reply(calls: Sequence[Call]) -> str:
    reply = json.loads(calls[-1].reply) if calls else {}
    called = [call["function"] for call in reply.get("tool_calls") or []]
    return reply.get("content") or ", ".join(f"{call['name']}({call['arguments']})" for call in called)


def _facts(outcome: Outcome) -> list[str]:
    """What is known about an episode besides its conversation."""
    kind = f"{outcome.episode_type} episode {outcome.episode_uuid}, group {outcome.group_id}"
    if isinstance(outcome, EpisodeFailed):
        return [f"{kind}: failed", *(_attempt(failure) for failure in outcome.failures)]
    lines = [
        f"{kind}: reward {outcome.reward:g}",
        f"attempt {outcome.attempt} of {outcome.client_uuid}, "
        f"claimed at policy version {outcome.policy_version_at_claim}",
        *(_attempt(failure) for failure in outcome.retries),
    ]
    for name, values in (("metrics", outcome.log_metrics), ("metadata", outcome.metadata)):
        if values:
            lines.append(f"{name}: {json.dumps(values, ensure_ascii=False)}")
    return lines


def _attempt(failure: Mapping[str, Any]) -> str:
    return f"attempt {failure.get('attempt')} of {failure.get('client_uuid')} failed: {_failure(failure)}"


def _conversations(calls: Sequence[Call]) -> list[tuple[str, str]]:
    """Lines and their styles: each conversation that no other call extends, with its tokens."""
    extended = {call.parent_id for call in calls}
    lines: list[tuple[str, str]] = []
    leaves = [call for call in calls if call.call_id not in extended]
    for number, leaf in enumerate(leaves, 1):
        chain = conversation_of(calls[: calls.index(leaf) + 1])
        because = f", forked: {leaf.fork_reason}" if leaf.fork_reason else ""
        title = f"\n{'═' * 8} sequence {number} of {len(leaves)}{because} {'═' * 8}"
        lines += [(title, "dim")] if len(leaves) > 1 else []
        for message in chain:
            lines += _message(message)
    sampled = sum(len(call.sampled_ids) for call in calls)
    logprobs = [float(value) for call in calls for value in call.sampled_logprobs]
    mean = f", mean logprob {sum(logprobs) / len(logprobs):.3f}" if logprobs else ""
    versions = sorted({version for call in calls for version in call.policy_versions})
    lines.append((f"\n{len(calls)} calls, {sampled} tokens sampled{mean}, policy versions {versions}", "dim"))
    return lines


def _message(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    role = str(message.get("role"))
    lines = [(f"\n── {role} " + "─" * max(0, 60 - len(role)), "bold cyan" if role == "assistant" else "bold")]
    if reasoning := message.get("reasoning_content"):
        lines.append((str(reasoning), "dim italic"))
    content = message.get("content")
    if content:
        lines.append((content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), ""))
    for call in message.get("tool_calls") or []:
        function = call["function"]
        lines.append((f"-> {function['name']}({function['arguments']})", "yellow"))
    return lines

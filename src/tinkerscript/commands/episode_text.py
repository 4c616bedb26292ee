"""The page's view of an episode as text: what was asked, sampled and scored, turn by turn and token by token.

Invariant: text that a model or a program wrote is shown as text, without control characters.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from tinkerscript.commands.run_text import number, row, say, table
from tinkerscript.dashboard.plain_text import plain
from tinkerscript.page.episode_view import CallView, EpisodeView, SequenceLine
from tinkerscript.page.token_view import Tokens

RULE = 60

BLUE, ORANGE, PURPLE = (0, 114, 178), (213, 94, 0), (110, 80, 200)
"""Those of the page: people of any color vision can tell them apart."""

HUES = ((31, 111, 235), (213, 94, 0), (0, 128, 95), (168, 64, 138), (138, 109, 0), (0, 131, 176))


def print_episode(view: EpisodeView, tokens: Sequence[Tokens], console: Console, color_by: str) -> None:
    """`tokens`: the beginning of each of its sequences, or nothing."""
    for line in _facts(view):
        say(console, line)
    for words, style in _conversations(view.turns):
        say(console, words, style)
    if not view.recorded:
        say(console, "\nIts calls are not recorded (recording, recording_limit_mb); journal.jsonl has them.")
    for sequence in view.sequences:
        say(console, f"\n{_sequence(sequence)}", "bold")
        for page in tokens:
            if page.sequence == sequence.number:
                _colored(page, console, color_by)
    if view.sequences and not tokens:
        say(console, "token by token: add --sequence 0", "dim")


def _facts(view: EpisodeView) -> list[str]:
    """What is known about an episode besides its conversation."""
    line = view.line
    kind = f"{line.type} episode {line.uuid}, group {line.group_id}"
    lines = [
        f"{kind}: {line.status}"
        if line.status != "accepted"
        else f"{kind}: reward {number(line.reward, '{:g}')}"
    ]
    if line.attempt:
        lines.append(
            f"attempt {line.attempt} of {line.client}, "
            f"policy versions {line.first_version} to {line.last_version}"
        )
    lines += [f"attempt {a.attempt} of {a.client} failed: {a.kind}: {a.message}" for a in view.attempts]
    lines += [f"sample {view.sample_id} of {view.task}, target: {view.target}"] if view.sample_id else []
    for use in view.uses:
        lines.append(
            f"step {use.step}: {use.outcome.replace('_', ' ')}" + number(use.advantage, ", advantage {:+.3f}")
        )
    for score in view.scores:
        answer = f", answer {score.answer}" if score.answer else ""
        lines.append(
            f"score {score.name}: {score.value}{answer}"
            + (f"; {score.explanation}" if score.explanation else "")
        )
    if view.metrics:
        lines.append(f"metrics: {json.dumps(view.metrics, ensure_ascii=False)}")
    rest = {name: value for name, value in view.metadata.items() if name not in ("scores", "explanations")}
    return [*lines, *([f"metadata: {json.dumps(rest, ensure_ascii=False)}"] if rest else [])]


def _conversations(turns: Sequence[CallView]) -> list[tuple[str, str]]:
    """Lines and their styles: each conversation that no other call extends."""
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
    return [*lines, (f"\n{len(turns)} calls, {sampled} tokens sampled", "dim")] if turns else []


def _call(turn: CallView) -> str:
    stopped = "" if turn.stop_reason == "stop" else f", ended by {turn.stop_reason}"
    logprob = number(turn.mean_logprob, ", mean logprob {:.3f}")
    side = ", a side call" if turn.side else ""
    ignored = f", without effect: {', '.join(turn.ignored)}" if turn.ignored else ""
    version = f"policy version {turn.policy_version}"
    return f"({turn.sampled_tokens} tokens, {version}{logprob}{stopped}{side}{ignored})"


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


def _sequence(line: SequenceLine) -> str:
    fork = f", shares {line.fork} tokens with sequence {line.parent}" if line.parent is not None else ""
    reason = f"; did not train: {line.reason.replace('_', ' ')}" if line.reason else ""
    counts = f"{line.tokens:,} tokens, {line.sampled:,} sampled, {line.trained:,} that train"
    role = f" of role {line.role}" if line.role else ""
    return f"training sequence {line.number}{role}: {counts}{fork}{reason}"


# Tokens


@dataclass(frozen=True)
class Measure:
    """What tokens are colored by."""

    of: Callable[[Tokens, int], float | None]
    limit: float
    """What has the strongest color; 0: the largest there is."""

    above: tuple[int, int, int]
    below: tuple[int, int, int]
    legend: str


def _gap(page: Tokens, at: int) -> float | None:
    sampler, trainer = page.logprobs[at], _at(page.trainer_logprobs, at)
    return None if sampler is None or trainer is None else trainer - sampler


def _at(values: Sequence[float | None] | None, at: int) -> float | None:
    return None if values is None else values[at]


MEASURES = {
    "logprob": Measure(lambda p, at: p.logprobs[at], 6, BLUE, PURPLE, "logprob, from 0 to -6 or less"),
    "advantage": Measure(
        lambda p, at: _at(p.advantages, at), 0, BLUE, ORANGE, "advantage, blue above 0, orange below"
    ),
    "entropy": Measure(
        lambda p, at: _at(p.entropies, at), 3, PURPLE, PURPLE, "entropy, from 0 to 3 nats or more"
    ),
    "gap": Measure(_gap, 0, BLUE, ORANGE, "trainer - sampler, blue above 0, orange below"),
    "version": Measure(lambda p, at: p.versions[at], 1, BLUE, BLUE, "policy version"),
}
COLUMNS = ("logprob", "gap", "entropy", "advantage", "version")


def _colored(page: Tokens, console: Console, color_by: str) -> None:
    """The tokens as running text on colored ground; the prompt's are faint."""
    measure = MEASURES[color_by]
    values = [measure.of(page, at) for at in range(len(page.ids))]
    limit = measure.limit or max((abs(value) for value in values if value is not None), default=0.0)
    say(
        console,
        f"colored by {measure.legend}" if any(v is not None for v in values) else f"{color_by}: not recorded",
        "dim",
    )
    text = Text()
    for at, value in enumerate(values):
        struck = page.sampled[at] and page.uses[at] not in (None, "trained")
        style = (
            Style(dim=True)
            if not page.sampled[at]
            else _ground(value, limit, measure, color_by, struck=struck)
        )
        text.append(plain(page.texts[at]), style)
    say(console, text)
    if page.end < page.length:
        say(
            console,
            f"{page.end:,} of {page.length:,} tokens; the rest: --sequence {page.sequence} "
            f"--start {page.end}",
            "dim",
        )


def _ground(value: float | None, limit: float, measure: Measure, color_by: str, *, struck: bool) -> Style:
    if value is None or not limit:
        return Style(strike=struck)
    color = measure.above if value > 0 else measure.below
    share = min(1.0, abs(value) / limit)
    if color_by == "version":
        color, share = HUES[int(value) % len(HUES)], 0.6
    mixed = (round(255 + (part - 255) * (0.08 + 0.57 * share)) for part in color)
    return Style(color="black", bgcolor=Color.from_rgb(*mixed), strike=struck)


def print_tokens(view: Tokens, console: Console, color_by: str) -> None:
    """A line for each token, with all of its numbers; in colors above, where the terminal has them."""
    if console.color_system is not None and not console.no_color:
        _colored(view, console, color_by)
    shown = table(">at", ">id", *(f">{name}" for name in COLUMNS), "training", "text")
    for at, token in enumerate(view.ids):
        values = [MEASURES[name].of(view, at) for name in COLUMNS]
        numbers = [
            number(v, "{:.0f}" if n == "version" else "{:.4g}") for n, v in zip(COLUMNS, values, strict=True)
        ]
        use = (view.uses[at] or "sampled") if view.sampled[at] else ""
        shown.add_row(*row(str(view.start + at), str(token), *numbers, use, repr(view.texts[at])))
    console.print(shown)
    if view.end < view.length:
        say(console, f"there is more: add --start {view.end}", "dim")

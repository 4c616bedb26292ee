from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rich.text import Text

from tinkerscript.dashboard import one_line
from tinkerscript.dashboard.progress import rate_text, role_rewards, time_left_s

STEPS_SHOWN = 5
PACE_STEPS = 20  # The pace is measured over these.

BAR, GAP = 24, 2
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE = 40
"""In a longer run each character averages several steps."""

LABEL = 10

Metrics = Mapping[str, float]
Part = tuple[str, str]


def short_time(seconds: float) -> str:
    """0.02 s, 12.3 s, 4:05 min or 1:02 h."""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    return _clock_time(seconds)


def whole_time(seconds: float) -> str:
    """12 s, 4:05 min or 1:02 h."""
    return f"{int(seconds)} s" if seconds < 60 else _clock_time(seconds)


def _clock_time(seconds: float) -> str:
    minutes, left = divmod(int(seconds), 60)
    return f"{minutes}:{left:02} min" if minutes < 100 else f"{minutes // 60}:{minutes % 60:02} h"


@dataclass
class TableRow:
    """Step 0 is everything before the first."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    held_out: float | None = None


def _reward(metrics: Metrics) -> str:
    spread = f" ±{metrics['reward/deviation']:.2f}" if "reward/deviation" in metrics else ""
    return f"{metrics['reward/mean']:.3f}{spread}"


def _lag(metrics: Metrics) -> str:
    lags = [int(name[4:]) for name in metrics if name.startswith("lag/") and name[4:].isdecimal()]
    return str(max(lags)) if lags else ""


def _train(metrics: Metrics) -> str:
    return short_time(metrics["time/train_s"] - metrics.get("time/publish_s", 0.0))


@dataclass(frozen=True)
class Column:
    title: str
    needs: str  # Otherwise the cell is empty.
    text: Callable[[Metrics], str]
    rank: int  # On a narrow screen, the highest is dropped first.

    def cell(self, metrics: Metrics) -> str:
        return self.text(metrics) if self.needs in metrics else ""


RUN_COLUMNS = (
    Column("reward", "reward/mean", _reward, 0),
    Column("nll", "train/nll", lambda m: f"{m['train/nll']:.4f}", 0),
    Column("reply", "response_tokens/mean", lambda m: f"{m['response_tokens/mean']:.1f} tok", 3),
    Column("cut off", "response_tokens/cut_off", lambda m: f"{m['response_tokens/cut_off']:.0%}", 5),
    Column("lag", "policy_version", _lag, 6),
    Column("sample", "time/rollout_s", lambda m: short_time(m["time/rollout_s"]), 1),
    Column("train", "time/train_s", _train, 2),
    Column("publish", "time/publish_s", lambda m: short_time(m["time/publish_s"]), 7),
    Column("rate", "episodes_per_s", lambda m: f"{rate_text(m['episodes_per_s'])} ep/s", 8),
    Column("speed", "tokens_per_s", lambda m: f"{m['tokens_per_s']:,.0f} tok/s", 4),
    Column("entropy", "train/entropy", lambda m: f"{m['train/entropy']:.3f}", 9),
    Column("grad norm", "train/grad_norm", lambda m: f"{m['train/grad_norm']:.2g}", 10),
    Column("max |dlogp|", "alignment/max_abs_dlogp", lambda m: f"{m['alignment/max_abs_dlogp']:.0e}", 11),
)
COUNTED = (
    *("episodes/retried", "episodes/stale"),
    *("groups/trained", "groups/same_reward", "groups/dropped"),
)  # Summed over all steps.

HELD_OUT_COLUMN = "held out"
HELD_OUT_RANK = 0


class RunTable:
    """Callers must lock it, because the run and the screen use different threads."""

    def __init__(self, began: float) -> None:
        """`began` uses the clock of `frame`."""
        self.began = began
        self.steps = 0
        self.page = ""
        self.waits: list[tuple[str, float]] = []  # Innermost last.
        self.batch: tuple[str, int, int] | None = None
        """Label, finished episodes, size (0 if unknown)."""

        self.batch_began = began
        self._step = 0
        self._rows: deque[TableRow] = deque(maxlen=STEPS_SHOWN)
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)
        # Columns stay, so that the table does not jump.
        self._titles: set[str] = set()
        self._rewards: list[float] = []
        self._role_rewards: dict[str, list[float]] = {}
        self._scores: list[tuple[str, float]] = []
        self._failures: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def begin(self, steps: int, done: int) -> None:
        self.steps, self._step = steps, done

    def step(self, step: int, metrics: Metrics, now: float) -> None:
        # The pace starts with the first step's batch, after any evaluation.
        if not self._ends and self.batch_began > self.began:
            self._ends.append((self._step, self.batch_began))
        self._step = step
        self._ends.append((step, now))
        self._rows.append(TableRow(step, dict(metrics)))
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        for role, reward in role_rewards(metrics).items():
            self._role_rewards.setdefault(role, []).append(reward)
        for name, value in metrics.items():
            if name.startswith("failure/"):
                self._failures[name.removeprefix("failure/")] += int(value)
        self._counts.update({name: int(metrics[name]) for name in COUNTED if name in metrics})

    def evaluation(self, label: str, score: float, failed: int) -> None:
        step = int(label.removeprefix("step-")) if label.startswith("step-") else self._step
        if step == self._step and (not self._rows or self._rows[-1].step != step):
            self._rows.append(TableRow(step))
        self._failures[f"of evaluation {label}"] += failed
        if math.isfinite(score):
            for row in self._rows:  # The row may be gone: steps continue during an evaluation.
                row.held_out = score if row.step == step else row.held_out
            self._scores.append((label, score))

    def frame(self, columns: int, rows: int, now: float) -> list[Text]:
        """Fill a screen. The least important lines are dropped first."""
        head, room = [self._heading(columns, now), self._activity(now)], rows - 3
        table, facts = self._table(columns - 1), self._facts(columns - 1)
        if len(table) + len(facts) + 2 <= room:
            lines = [*head, Text(), *table, *([Text()] if table else []), *facts]
        elif table and room > 1:
            lines = [*head, table[0], *table[1:][-(room - 1) :]]
        else:
            lines = head[: rows - 1]
        return _cut(lines, columns)

    def last_frame(self, columns: int) -> list[Text]:
        """The last steps and the run's problems, to leave on the screen."""
        problems, table = self._problems().items(), self._table(columns - 1)
        facts = [line for label, parts in problems for line in _lines(label, parts, columns - 1)]
        return _cut([Text(), *table, Text(), *facts, Text()], columns) if table else []

    def _heading(self, columns: int, now: float) -> Text:
        elapsed = whole_time(now - self.began)
        if not self.steps:
            return Text.assemble(("starting", "bold"), (f"   {elapsed}", "dim"))
        left = self._time_left(now)
        times = elapsed if left is None else f"{elapsed}, about {whole_time(left)} left"
        text = Text.assemble((f"step {self._step} of {self.steps}", "bold"), "  ")
        width = min(BAR, columns - 3 - text.cell_len - len(times))
        if width > 5:
            _add_bar(text, width, self._step / self.steps)
        return text.append(times, "dim")

    def _time_left(self, now: float) -> float | None:
        if len(self._ends) < 2:
            return None
        return time_left_s(self.steps, self._ends[0], self._ends[-1], now)

    def _activity(self, now: float) -> Text:
        if self.waits:
            what, since = self.waits[-1]
            long = f"   {whole_time(now - since)}" if now - since >= 1 else ""
            return Text.assemble("waiting for ", one_line(what), (long, "dim"))
        if self.batch is None:
            return Text()
        label, done, total = self.batch
        seconds = now - self.batch_began
        rate = f"   {rate_text(done / seconds)} ep/s" if done and seconds > 1 else ""
        episodes = f"{done:,} of {total:,} episodes" if total else f"{done:,} episodes"
        text = Text.assemble("sampling ", one_line(label), f": {episodes}", (rate, "dim"))
        if total:  # A narrow screen cuts only the bar.
            _add_bar(text.append("  "), BAR, done / total)
        return text

    def _table(self, width: int) -> list[Text]:
        if not self._rows:
            return []
        columns: list[tuple[int, int, str, list[str]]] = [(0, -1, "step", [str(r.step) for r in self._rows])]
        for place, column in enumerate(RUN_COLUMNS):
            columns.append((column.rank, place, column.title, [column.cell(r.metrics) for r in self._rows]))
        scores = ["" if r.held_out is None else f"{r.held_out:.3f}" for r in self._rows]
        columns.append((HELD_OUT_RANK, 1, HELD_OUT_COLUMN, scores))
        self._titles |= {title for _, _, title, cells in columns if any(cells)}
        columns = [each for each in columns if each[2] in self._titles]
        while len(columns) > 1 and sum(_width(c) + GAP for c in columns) - GAP > width:
            columns.remove(max(columns))
        columns.sort(key=lambda c: c[1])
        lines = [Text((" " * GAP).join(c[2].rjust(_width(c)) for c in columns), "dim")]
        for at in range(len(self._rows)):
            lines.append(Text((" " * GAP).join(c[3][at].rjust(_width(c)) for c in columns)))
        lines[-1].stylize("bold")
        return lines

    def _facts(self, width: int) -> list[Text]:
        facts = {
            "reward": _curve(self._rewards),
            **{f"{role} ": _curve(rewards) for role, rewards in self._role_rewards.items()},
            HELD_OUT_COLUMN: self._held_out(),
            **self._problems(),
            "page": [(self.page, "")] if self.page else [],
        }
        return [line for label, parts in facts.items() for line in _lines(label, parts, width)]

    def _held_out(self) -> list[Part]:
        if not self._scores:
            return []
        (first, score), (last, newest) = self._scores[0], self._scores[-1]
        return [(f"{score:.3f} {first}" + (f" → {newest:.3f} {last}" if last != first else ""), "")]

    def _problems(self) -> dict[str, list[Part]]:
        count = self._counts
        equal = count["groups/same_reward"]
        groups = count["groups/trained"] + equal + count["groups/dropped"]
        rest = {
            f"{count['episodes/retried']:,} retried": count["episodes/retried"],
            f"{count['episodes/stale']:,} stale": count["episodes/stale"],
            f"{count['groups/dropped']:,} groups dropped": count["groups/dropped"],
            f"{equal:,} of {groups:,} groups without signal": equal,
        }
        failed: list[Part] = [
            (f"{n:,} {one_line(kind)}", "red") for kind, n in self._failures.most_common(4) if n
        ]
        return {
            "failed": failed or ([("none", "")] if self._step else []),
            "look at": [(words, "") for words, number in rest.items() if number],
        }


def _curve(rewards: list[float]) -> list[Part]:
    if len(rewards) < 2:
        return []
    return [(f"{sparkline(rewards)}  {rewards[0]:.3f} → {rewards[-1]:.3f}", "")]


def _lines(label: str, parts: list[Part], width: int) -> list[Text]:
    lines = [Text.assemble((label.ljust(LABEL), "dim"))] if parts else []
    for at, (words, style) in enumerate(parts):
        if at:
            lines[-1].append(", ")
        if at and lines[-1].cell_len + len(words) > width:
            lines.append(Text(" " * LABEL))
        lines[-1].append(words, style)
    return lines


def _add_bar(text: Text, width: int, share: float) -> None:
    done = round(width * share)
    text.append("━" * done, "green").append("─" * (width - done), "dim").append("  ")


def _cut(lines: list[Text], columns: int) -> list[Text]:
    for line in lines:
        line.truncate(columns - 1, overflow="ellipsis")
    return lines


def _width(column: tuple[int, int, str, list[str]]) -> int:
    return max(len(column[2]), *map(len, column[3]))


def sparkline(values: list[float]) -> str:
    cells = min(SPARKLINE, len(values))
    edges = [round(at * len(values) / cells) for at in range(cells + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(SPARKS[min(len(SPARKS) - 1, int((mean - low) / span * len(SPARKS)))] for mean in means)

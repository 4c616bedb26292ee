"""The health of a run: signs that it learns nothing or ruins the model.

Rows compare recent with earlier steps, so a million episodes cost no more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.reading import NamedRow
from tinkerscript.rollouts.alignment.checks import ERRORS

JUDGED_STEPS = 10

# A trend averages windows of `WINDOW` steps: fewer steps in a short run, for at least four windows, and more
# in a long run, for at most `WINDOWS`.
WINDOW, WINDOWS = 5, 40

SURE = 2.5

_SCORES = """
SELECT sample, avg(reward), min(uuid) FROM episodes
    WHERE step = ? AND label = ? AND episode_type = 'eval' AND undone = 0 GROUP BY sample
"""

NORMAL_95 = 1.96  # Standard errors around the mean that hold 95%.

Kind = Literal["good", "warn", "bad"]


class Gain(BaseModel):
    """Change of the mean reward between two evaluations, over the samples in both."""

    mean: float
    margin: float = Field(description="Half the width of a 95% interval, from the samples' spread.")
    samples: int


class HealthRow(BaseModel):
    name: str
    label: str
    meaning: str
    value: str
    kind: Kind
    words: str = Field(default="", description="Diagnosis and remedy; empty if the row is good.")

    def line(self) -> str:
        return f"{self.label.lower()} {self.value}: {self.words}"


class BestScore(BaseModel):
    """The evaluation with the highest score, if the last one is significantly lower."""

    label: str
    step: int
    score: float
    last: float
    loss: Gain = Field(description="From the best evaluation to the last, sample by sample.")


@dataclass(frozen=True)
class _Trend:
    means: dict[int, float]

    @property
    def first(self) -> float:
        return self.means[max(self.means)]

    @property
    def last(self) -> float:
        return self.means[0]

    def __bool__(self) -> bool:
        return len(self.means) > 1 and 0 in self.means

    def text(self, form: str = "{:.3f}") -> str:
        first, last = (form.format(value) for value in (self.first, self.last))
        return last if first == last else f"{first} → {last}"


class _Steps:
    def __init__(self, ledger: LedgerReader) -> None:
        self._ledger = ledger
        self.last = int(ledger.number("SELECT max(step) FROM steps WHERE undone = 0") or 0)
        self._size = max(1, min(WINDOW, self.last // 4), math.ceil(self.last / WINDOWS))

    def trend(self, name: str, what: str = "avg(value)") -> _Trend:
        query = (
            f"SELECT (? - step) / ?, {what} FROM metrics WHERE {_NAMED} AND step BETWEEN 1 AND ? GROUP BY 1"
        )
        rows = self._ledger.rows(query, (self.last, self._size, name, self.last))
        return _Trend({int(window): float(value) for window, value in rows})

    def recent(self, name: str) -> list[float]:
        query = f"SELECT value FROM metrics WHERE {_NAMED} AND step > ? ORDER BY step"
        return [value for (value,) in self._ledger.rows(query, (name, max(0, self.last - JUDGED_STEPS)))]

    def recent_mean(self, name: str, weight: str) -> float | None:
        query = """
            SELECT sum(a.value * b.value) / nullif(sum(b.value), 0)
            FROM metrics AS a JOIN metrics AS b ON b.step = a.step
            WHERE a.name = ? AND b.name = ? AND a.undone = 0 AND b.undone = 0 AND a.step > ?
        """
        return self._ledger.number(query, (name, weight, max(0, self.last - JUDGED_STEPS)))

    def range(self, low: str, high: str) -> tuple[float, float] | None:
        query = f"SELECT min(value), max(value) FROM metrics WHERE {_NAMED}"
        lowest, highest = self._ledger.row(query, (low,)), self._ledger.row(query, (high,))
        if lowest is None or highest is None or lowest[0] is None or highest[1] is None:
            return None
        return lowest[0], highest[1]

    def errors(self) -> list[NamedRow]:
        query = """
            SELECT name, sum(count) FROM findings WHERE kind = 'error' AND undone = 0 AND step > ?
            GROUP BY name ORDER BY 2 DESC, name
        """
        return self._ledger.rows(query, (max(0, self.last - JUDGED_STEPS),))


_NAMED = "name = ? AND undone = 0"


@dataclass(frozen=True)
class _Reward:
    trend: _Trend
    fell: bool
    """Significantly below the best window."""

    rose: bool
    """Significantly above the first window."""

    @classmethod
    def of(cls, steps: _Steps) -> _Reward:
        means = steps.trend("reward/mean")
        if not means:
            return cls(means, fell=False, rose=False)
        variance = steps.trend("reward/deviation", "avg(value * value)").means
        # The unit is a group, because samples differ in difficulty.
        counts = [steps.trend(f"groups/{name}", "sum(value)").means for name in ("trained", "same_reward")]

        def error(window: int) -> float:
            return variance.get(window, 0.0) / max(1.0, sum(each.get(window, 0.0) for each in counts))

        def beyond(high: int, low: int, errors: float) -> bool:
            difference = means.means[high] - means.means[low]
            return difference > errors * math.sqrt(error(high) + error(low)) and difference > 1e-9

        oldest = max(means.means)
        fell = any(beyond(window, 0, SURE) for window in means.means if window)
        return cls(means, fell=fell, rose=beyond(0, oldest, 2.0))


def health_rows(ledger: LedgerReader) -> list[HealthRow]:
    steps = _Steps(ledger)
    if not steps.last:
        return []
    reward = _Reward.of(steps)
    rows = [
        _score(ledger),
        _rewards(reward),
        _trained(steps),
        _equal(steps, reward),
        _cut_off(ledger, steps),
        _reply_length(steps, reward),
        _failed(ledger),
        _stale(steps),
        _waits(steps),
        _mismatch(ledger, steps),
        _entropy(steps, reward),
        _gradients(steps),
        _rate(steps),
    ]
    return [row for row in rows if row is not None]


def verdict(rows: Sequence[HealthRow]) -> str:
    for kind, phrase in (("bad", "needs attention"), ("warn", "worth a look")):
        if found := [row.label for row in rows if row.kind == kind]:
            return f"{phrase}: {', '.join(found)}".lower()
    return "all well" if rows else "no step has ended yet"


def best_score(ledger: LedgerReader) -> BestScore | None:
    rows = _scored(ledger)
    if len(rows) < 2:
        return None
    best, last = max(rows, key=lambda row: row["score"]), rows[-1]
    old, new = (sample_scores(ledger, step=row["step"], label=row["label"]) for row in (best, last))
    loss = gain(old, new)
    if loss is None or loss.mean + loss.margin >= 0:
        return None
    return BestScore(
        label=best["label"], step=best["step"], score=best["score"], last=last["score"], loss=loss
    )


def _scored(ledger: LedgerReader) -> list[NamedRow]:
    return ledger.rows(
        "SELECT label, step, score FROM evaluations "
        "WHERE undone = 0 AND score IS NOT NULL ORDER BY step, time"
    )


def _score(ledger: LedgerReader) -> HealthRow | None:
    rows = ledger.rows(
        "SELECT score FROM evaluations WHERE undone = 0 AND score IS NOT NULL ORDER BY step, time"
    )
    if len(rows) < 2:
        return None
    row = HealthRow(
        name="held_out",
        label="Held-out score",
        meaning="on samples that do not train; bad if it fell by more than its 95% interval",
        value=f"{rows[0]['score']:.3f} → {rows[-1]['score']:.3f}",
        kind="good",
    )
    best = best_score(ledger)
    if best is None:
        return row
    fell = f"it fell from {best.score:.3f} ({best.label}) to {best.last:.3f}, by {-best.loss.mean:.3f}"
    words = f"{fell} ± {best.loss.margin:.3f}: the model is worse than it was"
    return row.model_copy(update={"kind": "bad", "words": words})


def _rewards(reward: _Reward) -> HealthRow | None:
    if not reward.trend:
        return None
    words = (
        f"it fell from {max(reward.trend.means.values()):.3f} to {reward.trend.last:.3f}: lower "
        "training.learning_rate, and resume from a checkpoint before the fall"
    )
    return HealthRow(
        name="reward",
        label="Training reward",
        meaning="mean of the first and of the last steps; bad if it fell beyond chance",
        value=reward.trend.text(),
        kind="bad" if reward.fell else "good",
        words=words if reward.fell else "",
    )


def _trained(steps: _Steps) -> HealthRow | None:
    trained = steps.recent("train/sequences")
    if not trained:
        return None
    idle = trained.count(0.0)
    kind: Kind = "bad" if idle == len(trained) else "warn" if 2 * idle > len(trained) else "good"
    return HealthRow(
        name="trained",
        label="Steps that trained",
        meaning="of the last ones; the others did not change the weights",
        value=f"{len(trained) - idle} of the last {len(trained)}",
        kind=kind,
        words="" if kind == "good" else _why_idle(steps),
    )


def _why_idle(steps: _Steps) -> str:
    if sum(steps.recent("groups/same_reward")):
        return _difficulty(steps)
    if errors := steps.errors():
        return _left_out(errors)
    return "no group had enough episodes with a result"


def _left_out(errors: Sequence[NamedRow]) -> str:
    name, count = errors[0]
    return f"{int(count):,} sequences of the last steps were left out: {name}: {ERRORS.get(name, name)}"


def _difficulty(steps: _Steps) -> str:
    mean = steps.recent_mean("groups/same_reward_mean", "groups/same_reward")
    known = steps.range("reward/lowest", "reward/highest")
    if mean is None or known is None:
        return "in each of these groups all rewards are equal"
    low, high = known
    if low == high:
        return f"every episode so far has the reward {low:g}: nothing shows what is better"
    if mean > (low + high) / 2:
        return f"too easy: groups agree on {mean:.3g}, and nothing is left to learn from them"
    return f"too hard: groups agree on {mean:.3g}, so that no episode shows what is better"


def _equal(steps: _Steps, reward: _Reward) -> HealthRow:
    equal, trained = sum(steps.recent("groups/same_reward")), sum(steps.recent("groups/trained"))
    groups = equal + trained + sum(steps.recent("groups/dropped"))
    words = _difficulty(steps)
    is_much = groups > 0 and equal > 0.5 * groups
    # A run that has learned its task has them too.
    saturated = is_much and reward.rose and words.startswith("too easy")
    return HealthRow(
        name="equal",
        label="Groups without signal",
        meaning="of the last steps: all rewards equal; worth a look above half",
        value=_share(equal, groups) + (", saturated" if saturated else ""),
        kind="warn" if is_much and not saturated else "good",
        words=words if is_much and not saturated else "",
    )


def _share(part: float, whole: float) -> str:
    return f"{part:,.0f} of {whole:,.0f} ({part / whole:.0%})" if whole else "–"


def _cut_off(ledger: LedgerReader, steps: _Steps) -> HealthRow | None:
    share = steps.recent_mean("response_tokens/cut_off", "alignment/calls")
    if share is None:
        return None
    kind: Kind = "bad" if share > 0.5 else "warn" if share > 0.1 else "good"
    return HealthRow(
        name="cut_off",
        label="Replies cut off",
        meaning="by the token limit, in the last steps; bad above half, worth a look above 10%",
        value=f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}",
        kind=kind,
        words="" if kind == "good" else _what_cuts(ledger, steps),
    )


def _what_cuts(ledger: LedgerReader, steps: _Steps) -> str:
    limit = ledger.setting("sampling", "max_tokens")
    longest = max(steps.recent("response_tokens/max"), default=None)
    if limit is None or longest is None:
        return "raise sampling.max_tokens, or the task's own max_tokens, or ask for shorter replies"
    if longest == limit:
        return f"raise sampling.max_tokens ({limit:,}), or ask for shorter replies"
    return (
        f"at {longest:,.0f} tokens, not by sampling.max_tokens ({limit:,}): raise the task's or agent's own "
        "max_tokens, or ask for shorter replies"
    )


def _reply_length(steps: _Steps, reward: _Reward) -> HealthRow | None:
    trend = steps.trend("response_tokens/mean")
    if not trend:
        return None
    fell = trend.last < trend.first / 5 or (trend.last < 2.5 and trend.last < 0.7 * trend.first)
    collapsed = fell and not reward.rose
    return HealthRow(
        name="length",
        label="Reply length",
        meaning="tokens in the first and in the last steps; bad if replies became empty",
        value=trend.text("{:.1f}"),
        kind="bad" if collapsed else "good",
        words="replies have become nearly empty, and the reward did not rise" if collapsed else "",
    )


def _failed(ledger: LedgerReader) -> HealthRow:
    row = ledger.row("SELECT sum(failed), sum(accepted) FROM steps WHERE undone = 0")
    failed, accepted = (row[0] or 0, row[1] or 0) if row else (0, 0)
    ended = failed + accepted
    kind: Kind = "bad" if failed > 0.05 * ended else "warn" if failed else "good"
    return HealthRow(
        name="failed",
        label="Failed episodes",
        meaning="out of attempts, without a reward; bad above 5%",
        value=_share(failed, ended),
        kind=kind,
        words="" if kind == "good" else "they are left out of their groups",
    )


def _stale(steps: _Steps) -> HealthRow:
    stale = sum(steps.recent("episodes/stale"))
    return HealthRow(
        name="stale",
        label="Too old to train",
        meaning="in the last steps: sampled too many steps before, and dropped",
        value=f"{stale:,.0f}",
        kind="warn" if stale else "good",
        words="raise training.max_policy_lag, or train fewer episodes a step" if stale else "",
    )


def _waits(steps: _Steps) -> HealthRow | None:
    waited = steps.recent("time/wait_stale_s")
    if not waited:
        return None
    whole = sum(steps.recent("time/rollout_s")) + sum(steps.recent("time/train_s"))
    is_long = sum(waited) > 0.1 * whole
    return HealthRow(
        name="waits",
        label="Waiting for old groups",
        meaning="share of the last steps' time: groups that would have been too old; worth a look above 10%",
        value=_share(sum(waited), whole),
        kind="warn" if is_long else "good",
        words="raise training.max_policy_lag, or set training.on_stale: drop" if is_long else "",
    )


def _mismatch(ledger: LedgerReader, steps: _Steps) -> HealthRow:
    largest = ledger.number(f"SELECT max(value) FROM metrics WHERE {_NAMED}", ("alignment/max_abs_dlogp",))
    findings = int(
        ledger.number("SELECT count(DISTINCT step) FROM findings WHERE kind = 'finding' AND undone = 0") or 0
    )
    errors = steps.errors()
    kind: Kind = "bad" if findings else "warn" if errors else "good"
    words = f"{findings} steps whose tokens the trainer did not reproduce" if findings else ""
    if errors and not findings:
        words = _left_out(errors)
    return HealthRow(
        name="mismatch",
        label="Trainer–sampler mismatch",
        meaning="largest log probability difference of a token",
        value="–" if largest is None else f"{largest:.1e}",
        kind=kind,
        words=words,
    )


def _entropy(steps: _Steps, reward: _Reward) -> HealthRow | None:
    trend = steps.trend("train/entropy")
    if not trend:
        return None
    collapsed = trend.last < 0.05 and trend.last < 0.1 * trend.first and not reward.rose
    return HealthRow(
        name="entropy",
        label="Entropy",
        meaning="nats per token; near 0 nothing new is tried",
        value=trend.text("{:.3g}"),
        kind="warn" if collapsed else "good",
        words="the model is certain of every token, and the reward did not rise" if collapsed else "",
    )


def _gradients(steps: _Steps) -> HealthRow | None:
    trend = steps.trend("train/grad_norm")
    if not trend:
        return None
    exploded = trend.last > 10 * trend.first
    return HealthRow(
        name="gradients",
        label="Gradient norm",
        meaning="before clipping, of the first and of the last steps; worth a look if it grew tenfold",
        value=trend.text("{:.3g}"),
        kind="warn" if exploded else "good",
        words="it has exploded: lower training.learning_rate" if exploded else "",
    )


# Limits of a step: KL divergence from the previous policy, in nats per token, and share of clipped tokens. A
# clip as narrow as gspo's also acts in tiny steps, so clipping counts only in a step of some size.
FAR_NATS, MUCH_CLIPPED, SOME_NATS = 0.1, 0.5, 0.01


def _rate(steps: _Steps) -> HealthRow | None:
    moved, clipped = steps.recent("train/kl_step"), steps.recent("train/clip_fraction")
    if not moved:
        return None
    nats, share = statistics.fmean(moved), statistics.fmean(clipped) if clipped else 0.0
    is_far = nats > FAR_NATS or (share > MUCH_CLIPPED and nats > SOME_NATS)
    return HealthRow(
        name="rate",
        label="Size of a step",
        meaning="how far a step moves the policy, in nats per token, and the share of tokens clipped",
        value=f"{nats:.2g} nats" + (f", {share:.0%} clipped" if clipped else ""),
        kind="warn" if is_far else "good",
        words="each step goes far: lower training.learning_rate, minibatches or epochs_per_batch"
        if is_far
        else "",
    )


SampleScores = dict[str, tuple[float | None, str]]  # Sample -> mean reward, and one episode's uuid.


def sample_scores(ledger: LedgerReader, *, step: int, label: str) -> SampleScores:
    found = ledger.rows(_SCORES, (step, label))
    return {bytes(sample).hex(): (score, uuid) for sample, score, uuid in found}


def margin_of(values: Sequence[float]) -> float:
    """Half the width of the mean's 95% interval."""
    return NORMAL_95 * statistics.stdev(values) / math.sqrt(len(values))


def gain(before: SampleScores, after: SampleScores) -> Gain | None:
    changes: list[float] = []
    for sample in before.keys() & after.keys():
        old, new = before[sample][0], after[sample][0]
        if old is not None and new is not None:
            changes.append(new - old)
    if len(changes) < 2:
        return None
    return Gain(mean=statistics.fmean(changes), margin=margin_of(changes), samples=len(changes))

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgspec
import numpy as np
import tinker

from tinkerscript.ledger.rows import (
    EpisodeRow,
    FindingRow,
    MetricRow,
    ResultRow,
    Row,
    TokensRow,
    TrainedRow,
    Use,
)
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence, packed_sequences
from tinkerscript.protocol import TRAINER_POOL
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import FloatArray, pack_ids, pack_logprobs
from tinkerscript.rollouts.rollout import Rollout
from tinkerscript.train.collector import Batch, why_failed
from tinkerscript.train.learner import Compared, Learner
from tinkerscript.trainer_link.messages import EpisodeFailed, Outcome

MAX_FINDINGS = 200

# Bytes of tokens per transaction; more would block the server.
NOTED_BYTES = 2**20


def keeps_tokens(recording: str, step: int) -> bool:
    if recording == "off":
        return False
    return step % (int(recording.removeprefix("every ")) if recording != "all" else 1) == 0


def metric_rows(step: int, metrics: Mapping[str, float]) -> list[MetricRow]:
    return [
        MetricRow(name=name, step=step, value=float(value))
        for name, value in metrics.items()
        if np.isfinite(value)
    ]


def finding_row(step: int, name: str, detail: str) -> FindingRow:
    return FindingRow(step=step, kind="finding", name=name, detail=detail)


def finding_rows(step: int, learners: Sequence[Learner]) -> list[FindingRow]:
    noticed = sum((each.alignment.noticed for each in learners), Counter[tuple[str, str, str]]())
    return [
        FindingRow(step=step, kind=kind, name=name, episode=uuid, count=count)
        for (kind, name, uuid), count in sorted(noticed.items())[:MAX_FINDINGS]
    ]


def left_out_rows(batch: Batch, step: int, *, stale: Mapping[str, str]) -> list[TrainedRow]:
    return [
        TrainedRow(
            episode=outcome.sequence,
            step=step,
            outcome=_why_left_out(outcome, stale),
            reason=why_failed(outcome) if isinstance(outcome, EpisodeFailed) else stale.get(uuid, ""),
        )
        for uuid, outcome in batch.outcomes.items()
    ]


def _why_left_out(outcome: Outcome, stale: Mapping[str, str]) -> str:
    if isinstance(outcome, EpisodeFailed):
        return Use.LEFT_OUT
    return Use.STALE if outcome.episode_uuid in stale else Use.GROUP_TOO_SMALL


def set_aside_rows(batch: Batch, step: int, reason: str) -> list[TrainedRow]:
    return [
        TrainedRow(episode=each.sequence, step=step, outcome=Use.SET_ASIDE, reason=reason)
        for each in batch.outcomes.values()
    ]


def trained_rows(learner: Learner, step: int, sequences: Mapping[str, int]) -> Iterator[TrainedRow]:
    places = {id(group): place for place, group in enumerate(learner.used)}
    for group in (*learner.groups, *learner.replayed):
        advantages = group.advantages(learner.rule).tolist()
        for episode, advantage in zip(group.episodes, advantages, strict=True):
            yield TrainedRow(
                episode=sequences[episode.episode_uuid],
                step=step,
                role=learner.role,
                outcome=learner.outcome_of(group, episode),
                place=places.get(id(group), -1),
                advantage=advantage,
                reason=learner.stale.get(episode.episode_uuid, ""),
            )


def token_rows(
    learner: Learner, step: int, sequences: Mapping[str, int], *, stopped: str = ""
) -> Iterator[list[TokensRow]]:
    """Each token's numbers from the last update. `stopped`: why the step changed no weights."""
    rows, size = list[TokensRow](), 0
    view = _Tokens(learner, stopped)
    for group in (*learner.groups, *learner.replayed):
        for episode in group.episodes:
            found = [view.of(number, each, group) for number, each in enumerate(episode.rollouts)]
            if not found:
                continue
            row = TokensRow(
                episode=sequences[episode.episode_uuid],
                step=step,
                role=learner.role,
                sequences=packed_sequences(found),
            )
            rows.append(row)
            size += row.size
            if size > NOTED_BYTES:
                yield rows
                rows, size = [], 0
    if rows:
        yield rows


class _Tokens:
    def __init__(self, learner: Learner, stopped: str) -> None:
        self._role, self._stopped = learner.role, stopped
        self._advantages = learner.advantages
        self._compared: dict[int, Compared] = {id(each.rollout): each for each in learner.compared}
        self._corrected = learner.corrected
        self._trains, self._masks = learner.trains, learner.masks
        self._reasons = learner.alignment.reasons

    def of(self, number: int, rollout: Rollout, group: RolloutGroup) -> TrainedSequence:
        sampled = rollout.sampled
        compared = self._compared.get(id(rollout))
        advantages = self._advantages.get(id(rollout))
        entropies = compared.entropies if compared else None
        return TrainedSequence(
            number=number,
            role=self._role,
            trainer_logprobs=pack_logprobs(compared.trainer_logprobs[sampled]) if compared else b"",
            entropies=b"" if entropies is None else entropies[sampled].astype("<f2").tobytes(),
            advantages=b"" if advantages is None else _shortest(advantages[sampled].astype("<f4")),
            uses=_shortest(self._uses(rollout, advantages)),
            reason="" if advantages is not None else self._reason(rollout, group),
        )

    def _uses(self, rollout: Rollout, advantages: FloatArray | None) -> Any:
        """uint8 [S]: a `TokenUse` per sampled token."""
        uses = np.full(len(rollout.tokens), TokenUse.TRAINED if advantages is not None else TokenUse.LEFT_OUT)
        if advantages is not None:
            uses[~rollout.loss_mask] = TokenUse.CONSTRAINED
            if (corrected := self._corrected.get(id(rollout))) is not None:
                uses[corrected] = TokenUse.CORRECTED
        return uses[rollout.sampled].astype(np.uint8)

    def _reason(self, rollout: Rollout, group: RolloutGroup) -> str:
        if reason := self._reasons.get(id(rollout)):
            return reason
        if self._stopped and self._trains(group):
            return f"the step was stopped: {self._stopped}"
        if not self._trains(group):
            return "same_reward"
        if self._masks(rollout):
            return "the token limit cut its last reply off (training.mask_truncated)"
        return "every token was constrained by a grammar"


def _shortest(values: Any) -> bytes:
    return values[:1].tobytes() if len(values) and (values == values[0]).all() else values.tobytes()


def chat_rows(
    number: int, step: int, datum: tinker.Datum, logprobs: FloatArray, origin: Mapping[str, str]
) -> list[Row]:
    """`logprobs`: float32 [T], before the step. `origin`: one of `SupervisedExample.origins`."""
    inputs = datum.loss_fn_inputs
    targets = inputs["target_tokens"].to_numpy()
    trains = inputs["weights"].to_numpy() != 0
    tokens = np.concatenate([datum.model_input.to_ints()[:1], targets]).astype(np.int32)
    sequence = TrainedSequence(
        number=0,
        trainer_logprobs=pack_logprobs(logprobs[trains]),
        uses=bytes([TokenUse.TRAINED]),
        chat=pack_ids(tokens),
        chat_trained=np.concatenate([[False], trains]).astype(np.uint8).tobytes(),
    )
    figures = {"nll": float(-logprobs[trains].mean())} if trains.any() else {}
    metadata = {"metadata": origin} if origin else {}
    return [
        EpisodeRow(
            sequence=number,
            uuid=uuid4().hex,
            episode_type="train",
            group_id=f"step-{step}",
            pool=TRAINER_POOL,
            group_size=1,
            step=step,
            sample=b"",
            digest=b"",
            state="ended",
            end_number=number,
            ended_at=time.time(),
            consumed=1,
        ),
        ResultRow(episode=number, result=msgspec.json.encode({"log_metrics": figures, **metadata})),
        TrainedRow(episode=number, step=step, outcome=Use.TRAINED),
        TokensRow(episode=number, step=step, sequences=packed_sequences([sequence])),
    ]

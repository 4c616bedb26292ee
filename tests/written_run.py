"""A run written by hand: its episodes and steps as the server and the trainer leave them in the ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rollout_helpers import make_call
from run_ledger import LedgerWriter, claim, ended_episode
from tinkerscript.ledger.compression import packed
from tinkerscript.ledger.rows import (
    CallRow,
    EvaluationRow,
    FindingRow,
    MetricRow,
    ResultRow,
    Row,
    SampleRow,
    StepRow,
    TokensRow,
    TrainedRow,
    Use,
)
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence, packed_sequences
from tinkerscript.protocol import Failure
from tinkerscript.rollouts.call import Call, pack_logprobs
from tinkerscript.server.episodes.record import content_digest

LATE = Failure(kind="timeout", message="late", attempt=1, client_uuid="worker-1")

_encode_call = msgspec.msgpack.Encoder().encode


def said(
    parent: Call | None, prompt: list[int], sampled: list[int], question: str, answer: str, **extra: Any
) -> Call:
    """A call with its messages."""
    fields: dict[str, Any] = {
        "messages": json.dumps([{"role": "user", "content": question}]),
        "reply": json.dumps({"role": "assistant", "content": answer}),
        "created": 1000,
    }
    return make_call(parent, prompt, sampled, **fields | extra)


def trained_sequence(number: int, sampled: int, **fields: Any) -> TrainedSequence:
    """A sequence whose `sampled` tokens all trained: the k-th has entropy k/4 and logprob -k."""
    given: dict[str, Any] = {
        "trainer_logprobs": pack_logprobs([-float(k) for k in range(sampled)]),
        "entropies": (np.arange(sampled) / 4).astype("<f2").tobytes(),
        "advantages": pack_logprobs([0.5]),
        "uses": bytes([TokenUse.TRAINED]),
    }
    return TrainedSequence(number=number, **given | fields)


def sample_row(sample: Mapping[str, Any], task: str = "sums") -> SampleRow:
    payload = json.dumps({"task": task, "sample": sample}).encode()
    return SampleRow(digest=content_digest(payload), payload=payload)


def call_row(episode: int, attempt: int, call: Call, *, emptied: bool = False) -> CallRow:
    last = call.policy_version_end
    return CallRow(
        episode=episode,
        attempt=attempt,
        role=call.role,
        created=call.created,
        policy_version=call.policy_version,
        last_version=call.policy_version if last is None else last,
        prompt_tokens=len(call.new_prompt) // 4,
        sampled_tokens=len(call.sampled) // 4,
        stop_reason=call.stop_reason,
        call=b"" if emptied else packed(_encode_call(call)),
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """An episode that ended; by default one of training, with a result."""

    uuid: str
    step: int = 1
    label: str = ""
    """Of its evaluation; empty for training."""

    group_id: str = "step-1/sample-0"
    task: str = "sums"
    sample: Mapping[str, Any] = field(
        default_factory=lambda: {"id": "s0", "input": "What is 1+1?", "target": "2"}
    )
    reward: float | None = 1.0
    """None: it failed."""

    is_success: bool | None = None
    attempt: int = 1
    """Its claims."""

    client: str = "worker-1"
    queued_s: float | None = None
    policy_version: int = 0
    """When it was claimed."""

    ended: float = 2000.0
    calls: Mapping[int, Sequence[Call]] = field(default_factory=dict[int, Sequence[Call]])
    """By attempt."""

    failures: Sequence[Failure] = ()
    """Of its attempts; the last of them is why it failed."""

    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    log_metrics: dict[str, float] = field(default_factory=dict[str, float])
    emptied: bool = False
    undone: int = 0

    def rows(self, number: int) -> Iterator[Row]:
        """As the episode with this number."""
        sample = sample_row(self.sample, self.task)
        yield sample
        yield ended_episode(
            number,
            uuid=self.uuid,
            episode_type="eval" if self.label else "train",
            group_id=self.group_id,
            group_size=0,
            step=self.step,
            label=self.label,
            position=-1,
            sample=sample.digest,
            state="failed" if self.reward is None else "ended",
            failure=self.failures[-1].kind if self.reward is None else "",
            reward=self.reward,
            is_success=None if self.is_success is None else int(self.is_success),
            ended_at=self.ended,
            emptied=int(self.emptied),
            undone=self.undone,
        )
        failures = {failure.attempt: failure.model_dump_json() for failure in self.failures}
        for attempt in {*range(1, self.attempt + 1), *failures}:
            yield claim(
                *(number, attempt),
                client=self.client if attempt else "",
                claimed_at=self.ended - 10.0,
                queued_s=self.queued_s,
                policy_version=self.policy_version,
                lease_s=60.0,
                failure=failures.get(attempt),
            )
        for attempt, calls in self.calls.items():
            for call in calls:
                yield call_row(number, attempt, call, emptied=self.emptied)
        if self.reward is not None:
            output = {"reward": self.reward, "is_success": self.is_success}
            output |= {"metadata": self.metadata, "log_metrics": self.log_metrics}
            yield ResultRow(episode=number, result=msgspec.json.encode(output))


def metric_rows(step: int, metrics: Mapping[str, float]) -> Iterator[MetricRow]:
    for name, value in metrics.items():
        yield MetricRow(name=name, step=step, value=value)


class WrittenRun(LedgerWriter):
    """Writes a run's episodes and steps, in small."""

    def episode(
        self, uuid: str, calls: Mapping[int, Sequence[Call]] | Sequence[Call] | None = None, **fields: Any
    ) -> int:
        """One with one call, unless `calls` says otherwise. Returns its number."""
        if calls is None:
            calls = [said(None, [1, 2], [3, 4, 5], f"ask {uuid}", f"reply {uuid}")]
        by_attempt = calls if isinstance(calls, Mapping) else {fields.get("attempt", 1): calls}
        given: dict[str, Any] = {"calls": by_attempt, "uuid": uuid}
        if "reward" in fields and fields["reward"] is None:
            given |= {"calls": {}, "failures": [LATE]}
        self.last += 1
        self.put(*Written(**given | fields).rows(self.last))
        return self.last

    def evaluation(self, label: str, step: int, *, undone: int = 0) -> None:
        """The evaluation whose episodes are there."""
        query = "SELECT count(*), count(reward), avg(reward) FROM episodes WHERE label = ? AND undone = ?"
        count, accepted, score = self.execute(query, label, undone).fetchone()
        given: dict[str, Any] = {"time": 1000.0 + step, "policy_version": step, "undone": undone}
        given |= {"score": score, "accepted": accepted, "failed": count - accepted}
        self.put(EvaluationRow(label=label, step=step, **given))

    def step(self, step: int, metrics: Mapping[str, float] | None = None, **fields: Any) -> None:
        given: dict[str, Any] = {"time": 1000.0 + step, "policy_version": step, "reward": 0.5, "accepted": 4}
        given |= {"failed": 1, "trained": 2, "max_lag": 0, **fields}
        self.put(StepRow(step=step, **given), *metric_rows(step, metrics or {}))

    def trained(self, step: int, uuid: str, sequences: Sequence[TrainedSequence] = (), **fields: Any) -> None:
        """A step trained on an episode, unless `fields` say otherwise."""
        (number,) = self.execute("SELECT sequence FROM episodes WHERE uuid = ?", uuid).fetchone()
        given: dict[str, Any] = {"outcome": Use.TRAINED, **fields}
        row = TrainedRow(episode=number, step=step, **given)
        self.put(row)
        if sequences:
            packed = packed_sequences(sequences)
            self.put(TokensRow(episode=number, step=step, role=row.role, undone=row.undone, sequences=packed))

    def finding(self, step: int, kind: str, name: str, episode: str = "", count: int = 1) -> None:
        self.put(FindingRow(step=step, kind=kind, name=name, detail=f"d{step}", episode=episode, count=count))

"""What a run records of each token: real updates of a small model, against numbers computed by hand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_helpers import make_call, update
from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.lifecycle import ProcessId
from tinkerscript.record.entries import TokenUse, TrainedSequence
from tinkerscript.record.reader import Record
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import Call, FloatArray
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout
from tinkerscript.testing import QuietReporter
from tinkerscript.train.alignment_check import TrainedModel
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.train.learner import Learner
from tinkerscript.train.recorder import RunRecorder, recorded
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome


@dataclass
class ByHand:
    """The model's own numbers, computed with transformers alone."""

    folder: Path
    model: Any = field(init=False)

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def logprobs(self, ids: Sequence[int]) -> FloatArray:
        """float32 [T]; 0 for the first token."""
        logprobs = self._all(ids)
        return np.array([0.0, *(logprobs[i, ids[i + 1]] for i in range(len(ids) - 1))], np.float32)

    def entropies(self, ids: Sequence[int]) -> FloatArray:
        """float32 [T], in nats: position t is about the distribution of token t."""
        logprobs = self._all(ids)
        return np.array([0.0, *(-(np.exp(row) * row).sum() for row in logprobs[:-1])], np.float32)

    def _all(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        with torch.no_grad():
            logits = self.model(torch.tensor([list(ids)])).logits[0].double()
        return torch.log_softmax(logits, -1).numpy()

    def call(
        self, parent: Call | None, before: list[int], new: list[int], sampled: list[int], **more: Any
    ) -> Call:
        """A call whose sampler is the model; `before`: all tokens before `new`. `off`: added to the log
        probabilities."""
        ids = [*before, *new, *sampled]
        exact = self.logprobs(ids)[-len(sampled) :]
        off = np.array(more.pop("off", [0.0] * len(sampled)), np.float32)
        return make_call(parent, new, sampled, logprobs=(exact + off).tolist(), **more)


@pytest.fixture(scope="module")
def by_hand(random_model: Path) -> ByHand:
    return ByHand(random_model)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RecordWriter]:
    with RecordWriter(tmp_path / RECORD_FILE) as writer:
        yield writer
        assert (writer.failure, writer.dropped) == ("", 0)


def accepted(uuid: str, calls: list[Call], reward: float, **more: Any) -> EpisodeAccepted:
    fields: dict[str, Any] = {"attempt": 1, "client_uuid": "w", "policy_version_at_claim": 0} | more
    return EpisodeAccepted(episode_uuid=uuid, all_calls=calls, reward=reward, **fields)


METRICS = {"policy_version": 1.0, "episodes/accepted": 4.0, "episodes/failed": 1.0, "reward/mean": 0.5}


@dataclass
class Step:
    """One step of a run: groups of outcomes through a learner, into a record."""

    engine: EmbeddedEngine
    writer: RecordWriter
    recording: str = "all"
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

    async def run(
        self,
        groups: Mapping[str, Sequence[EpisodeAccepted]],
        *,
        others: Sequence[EpisodeAccepted] = (),
        stale: Sequence[str] = (),
        step: int = 1,
        roles: Sequence[str] = (),
    ) -> Learner:
        config = TrainingConfig.model_validate(
            {"steps": 10, "learning_rate": 1e-4, "on_misalignment": "warn", "max_mean_dlogp": 100.0}
            | self.settings
        )
        recorder = RunRecorder(self.writer, self.recording)
        trained = [self._policy(config, role) for role in ("", *roles)]
        outcomes: dict[str, Outcome] = {}
        for name, members in groups.items():
            plans = [PlannedEpisode("train", name, {}, episode_uuid=m.episode_uuid) for m in members]
            recorder.expect(plans, step=step)
            outcomes |= {member.episode_uuid: member for member in members}
        outcomes |= {other.episode_uuid: other for other in others}
        for outcome in outcomes.values():
            recorder.ended(outcome)
        learned: dict[str, float] = {}
        for policy in trained:
            taken = policy.take(list(groups.items()))
            learned |= await update(policy, taken, step=step, lags=dict.fromkeys(range(20), 0))
        recorder.step(
            step,
            outcomes=outcomes,
            trained=trained,
            metrics=METRICS | learned,
            max_lag=0,
            stale=set(stale),
        )
        assert self.writer.flush()
        return trained[0]

    def _policy(self, config: TrainingConfig, role: str) -> Learner:
        report = AlignmentReport()
        client = self.engine.create_training_client()
        return Learner(client, config, model=TrainedModel(64), report=report, seed=1, role=role)


def numbers(data: bytes, kind: str, count: int) -> list[float]:
    """One number a sampled token."""
    values = np.frombuffer(data, kind).astype(np.float64)
    return np.broadcast_to(values, count).tolist() if len(values) == 1 else values.tolist()


def uses(sequence: TrainedSequence, count: int) -> list[TokenUse]:
    return [TokenUse(int(use)) for use in numbers(sequence.uses, "u1", count)]


def sequences_of(
    record: Record, uuid: str, step: int = 1
) -> tuple[list[TrainedSequence], tuple[Rollout, ...]]:
    """What a step did with the episode's sequences, and those that its recorded calls give."""
    number = record.number("SELECT number FROM episodes WHERE uuid = ?", (uuid,))
    assert number is not None
    detail = record.detail(int(number))
    assert detail is not None
    rollouts = merge_calls(detail.calls, episode_uuid=uuid, trains_constrained=False)
    return record.sequences(int(number))[step], rollouts


def outcome_of(record: Record, uuid: str) -> tuple[object, ...]:
    query = (
        "SELECT outcome, advantage, sequences IS NOT NULL FROM trained "
        "WHERE episode = (SELECT number FROM episodes WHERE uuid = ?)"
    )
    (row,) = record.rows(query, (uuid,))
    return tuple(row)


def conversation(by_hand: ByHand, first: int) -> list[Call]:
    """Two turns, and a fork of the first: two sequences."""
    one = by_hand.call(None, [], [5, 6], [first, 9, 11])
    two = by_hand.call(one, [5, 6, first, 9, 11], [20, 21], [12, 13])
    fork = by_hand.call(one, [5, 6, first, 9, 11], [30], [14, 15, 16])
    return [one, two, fork]


async def test_what_is_recorded_of_each_token_is_the_models_own(
    engine: EmbeddedEngine, by_hand: ByHand, writer: RecordWriter, tmp_path: Path
) -> None:
    group = [accepted(f"e{i}", conversation(by_hand, 7 + i), reward) for i, reward in enumerate((1.0, 0.0))]
    learner = await Step(engine, writer).run({"g": group})
    record = Record(tmp_path)
    each = [by_hand.entropies(c.rollout.tokens.tolist())[c.rollout.loss_mask] for c in learner.compared]
    name = "SELECT value FROM metrics WHERE name = (SELECT number FROM names WHERE name = 'train/entropy')"
    assert record.number(name) == pytest.approx(np.concatenate(each).mean(), abs=1e-4)
    for uuid, advantage in (("e0", 0.5), ("e1", -0.5)):
        found, rollouts = sequences_of(record, uuid)
        assert len(rollouts) == 2
        assert [each.number for each in found] == [0, 1]
        for sequence, rollout in zip(found, rollouts, strict=True):
            ids, sampled = rollout.tokens.tolist(), rollout.sampled
            count = int(sampled.sum())
            np.testing.assert_allclose(
                numbers(sequence.trainer_logprobs, "<f4", count), by_hand.logprobs(ids)[sampled], atol=1e-4
            )
            np.testing.assert_allclose(
                numbers(sequence.entropies, "<f2", count), by_hand.entropies(ids)[sampled], atol=4e-3
            )
            carries_loss = rollout.loss_mask[sampled]
            expected = np.where(carries_loss, advantage, 0.0)
            np.testing.assert_allclose(numbers(sequence.advantages, "<f4", count), expected, atol=1e-6)
            assert uses(sequence, count) == [
                TokenUse.TRAINED if trains else TokenUse.CONSTRAINED for trains in carries_loss
            ]
            assert sequence.reason == ""
        assert outcome_of(record, uuid) == ("trained", pytest.approx(advantage), 1)
    assert len(sequences_of(record, "e0")[0][0].uses) == 1, "what all tokens share is stored once"


async def test_tokens_that_carry_no_loss_say_why(
    engine: EmbeddedEngine, by_hand: ByHand, writer: RecordWriter, tmp_path: Path
) -> None:
    def one(uuid: str, reward: float, **more: Any) -> EpisodeAccepted:
        first = 10 + len(uuid) + int(10 * reward)
        return accepted(uuid, [by_hand.call(None, [], [5, 6], [first, 9, 11, 12], **more)], reward)

    wrong = accepted("wrong", [make_call(None, [5], [99, 3])], 1.0)
    groups = {
        "cut": [one("cut1", 1.0, constrained=bytes([0, 2, 1, 0])), one("cut0", 0.0)],
        "equal": [one("equal1", 1.0), one("equal0", 1.0)],
        "forced": [one("forced1", 1.0, constrained=bytes([2] * 4)), one("forced0", 0.0)],
        "unsound": [wrong, one("sound", 0.0)],
    }
    await Step(engine, writer).run(groups, others=[one("old", 1.0), one("alone", 1.0)], stale=["old"])
    record = Record(tmp_path)
    trained, constrained = TokenUse.TRAINED, TokenUse.CONSTRAINED
    expected: dict[str, tuple[str, int, list[TokenUse], str]] = {
        "cut1": ("trained", 4, [trained, constrained, constrained, trained], ""),
        "cut0": ("trained", 4, [trained] * 4, ""),
        "equal1": ("same_reward", 4, [TokenUse.LEFT_OUT] * 4, "same_reward"),
        "forced1": (
            "nothing_to_train",
            4,
            [TokenUse.LEFT_OUT] * 4,
            "every token was constrained by a grammar",
        ),
        "forced0": ("trained", 4, [trained] * 4, ""),
        "wrong": ("misaligned", 2, [TokenUse.LEFT_OUT] * 2, "id_out_of_range"),
        "sound": ("trained", 4, [trained] * 4, ""),
    }
    for uuid, (outcome, count, used, reason) in expected.items():
        ((sequence,), _) = sequences_of(record, uuid)
        assert outcome_of(record, uuid)[0] == outcome, uuid
        assert uses(sequence, count) == used, uuid
        assert sequence.reason == reason, uuid
        assert bool(sequence.advantages) == (outcome == "trained"), uuid
        assert bool(sequence.trainer_logprobs) == (outcome == "trained"), uuid
    assert outcome_of(record, "old") == ("stale", None, 0)
    assert outcome_of(record, "alone") == ("group_too_small", None, 0)
    ((cut,), _) = sequences_of(record, "cut1")
    np.testing.assert_allclose(numbers(cut.advantages, "<f4", 4), [0.5, 0, 0, 0.5], atol=1e-6)
    errors = record.rows("SELECT kind, name, episode, count FROM findings WHERE kind = 'error'")
    assert [tuple(row) for row in errors] == [("error", "id_out_of_range", "wrong", 1)]
    (step,) = record.rows("SELECT policy_version, reward, accepted, failed, trained, max_lag FROM steps")
    assert tuple(step) == (1, 0.5, 4, 1, 4, 0)


async def test_tokens_that_the_correction_leaves_out_are_told_from_those_without_an_advantage(
    engine: EmbeddedEngine, by_hand: ByHand, writer: RecordWriter, tmp_path: Path
) -> None:
    """The third token of `off` is e^2 times as probable to the trainer. `middle` is as good as its group."""

    def one(uuid: str, reward: float, first: int, **more: Any) -> EpisodeAccepted:
        return accepted(uuid, [by_hand.call(None, [], [5, 6], [first, 9, 11, 12], **more)], reward)

    group = [one("off", 1.0, 10, off=[0, 0, -2.0, 0]), one("middle", 0.5, 20), one("low", 0.0, 30)]
    correction = {"rollout_correction": {"method": "mask", "level": "token", "cap": 2.0}}
    await Step(engine, writer, settings=correction).run({"g": group})
    record = Record(tmp_path)
    trained = TokenUse.TRAINED
    for uuid, used in (
        ("off", [trained, trained, TokenUse.CORRECTED, trained]),
        ("middle", [trained] * 4),
        ("low", [trained] * 4),
    ):
        ((sequence,), _) = sequences_of(record, uuid)
        assert uses(sequence, 4) == used, uuid


async def test_only_the_tokens_of_every_nth_step_are_kept(
    engine: EmbeddedEngine, by_hand: ByHand, writer: RecordWriter, tmp_path: Path
) -> None:
    step = Step(engine, writer, recording="every 2")
    for number in (1, 2, 3):
        group = [
            accepted(f"{number}.{i}", [by_hand.call(None, [], [5], [7 + i, number])], float(i))
            for i in range(2)
        ]
        await step.run({f"g{number}": group}, step=number)
    record = Record(tmp_path)
    kept = {uuid for uuid in ("1.0", "2.0", "3.0") if outcome_of(record, uuid)[2]}
    assert kept == {"2.0"}
    assert [number for number in range(1, 7) if record.detail(number) is not None] == [3, 4]
    assert record.number("SELECT count(*) FROM trained WHERE outcome = 'trained'") == 6
    assert record.number("SELECT count(*) FROM steps") == 3


# Episodes


def columns(record: Record, query: str) -> list[tuple[object, ...]]:
    return [tuple(row) for row in record.rows(query)]


def test_an_outcome_is_recorded_for_the_step_and_sample_it_was_planned_for(
    writer: RecordWriter, tmp_path: Path
) -> None:
    recorder = RunRecorder(writer, "all")
    payload = {"task": "sums", "sample": {"id": "s1", "input": "1+1"}}
    plans = [PlannedEpisode("train", "g", payload, episode_uuid=uuid) for uuid in ("a", "b")]
    recorder.expect(plans, step=4)
    recorder.expect(plans, step=9)
    recorder.expect([PlannedEpisode("eval", "v", payload, episode_uuid="v")], step=3, label="step-3")
    failures: list[dict[str, object]] = [
        {"kind": "timeout", "message": "late", "attempt": 1, "client_uuid": "w1"},
        {"kind": "cancelled", "message": "enough", "attempt": 2, "client_uuid": "w2"},
    ]
    lost = {1: [make_call(None, [1], [2])]}
    recorder.ended(accepted("a", [], 1.0, group_id="g", retries=failures[:1], attempt=2, failed_calls=lost))
    recorder.ended(EpisodeFailed(episode_uuid="b", failures=failures, group_id="g"))
    recorder.ended(accepted("v", [], 0.5, group_id="v", episode_type="eval"))
    recorder.ended(accepted("client's", [], 0.0, pool="w", group_id="own"))
    writer.flush()
    record = Record(tmp_path)
    query = "SELECT uuid, step, label, status, reward, attempt, client, sample FROM episodes ORDER BY number"
    assert columns(record, query) == [
        ("a", 4, "", "accepted", 1.0, 2, "w", 1),
        ("b", 4, "", "cancelled", None, 2, "w2", 1),
        ("v", 3, "step-3", "accepted", 0.5, 1, "w", 1),
        ("client's", 0, "", "accepted", 0.0, 1, "w", None),
    ]
    detail = record.detail(1)
    assert detail is not None
    assert (detail.failed_calls, detail.failures) == (lost, failures[:1])


def test_transcripts_are_kept_where_calls_are(writer: RecordWriter, tmp_path: Path) -> None:
    recorder = RunRecorder(writer, "every 2")
    for step in (1, 2):
        recorder.expect([PlannedEpisode("train", "g", {}, episode_uuid=f"t{step}")], step=step)
        recorder.ended(
            accepted(f"t{step}", [], 1.0, group_id="g", attempt=2, transcripts={1: b"failed", 2: b"done"})
        )
    recorder.ended(accepted("v", [], 1.0, episode_type="eval", transcripts={1: b"held out"}))
    writer.flush()
    record = Record(tmp_path)
    assert [record.transcribed(number) for number in (1, 2, 3)] == [[], [1, 2], [1]]
    assert record.transcript(2, 1) == b"failed"
    RunRecorder(writer, "off").ended(accepted("x", [], 1.0, transcripts={1: b"no"}))
    writer.flush()
    assert record.number("SELECT count(*) FROM transcripts") == 3


def test_a_resumed_run_records_once_what_its_ledger_sends_again(writer: RecordWriter, tmp_path: Path) -> None:
    """Before the kill one of the episodes of step 4 was recorded, and one that no step waits for any more."""
    recorder = RunRecorder(writer, "all")
    plans = [PlannedEpisode("train", "g", {}, episode_uuid=uuid) for uuid in ("again", "new", "later")]
    recorder.expect(plans, step=4)
    for uuid in ("again", "later"):
        recorder.ended(accepted(uuid, [], 0.5))
    resumed = RunRecorder(writer, "all")
    resumed.resume(3, kept={"again", "new"})
    resumed.expect(plans[:2], step=4)
    for uuid in ("again", "new"):
        resumed.ended(accepted(uuid, [], 0.5))
    writer.flush()
    record = Record(tmp_path)
    query = "SELECT uuid, step, status, reward FROM episodes ORDER BY number"
    assert columns(record, query) == [(uuid, 4, "accepted", 0.5) for uuid in ("again", "later", "new")]
    undone = "SELECT uuid FROM undone JOIN episodes ON episodes.number = undone.episode ORDER BY 1"
    assert columns(record, undone) == [("later",)]


# The run


def test_how_a_run_ends_is_recorded(tmp_path: Path) -> None:
    config = RunConfig()

    def state() -> dict[str, Any]:
        return Record(tmp_path).facts()

    with recorded(config, tmp_path, QuietReporter()) as (_, progress):
        progress.begin(7)
        with progress.waiting("outer"), progress.waiting("inner"):
            pass
    assert (state()["state"], state()["steps"], state()["waiting_for"]) == ("finished", 7, "")
    assert ProcessId(*state()["process"]) == ProcessId.own()
    with pytest.raises(ValueError, match="no"), recorded(config, tmp_path, QuietReporter()):
        raise ValueError("no")
    assert (state()["state"], state()["failure"]) == ("failed", "ValueError: no")
    with pytest.raises(asyncio.CancelledError), recorded(config, tmp_path, QuietReporter()):
        raise asyncio.CancelledError
    assert (state()["state"], state()["failure"]) == ("stopped", "")


def test_what_a_run_shows_it_also_records(tmp_path: Path) -> None:
    shown = QuietReporter()
    with recorded(RunConfig(), tmp_path, shown) as (_, progress):
        record = Record(tmp_path)

        def becomes(name: str, value: Any) -> None:
            deadline = time.monotonic() + 20
            while record.facts().get(name) != value:
                assert time.monotonic() < deadline, record.facts()
                time.sleep(0.01)

        with progress.waiting("outer"):
            with progress.waiting("inner"):
                becomes("waiting_for", "inner")
            becomes("waiting_for", "outer")
        with progress.phase("step 3", total=4) as phase:
            phase.advance(3)
        becomes("phase", None)
        progress.note("hello")
        progress.step(3, {"a": 1.0})
        progress.evaluation("after", 0.5, 4, 0)
    assert record.facts()["step"] == 3
    assert columns(record, "SELECT text FROM notes") == [("hello",)]
    assert (shown.notes, shown.waits, shown.episodes) == (["hello"], ["outer", "inner"], 3)
    assert (shown.steps, shown.scores) == ([{"a": 1.0}], {"after": 0.5})


def test_a_record_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / RECORD_FILE).write_bytes(b"no database" * 100)
    shown = QuietReporter()
    with recorded(RunConfig(), tmp_path, shown) as (recorder, progress):
        recorder.ended(accepted("a", [], 1.0))
        progress.note("goes on")
    (told, went_on) = shown.notes
    assert "record.sqlite is not written any more" in told
    assert went_on == "goes on"


# A whole run

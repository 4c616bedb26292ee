"""What a step leaves in the ledger: real updates of a small model, against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tinker
import torch
from transformers import AutoModelForCausalLM

from rollout_helpers import make_accepted, make_call, update
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import AlignmentError
from tinkerscript.ledger.rows import EpisodeRow, ResultRow, TokensRow, TrainedRow, Use
from tinkerscript.ledger.tokens import TokenUse, TrainedSequence, unpacked_sequences
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.call import Call, FloatArray
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.train.collector import Batch
from tinkerscript.train.step_rows import (
    chat_rows,
    finding_rows,
    keeps_tokens,
    left_out_rows,
    metric_rows,
    token_rows,
    trained_rows,
)
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed
from trainer_fakes import LENIENT, made_learner

TRAINED, CONSTRAINED, CORRECTED, LEFT_OUT = TokenUse


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

    def one(self, uuid: str, reward: float, first: int = 10, **more: Any) -> EpisodeAccepted:
        """An episode of one call with four sampled tokens."""
        return make_accepted(uuid, reward, [self.call(None, [], [5, 6], [first, 9, 11, 12], **more)])


@pytest.fixture(scope="module")
def by_hand(random_model: Path) -> ByHand:
    return ByHand(random_model)


class Steps:
    """The steps of the policies that train, and the rows of the last one. An episode's number is its place
    among all that were seen."""

    def __init__(self, engine: EmbeddedEngine, *roles: str, **settings: Any) -> None:
        chosen: dict[str, Any] = {"learning_rate": 1e-4, **LENIENT, **settings}
        self.learners = [
            made_learner(engine.create_training_client(), role=role, **chosen) for role in ("", *roles)
        ]
        self.numbers: dict[str, int] = {}
        self.trained: dict[tuple[str, str], TrainedRow] = {}
        """By episode and role."""

        self.tokens: dict[tuple[str, str], list[TrainedSequence]] = {}
        self.metrics: dict[str, float] = {}
        """Of the run's own policy."""

    async def run(
        self,
        *groups: Sequence[EpisodeAccepted],
        step: int = 1,
        replayed: Sequence[RolloutGroup] = (),
        stopped: str = "",
    ) -> None:
        for accepted in groups:
            self.numbers |= {each.episode_uuid: len(self.numbers) + n for n, each in enumerate(accepted)}
        named = [(f"g{number}", group) for number, group in enumerate(groups)]
        for each in self.learners:
            each.take(named)
        with pytest.raises(AlignmentError) if stopped else nullcontext():
            for each in self.learners:
                found = await update(each, each.groups, step=step, replayed=() if each.role else replayed)
                self.metrics = self.metrics if each.role else found
        rows = [row for each in self.learners for row in trained_rows(each, step, self.numbers)]
        assert all(row.step == step for row in rows)
        self.trained = {self._key(row): row for row in rows}
        self.tokens = {
            self._key(row): unpacked_sequences(row.sequences)
            for each in self.learners
            for part in token_rows(each, step, self.numbers, stopped=stopped)
            for row in part
        }

    def _key(self, row: TrainedRow | TokensRow) -> tuple[str, str]:
        return next(uuid for uuid, number in self.numbers.items() if number == row.episode), row.role

    def outcomes(self, role: str = "") -> dict[str, tuple[str, float | None]]:
        """Episode -> what became of it, and its advantage."""
        return {uuid: (row.outcome, row.advantage) for (uuid, of), row in self.trained.items() if of == role}


def numbers(data: bytes, kind: str, count: int) -> list[float]:
    """One number a sampled token."""
    values = np.frombuffer(data, kind).astype(np.float64)
    return np.broadcast_to(values, count).tolist() if len(values) == 1 else values.tolist()


def uses(sequence: TrainedSequence, count: int = 4) -> list[TokenUse]:
    return [TokenUse(int(use)) for use in numbers(sequence.uses, "u1", count)]


# Tokens


def conversation(by_hand: ByHand, first: int) -> list[Call]:
    """Two turns, and a fork of the first: two sequences."""
    one = by_hand.call(None, [], [5, 6], [first, 9, 11])
    two = by_hand.call(one, [5, 6, first, 9, 11], [20, 21], [12, 13])
    fork = by_hand.call(one, [5, 6, first, 9, 11], [30], [14, 15, 16])
    return [one, two, fork]


async def test_what_is_kept_of_each_token_is_the_models_own(engine: EmbeddedEngine, by_hand: ByHand) -> None:
    group = [make_accepted(f"e{i}", 1.0 - i, conversation(by_hand, 7 + i)) for i in (0, 1)]
    steps = Steps(engine)
    await steps.run(group)
    compared = steps.learners[0].compared
    each = [by_hand.entropies(c.rollout.tokens.tolist())[c.rollout.loss_mask] for c in compared]
    assert steps.metrics["train/entropy"] == pytest.approx(np.concatenate(each).mean(), abs=1e-4)
    for outcome, advantage in zip(group, (0.5, -0.5), strict=True):
        uuid = outcome.episode_uuid
        rollouts = merge_calls(outcome.all_calls, episode_uuid=uuid)
        found = steps.tokens[uuid, ""]
        assert [(each.number, each.role, each.reason) for each in found] == [(0, "", ""), (1, "", "")]
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
            assert uses(sequence, count) == [TRAINED if trains else CONSTRAINED for trains in carries_loss]
        assert steps.outcomes()[uuid] == (Use.TRAINED, pytest.approx(advantage))
    assert len(steps.tokens["e0", ""][0].uses) == 1, "what all tokens share is stored once"


async def test_tokens_that_carry_no_loss_say_why(engine: EmbeddedEngine, by_hand: ByHand) -> None:
    groups = [
        [by_hand.one("cut1", 1.0, constrained=bytes([0, 2, 1, 0])), by_hand.one("cut0", 0.0, 11)],
        [by_hand.one("equal1", 1.0), by_hand.one("equal0", 1.0, 11)],
        [by_hand.one("forced1", 1.0, constrained=bytes([2] * 4)), by_hand.one("forced0", 0.0, 11)],
        [make_accepted("wrong", 1.0, [make_call(None, [5], [99, 3])]), by_hand.one("sound", 0.0)],
    ]
    steps = Steps(engine)
    await steps.run(*groups)
    no_loss = "every token was constrained by a grammar"
    expected: dict[str, tuple[str, float, list[TokenUse], str]] = {
        "cut1": (Use.TRAINED, 0.5, [TRAINED, CONSTRAINED, CONSTRAINED, TRAINED], ""),
        "cut0": (Use.TRAINED, -0.5, [TRAINED] * 4, ""),
        "equal1": (Use.SAME_REWARD, 0.0, [LEFT_OUT] * 4, "same_reward"),
        "forced1": (Use.NOTHING_TO_TRAIN, 0.5, [LEFT_OUT] * 4, no_loss),
        "forced0": (Use.TRAINED, -0.5, [TRAINED] * 4, ""),
        "wrong": (Use.MISALIGNED, 0.5, [LEFT_OUT] * 2, "id_out_of_range"),
        "sound": (Use.TRAINED, -0.5, [TRAINED] * 4, ""),
    }
    for uuid, (outcome, advantage, used, reason) in expected.items():
        (sequence,) = steps.tokens[uuid, ""]
        assert steps.outcomes()[uuid] == (outcome, advantage), uuid
        assert (uses(sequence, len(used)), sequence.reason) == (used, reason), uuid
        assert bool(sequence.advantages) == bool(sequence.trainer_logprobs) == (not reason), uuid
    (cut,) = steps.tokens["cut1", ""]
    np.testing.assert_allclose(numbers(cut.advantages, "<f4", 4), [0.5, 0, 0, 0.5], atol=1e-6)
    (error,) = [each for each in finding_rows(1, steps.learners) if each.kind == "error"]
    assert (error.step, error.name, error.episode, error.count) == (1, "id_out_of_range", "wrong", 1)
    places = {uuid: row.place for (uuid, _), row in steps.trained.items()}
    gradients = {"cut1": 0, "cut0": 0, "forced1": 1, "forced0": 1}
    assert places == dict.fromkeys(places, -1) | gradients, "a group with an error is not used again"


async def test_tokens_that_the_correction_leaves_out_are_told_from_those_without_an_advantage(
    engine: EmbeddedEngine, by_hand: ByHand
) -> None:
    """The third token of `off` is e^2 times as probable to the trainer. `middle` is as good as its group."""
    group = [
        by_hand.one("off", 1.0, off=[0, 0, -2.0, 0]),
        by_hand.one("middle", 0.5, 20),
        by_hand.one("low", 0.0, 30),
    ]
    steps = Steps(engine, rollout_correction={"mis": 2.0})
    await steps.run(group)
    assert {uuid: uses(*found) for (uuid, _), found in steps.tokens.items()} == {
        "off": [TRAINED, TRAINED, CORRECTED, TRAINED],
        "middle": [TRAINED] * 4,
        "low": [TRAINED] * 4,
    }


async def test_each_policy_has_rows_of_what_it_sampled(engine: EmbeddedEngine, by_hand: ByHand) -> None:
    """The judge is asked in two episodes of three, and gets rewards of its own."""

    def judged(uuid: str, reward: float, first: int, judge: float | None) -> EpisodeAccepted:
        own = by_hand.call(None, [], [5, 6], [first, 9])
        asked = [] if judge is None else [by_hand.call(None, [], [first, 9], [40, 41, 42], role="judge")]
        rewards = {} if judge is None else {"judge": judge}
        return make_accepted(uuid, reward, [own, *asked], role_rewards=rewards)

    steps = Steps(engine, "judge")
    await steps.run([judged("a", 1.0, 7, 0.0), judged("b", 1.0, 8, 1.0), judged("c", 1.0, 9, None)])
    assert steps.outcomes() == dict.fromkeys("abc", (Use.SAME_REWARD, 0.0))
    assert steps.outcomes("judge") == {"a": (Use.TRAINED, -0.5), "b": (Use.TRAINED, 0.5)}
    (sequence,) = steps.tokens["b", "judge"]
    assert (sequence.number, sequence.role, uses(sequence, 3)) == (0, "judge", [TRAINED] * 3)
    assert [each.role for each in steps.tokens["b", ""]] == [""]


async def test_what_trains_again_has_rows_of_that_step_too(engine: EmbeddedEngine, by_hand: ByHand) -> None:
    steps = Steps(engine, replay_uses=2)
    await steps.run([by_hand.one("old1", 1.0, 7), by_hand.one("old0", 0.0, 8)])
    replay = steps.learners[0].replay
    assert replay is not None
    new = [by_hand.one("new1", 1.0, 20), by_hand.one("new0", 0.0, 21)]
    await steps.run(new, step=2, replayed=replay.draw(2))
    assert {uuid: (row.place, row.outcome) for (uuid, _), row in steps.trained.items()} == {
        **dict.fromkeys(("new1", "new0"), (0, Use.TRAINED)),
        **dict.fromkeys(("old1", "old0"), (1, Use.TRAINED)),
    }
    assert {uuid: uses(*found) for (uuid, _), found in steps.tokens.items()} == dict.fromkeys(
        ("new1", "new0", "old1", "old0"), [TRAINED] * 4
    )


async def test_a_step_that_was_stopped_keeps_what_it_had_computed(
    engine: EmbeddedEngine, by_hand: ByHand
) -> None:
    """The run's own policy is checked first: the judge's part of the step has not begun."""

    def both(uuid: str, reward: float, judged: list[int], off: float = 0.0) -> EpisodeAccepted:
        own = by_hand.call(None, [], [5, 6], [10, 9, 11, 12], off=[off] * 4)
        theirs = make_call(None, [5], judged, role="judge")
        return make_accepted(uuid, reward, [own, theirs], role_rewards={"judge": reward})

    steps = Steps(engine, "judge", on_misalignment="stop", max_mean_dlogp=3.0)
    await steps.run([both("fine", 1.0, [99]), both("too", 0.0, [98])])
    assert [each.episode for each in finding_rows(1, steps.learners)] == ["fine", "too"]
    apart = [both("apart1", 1.0, [40], -9.0), both("apart0", 0.0, [40], -9.0)]
    await steps.run(apart, step=2, stopped="logprob_gap")
    (own,), (theirs,) = steps.tokens["apart1", ""], steps.tokens["apart1", "judge"]
    exact = by_hand.logprobs([5, 6, 10, 9, 11, 12])[2:]
    np.testing.assert_allclose(numbers(own.trainer_logprobs, "<f4", 4), exact, atol=1e-4)
    assert theirs.trainer_logprobs == b""
    for sequence, count in ((own, 4), (theirs, 1)):
        assert sequence.reason == "the step was stopped: logprob_gap"
        assert uses(sequence, count) == [LEFT_OUT] * count
    assert finding_rows(2, steps.learners) == [], "not those of the step before"


async def test_tokens_come_in_transactions_of_a_few_episodes(
    engine: EmbeddedEngine, by_hand: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(engine)
    await steps.run([by_hand.one(f"e{number}", float(number), 10 + number) for number in range(3)])
    (learner,) = steps.learners
    assert [len(part) for part in token_rows(learner, 1, steps.numbers)] == [3]
    monkeypatch.setattr("tinkerscript.train.step_rows.NOTED_BYTES", 100)
    parts = list(token_rows(learner, 1, steps.numbers))
    assert len(parts) > 1
    assert [row.episode for part in parts for row in part] == [0, 1, 2]


@pytest.mark.parametrize(
    ("recording", "kept"), [("all", [1, 2, 3, 4]), ("every 2", [2, 4]), ("every 3", [3]), ("off", [])]
)
def test_tokens_are_kept_of_every_nth_step(recording: str, kept: list[int]) -> None:
    assert [step for step in range(1, 5) if keeps_tokens(recording, step)] == kept


# What is no token


def test_what_no_policy_took_is_left_out_with_the_reason() -> None:
    cancelled: list[dict[str, object]] = [{"kind": "cancelled", "message": "enough"}]
    batch = Batch("step 4")
    for outcome in (
        make_accepted("old", sequence=3),
        make_accepted("alone", sequence=4),
        EpisodeFailed(episode_uuid="failed", sequence=5, failures=cancelled, group_id="g"),
    ):
        batch.adopt([outcome])
    assert left_out_rows(batch, 4, stale={"old": "stale: too far behind"}) == [
        TrainedRow(episode=3, step=4, outcome=Use.STALE, reason="stale: too far behind"),
        TrainedRow(episode=4, step=4, outcome=Use.GROUP_TOO_SMALL),
        TrainedRow(episode=5, step=4, outcome=Use.LEFT_OUT, reason="cancelled: enough"),
    ]


def test_numbers_that_are_not_finite_leave_no_metric() -> None:
    metrics = {"nan": np.nan, "infinite": np.inf, "reward/mean": np.float32(0.5), "policy_version": 3}
    found = metric_rows(2, metrics)
    assert [(row.name, row.step, row.value) for row in found] == [
        ("reward/mean", 2, 0.5),
        ("policy_version", 2, 3.0),
    ]
    assert {type(row.value) for row in found} == {float}


# Chats of supervised fine-tuning


def chat(ids: list[int], weights: list[float]) -> tinker.Datum:
    inputs: Any = {"target_tokens": np.array(ids[1:]), "weights": np.array(weights, np.float32)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def chat_of(rows: Iterable[Any]) -> tuple[EpisodeRow, Mapping[str, Any], TrainedSequence]:
    """The episode, its result, and what is kept of its tokens."""
    episode, result, trained, tokens = rows
    assert isinstance(result, ResultRow)
    assert (trained.episode, trained.step, trained.outcome) == (episode.sequence, episode.step, Use.TRAINED)
    (sequence,) = unpacked_sequences(tokens.sequences)
    return episode, msgspec.json.decode(result.result), sequence


def test_a_chat_is_an_episode_without_calls() -> None:
    datum = chat([5, 6, 7, 8], [0.0, 1.0, 0.5])
    rows = chat_rows(9, 3, datum, np.array([-9.0, -1.0, -2.0], np.float32), {})
    episode, result, sequence = chat_of(rows)
    assert (episode.sequence, episode.end_number, episode.step, episode.state) == (9, 9, 3, "ended")
    assert (episode.reward, episode.group_id, episode.consumed) == (None, "step-3", 1)
    assert result == {"log_metrics": {"nll": 1.5}}
    assert np.frombuffer(sequence.chat, "<i4").tolist() == [5, 6, 7, 8]
    assert list(sequence.chat_trained) == [0, 0, 1, 1]
    assert numbers(sequence.trainer_logprobs, "<f4", 2) == [-1.0, -2.0]
    assert uses(sequence, 2) == [TRAINED] * 2
    other, about, _ = chat_of(chat_rows(10, 3, datum, np.zeros(3, np.float32), {"chosen": "e7"}))
    assert other.uuid != episode.uuid
    assert about["metadata"] == {"chosen": "e7"}


def test_a_chat_whose_tokens_do_not_train_has_no_loss() -> None:
    rows = chat_rows(1, 1, chat([5, 6], [0.0]), np.array([-1.0], np.float32), {})
    _, result, sequence = chat_of(rows)
    assert (result, sequence.trainer_logprobs) == ({"log_metrics": {}}, b"")

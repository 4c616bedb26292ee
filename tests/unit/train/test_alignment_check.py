"""What of a step may train: lags, forks, thresholds, and what a stopped step leaves behind."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tinker
from msgspec import structs

from rollout_helpers import make_call, make_episode, make_group, update
from tinkerscript.config import TrainingConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.routing import Routing
from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.advantages import RolloutGroup, WeightedRollout
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import Call, FloatArray, Prompts, unpack_ids
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from trainer_fakes import NotingClient, made_learner


def check(report: AlignmentReport, **settings: Any) -> AlignmentCheck:
    return AlignmentCheck(report, TrainingConfig.model_validate(settings), TrainedModel(100))


def rollouts(number: int = 4, length: int = 12, **fields: Any) -> list[WeightedRollout]:
    random = np.random.default_rng(0)
    made: list[WeightedRollout] = []
    for i in range(number):
        ids = random.integers(0, 100, length).tolist()
        call = make_call(None, [i], ids, logprobs=(-random.exponential(1, length)).tolist(), **fields)
        (rollout,) = make_episode([call], name=f"e{i}").rollouts
        made.append(WeightedRollout.uniform(rollout, 1.0))
    return made


def honest(items: Sequence[WeightedRollout], by: float = 0.0) -> list[FloatArray]:
    return [item.rollout.logprobs - np.float32(by) * item.rollout.sampled for item in items]


def test_a_gap_above_the_limit_stops_and_one_above_the_other_limit_warns() -> None:
    items = rollouts()
    for by, warned in ((0.04, 0), (0.07, 1)):
        report = AlignmentReport()
        assert check(report).compare(items, honest(items, by), lags=None, step=1) == items
        assert (report.whole.warnings["logprob_gap"], report.findings) == (warned, [])
    report = AlignmentReport()
    with pytest.raises(
        AlignmentError, match=r"step 5: .*logprob_gap.*mean \|dlogp\| 0\.2 over 48 tokens"
    ) as error:
        check(report).compare(items, honest(items, 0.2), lags=None, step=5)
    assert error.value.name == report.findings[0]["name"] == "logprob_gap"
    told_to_go_on = check(AlignmentReport(), on_misalignment="warn")
    assert told_to_go_on.compare(items, honest(items, 0.2), lags=None, step=5) == items
    wide = check(AlignmentReport(), max_mean_dlogp=0.3)
    assert wide.compare(items, honest(items, 0.2), lags=None, step=5) == items


def test_experts_that_the_model_lacks_keep_a_sequence_out() -> None:
    """Too few bytes for each token, an id beyond the last expert, or calls of two models."""
    routing = Routing(("a", "b"), 0, experts=8, chosen=2)
    given = [bytes([0, 1, 7, 2] * 8), bytes([255] * 32), b"", bytes(24), bytes([0, 1, 8, 2] * 8)]
    episodes = [
        make_episode([make_call(None, [1, 2, 3], [4, 5, 6, 7, 8], experts=each)], name=f"e{i}")
        for i, each in enumerate(given)
    ]
    first = make_call(None, [1, 2], [3], experts=bytes(12))
    episodes.append(make_episode([first, make_call(first, [4], [5], experts=bytes(2))], name="e5"))
    report = AlignmentReport()
    config = TrainingConfig()
    made = AlignmentCheck(report, config, TrainedModel(100, routing=routing))
    sound = made.sound(make_group(episodes))
    assert [len(each.rollouts) for each in sound.episodes] == [1, 1, 1, 0, 0, 0]
    assert report.whole.errors == {"experts_of_another_model": 3}
    other = AlignmentCheck(AlignmentReport(), config, TrainedModel(100)).sound(make_group(episodes))
    assert all(each.rollouts for each in other.episodes), "they are not replayed, so they do not matter"


def test_one_wrong_sequence_among_good_ones_is_left_out_by_name() -> None:
    items = rollouts(20)
    trainer = honest(items)
    sampled = items[3].rollout.sampled
    trainer[3][sampled] = np.roll(trainer[3][sampled], 1)
    report = AlignmentReport()
    kept = check(report, on_misalignment="warn").compare(items, trainer, lags=None, step=1)
    assert kept == items[:3] + items[4:]
    assert report.whole.errors == {"logprobs_shifted": 1}
    assert report.findings[0]["name"] == "logprobs_shifted"
    with pytest.raises(AlignmentError, match="1 token too early"):
        check(AlignmentReport()).compare(items, trainer, lags=None, step=1)


def test_what_older_weights_sampled_is_measured_apart_and_stops_nothing() -> None:
    old, new = rollouts(3, policy_version=4), rollouts(3, policy_version=5)
    changing = rollouts(3, policy_version=4, policy_version_end=5)
    items = old + new + changing
    trainer = honest(old, 0.6) + honest(new, 0.01) + honest(changing, 0.3)
    report = AlignmentReport()
    assert check(report).compare(items, trainer, lags={4: 2, 5: 0}, step=9) == items
    metrics = report.step.metrics()
    assert metrics["alignment/mean_abs_dlogp"] == pytest.approx(0.01, rel=1e-3)
    assert metrics["alignment/tokens_compared"] == 36
    assert metrics["alignment/lag_2/mean_abs_dlogp"] == pytest.approx(0.45, rel=1e-3)
    assert metrics["alignment/lag_2/tokens_compared"] == 72
    assert report.max_abs_dlogp == pytest.approx(0.01, rel=1e-3)


def test_older_weights_do_not_move_logprobs_to_other_tokens() -> None:
    items = rollouts(policy_version=4)
    trainer = honest(items, 0.05)
    for item, logprobs in zip(items, trainer, strict=True):
        sampled = item.rollout.sampled
        logprobs[sampled] = np.roll(logprobs[sampled], 1)
    with pytest.raises(AlignmentError, match="logprobs_shifted: the logprobs are 1 token too early"):
        check(AlignmentReport()).compare(items, trainer, lags={4: 1}, step=1)


def test_a_call_over_three_versions_is_split_by_token() -> None:
    spans = [(3, 0), (4, 5), (5, 9)]
    items = rollouts(policy_version=3, policy_version_end=5, spans=spans)
    trainer = honest(items)
    for item, logprobs in zip(items, trainer, strict=True):
        (segment,) = item.rollout.segments
        assert [version for version, _ in segment.versions] == [3, 4, 5]
        for (_, span), by in zip(segment.versions, (0.6, 0.3, 0.01), strict=True):
            logprobs[span] -= np.float32(by)
    report = AlignmentReport()
    assert check(report).compare(items, trainer, lags={3: 2, 4: 1, 5: 0}, step=9) == items
    assert {lag: (gap.tokens, round(gap.mean_abs, 4)) for lag, gap in report.whole.gaps.items()} == {
        2: (20, 0.6),
        1: (16, 0.3),
        0: (12, 0.01),
    }
    newest = items[0].rollout.segments[0].versions[-1][1]
    trainer[0][newest] -= 3
    with pytest.raises(AlignmentError, match=r"logprob_gap.*over 3 tokens of 1 calls"):
        check(AlignmentReport()).compare(items, trainer, lags={3: 2, 4: 1, 5: 0}, step=9)


def test_sequences_with_errors_do_not_train_and_warnings_are_counted() -> None:
    good = make_episode([make_call(None, [1], [2, 3])])
    cold = make_episode([make_call(None, [1], [2, 3], temperature=0.0, top_p=0.5)])
    broken = EpisodeRollouts("b", 0.0, (dataclasses.replace(good.rollouts[0], sampled=np.ones(3, np.bool_)),))
    report = AlignmentReport()
    sound = check(report).sound(make_group([good, cold, broken]))
    assert [rollout for episode in sound.episodes for rollout in episode.rollouts] == [good.rollouts[0]]
    assert sound.rewards == [good.reward, cold.reward, broken.reward]
    assert report.step.errors == {"greedy": 1, "mask_differs_from_calls": 1}
    assert report.step.warnings == {"top_p": 1}


# With the engine


async def conversation(
    engine: EmbeddedEngine, seed: int, temperatures: Sequence[float] = (1.0,) * 5
) -> list[Call]:
    """A conversation of three calls and two forks of it, really sampled."""
    client = await engine.create_sampling_client()
    random = np.random.default_rng(seed)
    calls: list[Call] = []
    for parent, temperature in zip((None, 0, 1, 0, None), temperatures, strict=True):
        new = random.integers(2, 60, 3).tolist()
        before = calls[parent] if parent is not None else None
        prompt = new
        if before is not None:
            prompt = [
                *unpack_ids(Prompts(calls)[before.call_id]).tolist(),
                *before.sampled_ids.tolist(),
                *new,
            ]
        params = tinker.SamplingParams(max_tokens=5, seed=seed, temperature=temperature)
        (sequence,) = (await client.sample(tinker.ModelInput.from_ints(prompt), 1, params)).sequences
        sampled = {"logprobs": list(sequence.logprobs or ()), "temperature": temperature}
        calls.append(make_call(before, new, list(sequence.tokens), **sampled))
    return calls


async def test_each_call_is_compared_at_its_own_temperature(engine: EmbeddedEngine) -> None:
    """Several in one sequence, and several that follow one token."""
    mixed = (0.7, 1.3, 1.0, 0.7, 1.3), (1.3, 0.7, 0.2, 2.0, 1.0)
    episodes = [
        make_episode(await conversation(engine, seed, temperatures), float(seed), f"e{seed}")
        for seed, temperatures in enumerate(mixed)
    ]
    learner = made_learner(engine.create_training_client(), learning_rate=1e-4)
    report = learner.report
    metrics = await update(learner, [make_group(episodes)], step=1)
    assert metrics["train/sequences"] == 6
    assert report.whole.at_lag_0.tokens == sum(
        int(rollout.sampled.sum()) for episode in episodes for rollout in episode.rollouts
    )
    assert report.max_abs_dlogp <= 1e-4
    assert not report.step.errors


async def test_forks_that_share_prefixes_train_each_sampled_token_once(engine: EmbeddedEngine) -> None:
    episodes = [
        make_episode(await conversation(engine, seed), float(seed % 2), f"e{seed}") for seed in range(4)
    ]
    assert [len(episode.rollouts) for episode in episodes] == [3] * 4
    assert all(rollout.fork > 3 for episode in episodes for rollout in episode.rollouts[1:2])
    client = NotingClient(engine.create_training_client())
    learner = made_learner(client, minibatches=2, learning_rate=1e-4)
    report = learner.report
    metrics = await update(learner, [make_group(episodes)], step=1)
    assert metrics["train/sequences"] == 12
    assert report.max_abs_dlogp <= 1e-4
    calls = [call for episode in episodes for call in episode.calls]
    assert report.tokens_trained == sum(len(call.sampled_ids) for call in calls)

    # Of the datums that had a gradient: each call's tokens have weight once, after the call's own prompt.
    found: Counter[tuple[bytes, bytes]] = Counter()
    for datum in client.trained:
        ids = np.array(
            [datum.model_input.to_ints()[0], *datum.loss_fn_inputs["target_tokens"].data], np.int32
        )
        weight = np.array([0.0, *datum.loss_fn_inputs["advantages"].data]) != 0
        edges = np.flatnonzero(np.diff(np.concatenate([[0], weight.astype(int), [0]])))
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            found[(ids[:start].tobytes(), ids[start:end].tobytes())] += 1
    wanted = Counter(
        (Prompts(episode.calls)[call.call_id], call.sampled) for episode in episodes for call in episode.calls
    )
    assert found == wanted


async def test_a_step_without_a_gradient_is_compared_too(engine: EmbeddedEngine) -> None:
    learner = made_learner(engine.create_training_client(), learning_rate=1e-4)
    report = learner.report
    same = [make_episode(await conversation(engine, seed), 1.0, f"e{seed}") for seed in range(2)]
    metrics = await update(learner, [make_group(same)], step=1)
    assert metrics["train/sequences"] == 0
    assert report.tokens_trained == 0
    assert report.whole.gaps[0].tokens == sum(len(c.sampled_ids) for e in same for c in e.calls)
    wrong = RolloutGroup("w", tuple(_late(episode) for episode in same))
    with pytest.raises(AlignmentError, match="logprobs_shifted"):
        await update(learner, [wrong], step=2)


def _late(episode: EpisodeRollouts) -> EpisodeRollouts:
    """The same with every call's log probabilities one token late."""
    calls = [
        structs.replace(call, logprobs=np.roll(call.sampled_logprobs, 1).tobytes()) for call in episode.calls
    ]
    return make_episode(calls, episode.reward, episode.episode_uuid)

"""One batch through the learner: minibatches, epochs, the rate, and what the loss gets."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pytest
import tinker
import torch
from msgspec import structs

from rollout_helpers import make_accepted, make_call, make_episode, make_group, update
from small_models import sft_datum
from tinkerscript.config import RunConfig, TrainingConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import AlignmentError, ConfigError
from tinkerscript.ledger.rows import Use
from tinkerscript.rollouts.advantages import RolloutGroup, WeightedRollout
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.rollouts.call import FloatArray, IntArray, pack_logprobs
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.rollouts.trainers import to_datum
from tinkerscript.train.alignment_check import AlignmentCheck, TrainedModel
from tinkerscript.train.backends.backend import ADAM, optimizer_step, skipped_note
from tinkerscript.train.defaults import learning_rate
from tinkerscript.train.learner import Learner, LearnerState, minibatches
from tinkerscript.train.policy_loss import check_loss, wide_clip
from tinkerscript.train.step_metrics import trained_groups
from tinkerscript.train.token_advantages import KLPenalty
from tinkerscript.trainer_link.messages import EpisodeAccepted
from trainer_fakes import LENIENT, NotingClient, ScriptedClient, made_learner


def settings(**more: Any) -> TrainingConfig:
    return TrainingConfig.model_validate({"steps": 10, "learning_rate": 0.01, **more})


learner = partial(made_learner, **LENIENT)


@pytest.fixture
def client(engine: EmbeddedEngine) -> NotingClient:
    return NotingClient(engine.create_training_client())


def group(number: int, rewards: list[float]) -> RolloutGroup:
    random, episodes = np.random.default_rng(number), list[EpisodeRollouts]()
    for i, reward in enumerate(rewards):
        sampled = random.integers(2, 64, 3 + i).tolist()
        logprobs = (-4 + random.normal(0, 0.3, 3 + i)).tolist()
        call = make_call(None, [5, 6, 7 + number], sampled, logprobs=logprobs)
        episodes.append(make_episode([call], reward, f"e{number}.{i}"))
    return make_group(episodes, f"g{number}")


def groups() -> list[RolloutGroup]:
    return [group(0, [1.0, 0.0, 0.0]), group(1, [1.0, 1.0, 1.0]), group(2, [0.0, 2.0, 1.0, 0.0])]


async def test_minibatches_and_epochs_are_optimizer_steps(client: NotingClient) -> None:
    metrics = await update(learner(client, minibatches=2, epochs_per_batch=3), groups(), step=1)
    assert client.calls == [4, 0, 3, 0] * 3
    assert metrics["train/sequences"] == 7, "the group whose rewards are equal does not train"


@pytest.mark.parametrize(
    ("more", "sizes"),
    [
        ({"minibatch_size": 1}, [1] * 10),
        ({"minibatch_size": 3}, [4, 3, 3]),
        ({"minibatch_size": 6}, [10]),
        ({"minibatch_size": 100}, [10]),
        ({"minibatches": 20}, [1] * 10),
    ],
)
async def test_a_minibatch_has_at_least_its_size(
    client: NotingClient, more: dict[str, int], sizes: list[int]
) -> None:
    ten = [*groups(), group(3, [0.0, 1.0, 0.5])]
    await update(learner(client, **more), ten, step=1)
    assert client.calls == [call for each in sizes for call in (each, 0)]


@pytest.mark.parametrize(
    ("level", "trained", "use"), [("turn", 2, Use.TRAINED), ("episode", 0, Use.SAME_REWARD)]
)
async def test_a_group_of_equal_sums_trains_where_its_calls_differ(
    client: NotingClient, level: str, trained: int, use: str
) -> None:
    """The first call of one episode earned what the last of the other did."""

    def result(uuid: str, earning: int) -> EpisodeAccepted:
        first = make_call(None, [5, 6], [7, 8])
        calls = [first, make_call(first, [9], [10, 11])]
        return make_accepted(uuid, 1.0, calls, call_rewards={calls[earning].call_id: 1.0})

    made = learner(client, credit={"level": level})
    made.take([("g", [result("a", 0), result("b", 1)])])
    await made.check(step=1)
    assert (await made.train(1))["train/sequences"] == trained
    assert trained_groups(made.groups, False, made.differs)["groups/trained"] == trained / 2
    (group,) = made.groups
    assert {made.outcome_of(group, episode) for episode in group.episodes} == {use}


def test_minibatches_depend_on_what_a_batch_holds_alone() -> None:
    batch = [item for each in groups() for item in each.weighted()]
    uuids = [
        [[item.rollout.episode_uuid for item in part] for part in minibatches(given, 3, seed=seed)]
        for given, seed in ((batch, "a"), (batch[::-1], "a"), (batch, "b"))
    ]
    assert uuids[0] == uuids[1] != uuids[2]
    for parts in uuids:
        assert sorted(chain.from_iterable(parts)) == sorted(item.rollout.episode_uuid for item in batch)


@pytest.mark.parametrize(
    ("loss_fn", "expected"),
    [
        ("ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        ("importance_sampling", None),
        ("gspo", {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
    ],
)
async def test_a_loss_gets_the_settings_that_it_knows(
    client: NotingClient, loss_fn: str, expected: Any
) -> None:
    await update(learner(client, loss_fn=loss_fn), groups(), step=1)
    assert client.losses == [(loss_fn, expected)]


def test_a_loss_that_cannot_train_is_refused_before_the_run() -> None:
    def refused(match: str, backend: str = "embedded", **training: Any) -> None:
        config = RunConfig.model_validate({"engine": {"backend": backend}, "training": training})
        with pytest.raises(ConfigError, match=match):
            check_loss(config)

    refused(r"training\.loss_fn: .*'reinforce' is not one of .*ppo", loss_fn="reinforce")
    refused(
        r"training\.loss_fn: 'cross_entropy' takes target_tokens, weights; a policy", loss_fn="cross_entropy"
    )
    refused(r"training\.loss_config: 'ppo' has no setting beta; it has clip", loss_config={"beta": 1})
    for mean in ("tokens", "tokens_then_sequences"):
        refused(
            rf"training\.loss_mean: {mean} divides by tokens, as gspo does", loss_fn="gspo", loss_mean=mean
        )
    for backend, loss_fn in (("tinker", "gspo"), ("embedded", "dro")):
        given = {"engine": {"backend": backend}, "training": {"loss_fn": loss_fn}}
        check_loss(RunConfig.model_validate(given))
    refused(r"training\.loss_fn: 'dro' needs the embedded engine; .* cispo, gspo", "tinker", loss_fn="dro")
    own = "tinkerscript.engine.losses:ppo"
    check_loss(RunConfig.model_validate({"training": {"loss_fn": own}}))
    refused(r"training\.loss_fn: '.*:ppo' needs the embedded engine", "tinker", loss_fn=own)


OFF, CANCELLED = [-0.5, 0.0, 0.5], [0.0, 0.1, -0.9]
"""Three tokens' differences from the trainer; four others have none."""


@pytest.mark.parametrize(
    ("more", "off", "share"),
    [
        ({"loss_fn": "ppo"}, OFF, 2 / 7),
        ({"loss_fn": "ppo"}, CANCELLED, 1 / 7),
        ({"loss_fn": "ppo", "clip_high": 1.0}, OFF, 1 / 7),
        ({"loss_config": {"clip_high_threshold": 9.0, "clip_low_threshold": 0.1}}, OFF, 0.0),
        ({"loss_fn": "importance_sampling"}, OFF, None),
        ({"loss_fn": "gspo", "clip_low": 0.2, "clip_high": 0.2}, OFF, 0.0),
        ({"loss_fn": "gspo", "clip_low": 0.2, "clip_high": 0.2}, CANCELLED, 3 / 7),
    ],
)
async def test_the_share_of_clipped_tokens_is_of_those_that_carry_loss(
    client: NotingClient, more: dict[str, Any], off: list[float], share: float | None
) -> None:
    """`gspo` clips the mean over a sequence: tokens that are apart may cancel each other out."""
    exact = await fresh(client, group(0, [1.0, 0.0]))
    first, second = exact.episodes
    (call,) = first.calls
    logprobs = pack_logprobs(call.sampled_logprobs + np.array(off, np.float32))
    apart = make_episode([structs.replace(call, logprobs=logprobs)], 1.0, "e0")
    made = learner(client, learning_rate=1e-12, **more)
    metrics = await update(made, [make_group([apart, second])], step=1)
    assert metrics.get("train/clip_fraction") == (None if share is None else pytest.approx(share))


SERVICE = TrainedModel(64, is_embedded=False, scales_logits=False)
"""A service of Tinker's protocol knows no other inputs than Tinker's."""


@pytest.mark.parametrize("loss_fn", ["ppo", "gspo"])
async def test_a_service_is_sent_what_its_losses_take(loss_fn: str) -> None:
    """Tinker's gspo is a sum over tokens: it gets advantages that make it our mean."""
    client = ScriptedClient()
    client.metrics = {"skipped_steps": 1.0}
    made = learner(client, model=SERVICE, loss_fn=loss_fn)
    metrics = await update(made, [group(0, [1.0, 0.0])], step=1)
    inputs = {"target_tokens", "logprobs", "advantages"}
    for datum in client.trained:
        found = {name: value.to_numpy() for name, value in datum.loss_fn_inputs.items()}
        assert found.keys() == inputs | ({"sequence_ratio_mask"} if loss_fn == "gspo" else set())
        trained = found["advantages"] != 0
        number = int(trained.sum())
        expected = 0.5 / 2 / (number if loss_fn == "gspo" else 1)
        np.testing.assert_allclose(np.abs(found["advantages"][trained]), expected, rtol=1e-6)
        if loss_fn == "gspo":
            assert found["sequence_ratio_mask"].tolist() == trained.astype(float).tolist()
    assert metrics["train/skipped_steps"] == 1
    assert skipped_note(3, metrics) == (
        "step 3: 1 optimizer step was skipped, because the gradient was not finite"
    )
    assert not skipped_note(3, {})


@pytest.mark.parametrize(
    ("more", "planned"),
    [
        ({}, 6),
        ({"minibatches": 2}, 3),
        ({"replay_uses": 2}, 12),
        ({"replay_uses": 2, "minibatch_size": 2}, 2),
    ],
)
async def test_a_constant_divisor_is_what_a_minibatch_is_planned_to_have(
    more: dict[str, int], planned: float
) -> None:
    client = ScriptedClient()
    sizes = {"groups_per_step": 3, "group_size": 2, **more}
    made = learner(client, model=SERVICE, loss_mean="episodes", **sizes)
    await update(made, [group(0, [1.0, 0.0])], step=1)
    for datum in client.trained:
        advantages = datum.loss_fn_inputs["advantages"].to_numpy()
        np.testing.assert_allclose(np.abs(advantages[advantages != 0]), 0.5 / planned, rtol=1e-6)


def test_a_clip_that_never_acts_on_a_sequence_is_named() -> None:
    assert wide_clip(settings(loss_fn="gspo", clip_high=0.2)).startswith("training.clip_high: 0.2 hardly")
    for more in ({"loss_fn": "gspo"}, {"loss_fn": "gspo", "clip_low": 3e-4}, {"clip_low": 0.2}):
        assert not wide_clip(settings(**more))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"lr_schedule": "constant"}, [1, 1, 1, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [1, 0.9, 0.5, 0.2, 0.1, 0.1]),
        ({"lr_schedule": "cosine"}, [1, 0.97553, 0.5, 0.1, 0.1, 0.1]),
        ({"lr_schedule": "constant", "warmup_steps": 3}, [0.25, 0.5, 1, 1, 1, 1]),
        ({"lr_schedule": "linear", "warmup_steps": 5}, [1 / 6, 2 / 6, 1, 0.4, 0.2, 0.1]),
    ],
)
def test_the_rate_of_a_step(more: dict[str, Any], expected: list[float]) -> None:
    config = settings(**more, learning_rate=1.0)
    rates = [learning_rate(config, step, steps=10) for step in (1, 2, 6, 9, 10, 50)]
    assert rates == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def batch() -> list[WeightedRollout]:
    return [item for each in groups() for item in each.weighted()]


async def start_logprobs(sequences: list[IntArray], _: list[FloatArray]) -> list[FloatArray]:
    random = np.random.default_rng(2)
    return [np.append(0, random.normal(-4, 0.5, len(ids) - 1)).astype(np.float32) for ids in sequences]


class CookbooksBase:
    """The same numbers as tinker_cookbook asks for them."""

    def __init__(self, rows: list[FloatArray]) -> None:
        self._rows = iter(rows)

    async def compute_logprobs_async(self, _: tinker.ModelInput) -> list[float | None]:
        return [None, *next(self._rows)[1:].tolist()]


async def test_the_penalty_is_tinker_cookbooks(batch: list[WeightedRollout]) -> None:
    from tinker_cookbook.rl.metrics import incorporate_kl_penalty

    data = [to_datum(item) for item in batch]
    for datum, item in zip(data, batch, strict=True):
        datum.loss_fn_inputs["mask"] = tinker.TensorData.from_numpy(
            item.rollout.sampled[1:].astype(np.float32)
        )
    rows = await start_logprobs([item.rollout.tokens for item in batch], [])
    base: Any = CookbooksBase(rows)
    theirs = await incorporate_kl_penalty(data, base, 0.2, 0)
    ours, mean = await KLPenalty(start_logprobs, coef=0.2).apply(batch)
    assert mean == pytest.approx(theirs["kl_policy_base"], abs=1e-5)
    for item, datum in zip(ours, data, strict=True):
        sampled = item.rollout.sampled
        advantages = datum.loss_fn_inputs["advantages"].to_numpy()
        np.testing.assert_allclose(item.advantages[1:][sampled[1:]], advantages[sampled[1:]], atol=1e-5)
        assert not item.advantages[~sampled].any()


async def logprobs(client: Any, sequences: list[IntArray]) -> list[FloatArray]:
    data = [sft_datum(ids) for ids in sequences]
    output = await client.forward(data, "cross_entropy")
    return [np.append(0, row["logprobs"].to_numpy()).astype(np.float32) for row in output.loss_fn_outputs]


async def fresh(client: Any, made: RolloutGroup) -> RolloutGroup:
    """The group with the log probabilities that the client's weights have now."""
    rollouts = [episode.rollouts[0] for episode in made.episodes]
    rows = await logprobs(client, [each.tokens for each in rollouts])
    episodes = list[EpisodeRollouts]()
    for episode, rollout, row in zip(made.episodes, rollouts, rows, strict=True):
        call = structs.replace(episode.calls[0], logprobs=pack_logprobs(row[rollout.prompt_length :]))
        episodes.append(make_episode([call], episode.reward, episode.episode_uuid))
    return make_group(episodes)


# Lengths

LIMIT = 10


def reply(length: int, reward: float, name: str, **more: Any) -> EpisodeAccepted:
    sampled = np.random.default_rng(length).integers(2, 64, length).tolist()
    return make_accepted(name, reward, [make_call(None, [5, 6], sampled, logprobs=[-4.0] * length, **more)])


async def test_what_is_cut_off_carries_no_loss_but_its_reward_counts(client: NotingClient) -> None:
    made = learner(client, mask_truncated=True)
    made.take([("g", [reply(3, 1.0, "a"), reply(4, 0.0, "b"), reply(LIMIT, 0.5, "c", stop_reason="length")])])
    await made.check(step=1)
    assert (await made.train(1))["train/sequences"] == 2
    assert sorted({float(each.max() or each.min()) for each in made.advantages.values()}) == [-0.5, 0.5]
    (group,) = made.groups
    assert made.outcome_of(group, group.episodes[2]) == Use.NOTHING_TO_TRAIN


def test_a_long_reply_costs_what_dapo_says() -> None:
    """Equation 13, with a limit of 10 tokens and a buffer of 4."""
    made = learner(None, overlong_buffer=0.4, reply_tokens=LIMIT)
    made.take([("g", [reply(length, 1.0, f"e{length}") for length in (3, 6, 7, 8, 9, 10)])])
    assert made.groups[0].rewards == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_tokens_and_turns_cost_what_the_run_says() -> None:
    first = make_call(None, [1, 2], [3, 4, 5])
    calls = [first, make_call(first, [6], [7, 8]), make_call(None, [9], [9], role="judge")]
    two, one = (make_accepted(f"e{len(each)}", 1.0, each) for each in (calls, [first]))
    made = learner(None, length_penalty={"token": 0.01, "turn": 0.1})
    made.take([("g", [two, one])])
    assert made.groups[0].rewards == pytest.approx([1 - 0.05 - 0.2, 1 - 0.03 - 0.1]), "a judge is no turn"
    assert made.trains(made.groups[0])


def test_scores_are_compared_in_place_of_the_reward() -> None:
    made = learner(None, reward_weights={"right": 1.0, "short": 0.5})
    scores = [{"score/right": 1.0, "score/short": 0.0}, {"score/right": 1.0, "score/short": 2.0}]
    made.take([("g", [structs.replace(reply(3, 0.0, f"e{i}"), log_metrics=s) for i, s in enumerate(scores)])])
    (group,) = made.groups
    assert made.trains(group)
    np.testing.assert_allclose(group.advantages(made.rule), [-0.5 / 2**0.5, 0.5 / 2**0.5], rtol=1e-5)


async def test_steps_are_compared_with_the_steps_before(client: NotingClient) -> None:
    """As SPO does, with groups of one: a new sample against the run's mean, an old one against its own."""
    chosen = {"advantage_baseline": "sample_mean", "advantage_scale": "running_deviation", "group_size": 1}
    made = learner(client, **chosen)

    async def step(made: Learner, number: int, rewards: dict[str, float]) -> dict[str, float]:
        taken = [(name, [reply(3, reward, f"{name}{number}")]) for name, reward in rewards.items()]
        made.take(taken, samples={name: f"task\n{name}" for name in rewards})
        await made.check(step=number)
        assert (await made.train(number))["train/sequences"] == len(rewards)
        return {
            group.group_id: made.advantages[id(group.episodes[0].rollouts[0])].max() for group in made.groups
        }

    first = await step(made, 1, {"a": 3.0, "b": 1.0, "c": 2.0})
    assert first["a"] == pytest.approx((3 - 2) / np.std([3, 1, 2], ddof=1), rel=1e-5)
    resumed = learner(client, **chosen)
    resumed.state = msgspec.json.decode(msgspec.json.encode(made.state), type=LearnerState)
    for each in (made, resumed):
        second = await step(each, 2, {"a": 5.0, "d": 4.0})
        every = [3, 1, 2, 5, 4]
        deviation = np.std(every, ddof=1)
        assert second["a"] == pytest.approx((5 - 3) / deviation, rel=1e-5)
        assert second["d"] == pytest.approx((4 - np.mean(every)) / deviation, rel=1e-5)
    assert made.state == resumed.state
    assert made.state.samples["task\na"].mean == pytest.approx((0.875 * 3 + 5) / 1.875)


async def test_a_step_that_is_stopped_leaves_no_trace_in_the_state(client: NotingClient) -> None:
    made = learner(client, advantage_baseline="running_mean")
    made.take([("g", [reply(3, 1.0, "e0"), reply(3, 0.0, "e1")])])
    assert made.state == LearnerState()
    await made.check(step=1)
    assert made.state == LearnerState()
    await made.train(1)
    assert (made.state.rewards.count, made.state.rewards.mean) == (2, 0.5)


# What else the loss gets


async def test_the_divergence_from_the_start_reaches_the_loss(client: NotingClient) -> None:
    """Of one minibatch, against the logprobs that it trains with; equal rewards train too."""
    made = learner(client, start=start_logprobs, loss_config={"kl_k3": 0.5}, loss_mean="tokens")
    equal = groups()[1]
    metrics = await update(made, [equal], step=1)
    assert metrics["train/sequences"] == 3
    rollouts = [episode.rollouts[0] for episode in equal.episodes]
    starts = await start_logprobs([each.tokens for each in rollouts], [])
    olds = {id(each.rollout): each.trainer_logprobs for each in made.compared}
    gaps = np.concatenate(
        [(start - olds[id(each)])[each.loss_mask] for each, start in zip(rollouts, starts, strict=True)]
    ).astype(np.float64)
    expected = 0.5 * float((np.exp(gaps) - gaps - 1).mean())
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-4)
    sampled = np.concatenate(
        [(each.logprobs - start)[each.loss_mask] for each, start in zip(rollouts, starts, strict=True)]
    )
    assert metrics["train/kl_start"] == pytest.approx(float(sampled.mean()), rel=1e-4)


async def test_the_weight_of_an_adaptive_bonus_follows_skywork(client: NotingClient) -> None:
    """alpha_k = c_k * 1{e_k <= target}, c_0 = 0, c_k+1 = c_k + delta if e_k < target, else c_k - delta."""
    weight, delta = 0.0, 0.25
    entropy = (await update(learner(client, learning_rate=1e-12), groups(), step=1))["train/entropy"]
    made = learner(client, adaptive_entropy={"target": 1.0, "delta": delta}, learning_rate=1e-12)
    for number, target in enumerate([entropy + 1] * 3 + [entropy - 1] * 5 + [entropy + 1] * 2, start=1):
        made.config = settings(
            **LENIENT, adaptive_entropy={"target": target, "delta": delta}, learning_rate=1e-12
        )
        if number == 3:
            state = msgspec.json.decode(msgspec.json.encode(made.state), type=LearnerState)
            made = learner(client, adaptive_entropy={"target": target, "delta": delta}, learning_rate=1e-12)
            made.state = state
        metrics = await update(made, groups(), step=number)
        acting = weight if entropy <= target else 0.0
        assert metrics["train/entropy_weight"] == pytest.approx(acting), number
        assert client.losses[-1][1]["entropy"] == pytest.approx(acting)
        weight = max(0.0, weight + delta if entropy < target else weight - delta)
        assert made.state.entropy_weight == pytest.approx(weight)
    assert weight == 2 * delta, "it never went below 0"


async def test_only_the_most_uncertain_tokens_train(client: NotingClient) -> None:
    made = learner(client, top_entropy=0.25)
    await update(made, groups(), step=1)
    entropies = np.concatenate([each.entropies[each.rollout.loss_mask] for each in made.compared])  # type: ignore[index]
    trains = np.concatenate(
        [made.advantages[id(each.rollout)][each.rollout.loss_mask] != 0 for each in made.compared]
    )
    assert 0 < trains.mean() <= 0.3
    assert entropies[trains].min() >= np.quantile(entropies, 0.75)
    assert {id(each.rollout) for each in made.compared} == made.corrected.keys()


@pytest.mark.parametrize("loss_fn", ["clip_cov", "kl_cov"])
async def test_a_loss_of_covariant_tokens_gets_its_input(client: NotingClient, loss_fn: str) -> None:
    metrics = await update(learner(client, loss_fn=loss_fn, minibatches=2), groups(), step=1)
    assert metrics["train/grad_norm"] > 0
    assert metrics["train/kl_step"] > 0


async def test_bypass_saves_the_forward_pass(
    client: NotingClient,
) -> None:
    forwards = []
    forward = client.client.forward
    client.client.forward = lambda *given: forwards.append(given) or forward(*given)
    more = {"loss_fn": "importance_sampling", "minibatches": 2}
    for correction, number in (({"bypass": True}, 0), ({}, 1)):
        metrics = await update(learner(client, rollout_correction=correction, **more), groups(), step=1)
        assert (metrics["train/sequences"], len(forwards)) == (7, number)


async def test_the_off_policy_mask_reads_the_sampler_beside_a_correction(client: NotingClient) -> None:
    """With `tis` the loss compares with the trainer, whose mean difference from itself is 0."""
    more = {"tis": 2.0, "off_policy_mask": 0.01}
    await update(learner(client, rollout_correction=more), [group(0, [1.0, 0.0])], step=1)
    assert client.losses[0][1]["off_policy_mask"] == 0.01
    for datum in client.trained:
        found = datum.loss_fn_inputs["sampler_logprobs"].to_numpy()
        assert not np.allclose(found, datum.loss_fn_inputs["logprobs"].to_numpy())


# Constrained tokens

FORCED = bytes([0, 2, 1, 0])


def constrained_group(kinds: bytes, *, logprob: float = -4.0, trains: bool = False) -> RolloutGroup:
    """Two episodes of four tokens; `logprob`: that of tokens that a grammar constrained, as recorded."""
    episodes = []
    for number, reward in enumerate((1.0, 0.0)):
        logprobs = [logprob if kind else -4.0 for kind in FORCED]
        call = make_call(None, [5, 6], [7 + number, 9, 11, 13 + number], logprobs=logprobs, constrained=kinds)
        episodes.append(make_episode([call], reward, f"e{number}", trains_constrained=trains))
    return make_group(episodes)


async def trained(
    engine: EmbeddedEngine, made: RolloutGroup, **more: Any
) -> tuple[dict[str, float], list[float]]:
    """The metrics of a step, and log probabilities under the weights after it."""
    client = await engine.train_copy()
    metrics = await update(learner(client, **more), [made], step=1)
    (row,) = await logprobs(client, [np.arange(2, 40, dtype=np.int32)])
    return metrics, row.tolist()


@pytest.mark.parametrize("loss_fn", ["ppo", "importance_sampling", "cispo"])
async def test_a_constrained_token_has_no_gradient(engine: EmbeddedEngine, loss_fn: str) -> None:
    """What was recorded for such a token changes no weight; of a token that trains it does."""
    one, other = [
        await trained(engine, constrained_group(FORCED, logprob=p), loss_fn=loss_fn) for p in (-4.0, -3.0)
    ]
    assert one == other
    free, told = [
        await trained(engine, made, loss_fn=loss_fn)
        for made in (constrained_group(b""), constrained_group(FORCED, trains=True))
    ]
    assert free[1] == told[1] != one[1]


def test_logprobs_of_what_an_unknown_grammar_left_are_not_compared(engine: EmbeddedEngine) -> None:
    """A server may report them before or after its grammar."""
    report = AlignmentReport()
    check = AlignmentCheck(report, TrainingConfig(), TrainedModel(64))
    items = list(constrained_group(bytes([3] * 4), logprob=-0.001).weighted())
    trainer = [np.full(6, -9.0, np.float32) for _ in items]
    assert check.compare(items, trainer, lags=None, step=1) == items
    assert report.whole.at_lag_0.tokens == 0
    assert report.findings == []


# Replay


async def test_a_sequence_that_showed_a_pattern_is_not_replayed(client: NotingClient) -> None:
    made = learner(client)
    first, second = constrained_group(b""), group(2, [0.0, 2.0])
    made.alignment.left_out.add("never cleared")

    def compare(items: Any, *_: Any, **__: Any) -> Any:
        made.alignment.left_out.add("e0")
        return items[1:]

    made.alignment.compare = compare  # type: ignore[method-assign]
    await update(made, [first, second], step=1)
    assert [each.group_id for each in made.replayable] == ["g2"]
    assert made.alignment.left_out == {"e0"}


async def test_replayed_groups_train_off_policy_and_are_not_counted_again(client: NotingClient) -> None:
    """They are compared at their lag, which stops nothing, and train against the logprobs of their sample."""

    def of(made: RolloutGroup, **more: Any) -> RolloutGroup:
        episodes = [
            make_episode(
                [structs.replace(call, **more) for call in each.calls], each.reward, each.episode_uuid
            )
            for each in made.episodes
        ]
        return make_group(episodes, made.group_id)

    made = made_learner(client, max_mean_dlogp=100.0)
    old, new = of(group(0, [1.0, 0.0, 0.0]), top_p=0.9), of(group(2, [0.0, 2.0]), policy_version=1)
    made.report.begin_step()
    metrics = await update(made, [new], step=2, lag_of_version={0: 1, 1: 0}, replayed=[old])
    assert metrics["train/sequences"] == 5
    assert [each.group_id for each in made.replayable] == ["g2"]
    assert made.report.step.gaps.keys() == {0, 1}
    tokens = sum(int(r.sampled.sum()) for e in old.episodes for r in e.rollouts)
    assert made.report.step.gaps[1].tokens == tokens
    assert made.report.whole.errors == {}
    assert made.report.step.warnings.keys() <= {"logprob_gap"}, "those of the new group alone"


async def test_every_setting_of_the_optimizer_reaches_it(batch: list[WeightedRollout], client: Any) -> None:
    given = {"weight_decay": 0.4, "grad_clip_norm": 0.5}
    assert (given | ADAM).keys() == tinker.AdamParams.model_fields.keys() - {"learning_rate"}
    await optimizer_step(client, [to_datum(batch[0])], settings(**given), loss_fn="ppo", learning_rate=0.6)
    assert [params.model_dump() for params in client.params] == [given | ADAM | {"learning_rate": 0.6}]


async def _trained(engine: EmbeddedEngine, *, in_one_pass: bool, **more: Any) -> tuple[Any, list[Any], Any]:
    copy = await engine.train_copy()
    client = NotingClient(copy)
    made = learner(client, minibatches=1, **more)
    if not in_one_pass:
        made._takes_one_step = lambda items: False  # type: ignore[method-assign]
    metrics = [
        await update(made, [group(3 * step, [1.0, 0.0, 0.5]), group(3 * step + 1, [0.0, 1.0])], step=step)
        for step in (1, 2, 3)
    ]
    weights = [each.detach().clone() for each in copy._trainer.weights.parameters]
    return weights, metrics, client.calls


@pytest.mark.parametrize("more", [{}, {"loss_fn": "gspo"}, {"loss_mean": "tokens"}])
async def test_one_pass_trains_bit_for_bit_what_two_do(engine: EmbeddedEngine, more: dict[str, Any]) -> None:
    """The comparison takes the log probabilities of the training step's own forward pass."""
    one, ones, calls = await _trained(engine, in_one_pass=True, **more)
    two, twos, expected = await _trained(engine, in_one_pass=False, **more)
    assert calls == expected == [5, 0] * 3
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert [each.keys() for each in ones] == [each.keys() for each in twos]
    for a, b in zip(ones, twos, strict=True):
        assert a == pytest.approx(b, abs=1e-6)


async def test_what_is_misaligned_leaves_no_gradient(client: NotingClient) -> None:
    made = learner(client, on_misalignment="stop", max_mean_dlogp=1e-9)
    trainer: Any = client.client._trainer
    with pytest.raises(AlignmentError):
        await update(made, [group(0, [1.0, 0.0])], step=1)
    assert client.calls == [2], "its gradient was computed, and no step taken"
    assert all(each.grad is None for each in trainer.weights.parameters)
    before = [each.detach().clone() for each in trainer.weights.parameters]
    assert (await made.train(1))["train/sequences"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.weights.parameters, strict=True))

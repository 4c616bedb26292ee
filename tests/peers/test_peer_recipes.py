"""Losses, masks and advantages against the functions of verl and TRL, on a recorded batch; and both on what
converters make.

`make acceptance` installs both into a folder for PYTHONPATH; elsewhere these tests are skipped.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recorded_batch import Array, recorded_batch
from rollout_helpers import make_call, make_episode, make_group
from tinkerscript.config import RolloutCorrectionConfig
from tinkerscript.engine.losses import (
    COVARIANT,
    LOSSES,
    MASK,
    SAMPLER,
    SEQUENCE,
    START,
    divergence_of_candidates,
)
from tinkerscript.rollouts.advantages import (
    AdvantageRule,
    RolloutBatch,
    RolloutGroup,
    WeightedRollout,
    whitened,
)
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.rollouts.trainers import to_trl, to_verl
from tinkerscript.train.dpo import PairLosses
from tinkerscript.train.token_advantages import correct, covariant_tokens, keep_top_entropy

core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
with pytest.MonkeyPatch.context() as patch:  # TRL would take the folder tests/vllm for the package vllm.
    patch.setattr(sys, "path", [each for each in sys.path if Path(each).name != "tests"])
    GRPOConfig: Any = pytest.importorskip("trl").GRPOConfig
    GRPOTrainer: Any = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer
    DPOTrainer: Any = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    loss_utils: Any = pytest.importorskip("trl.experimental.sdpo.loss_utils")

pytestmark = pytest.mark.timeout(300)

BATCH = recorded_batch()
MASKED = torch.from_numpy(BATCH.mask)
DECIMAL = {"rtol": 1e-6, "atol": 1e-6}


def tensor(values: Array) -> Tensor:
    return torch.from_numpy(values.copy()).double()


NUMBERS = list(dict.fromkeys(BATCH.group.tolist()))
"""Of the groups."""


def token_rewards() -> Tensor:
    """float64 [E, R]: each reward at the last token."""
    values = np.zeros(BATCH.mask.shape)
    values[np.arange(len(values)), BATCH.lengths - 1] = BATCH.rewards
    return tensor(values)


def ours(rule: AdvantageRule) -> Array:
    """float64 [E, R]: the advantages of all groups, 0 in the padding."""
    each = [rule.of(BATCH.rewards[BATCH.group == number].tolist()) for number in NUMBERS]
    return np.concatenate(each)[:, None] * BATCH.mask


ADVANTAGES = tensor(ours(AdvantageRule(scale="group_deviation")))


# Advantages


@pytest.mark.parametrize(
    ("name", "rule", "settings"),
    [
        ("grpo", AdvantageRule(scale="group_deviation"), {}),
        ("grpo", AdvantageRule(), {"norm_adv_by_std_in_grpo": False}),
        ("rloo", AdvantageRule("leave_one_out"), {}),
    ],
)
def test_advantages_within_a_group_are_verls(
    name: str, rule: AdvantageRule, settings: dict[str, Any]
) -> None:
    theirs, _ = core.get_adv_estimator_fn(name)(
        token_level_rewards=token_rewards(), response_mask=MASKED.double(), index=BATCH.group, **settings
    )
    np.testing.assert_allclose(ours(rule), theirs.numpy(), **DECIMAL)


def weighted(advantages: Array) -> list[WeightedRollout]:
    """The batch with these advantages of its tokens."""
    rollouts = [rollout for group in BATCH.groups() for e in group.episodes for rollout in e.rollouts]
    return [
        WeightedRollout(rollout, values)
        for rollout, values in zip(rollouts, BATCH.of_sequences(advantages), strict=True)
    ]


def whitened_(rewards_of_tokens: Array) -> Array:
    return BATCH.of_replies([item.advantages for item in whitened(weighted(rewards_of_tokens))])


@pytest.mark.parametrize(
    ("name", "baseline"), [("reinforce_plus_plus", "none"), ("reinforce_plus_plus_baseline", "group_mean")]
)
def test_batches_are_whitened_as_verl_does(name: str, baseline: Any) -> None:
    theirs, _ = core.get_adv_estimator_fn(name)(
        token_level_rewards=token_rewards(),
        response_mask=MASKED.double(),
        index=BATCH.group,
        config=SimpleNamespace(gamma=1.0),
    )
    found = whitened_(ours(AdvantageRule(baseline, "batch_deviation")))
    np.testing.assert_allclose(found, theirs.numpy(), rtol=1e-6, atol=1e-6)


def test_gdpo_is_verls() -> None:
    """The second score: whether the reply is no longer than most."""
    scores = {"reward": BATCH.rewards, "short": (BATCH.lengths <= np.median(BATCH.lengths)).astype(float)}
    weights = {"reward": 1.0, "short": 0.3}
    lengths = torch.from_numpy(BATCH.lengths)
    attention = torch.arange(3 + MASKED.shape[1]) < (3 + lengths)[:, None]
    theirs, _ = core.get_adv_estimator_fn("gdpo")(
        token_level_rewards=token_rewards(),
        response_mask=MASKED.double(),
        index=BATCH.group,
        config={"gdpo_reward_keys": list(weights), "gdpo_reward_weights": list(weights.values())},
        non_tensor_batch=scores,
        batch={"prompts": torch.zeros(len(lengths), 3), "attention_mask": attention.long()},
    )
    rule = AdvantageRule(scale="batch_deviation", weights=weights)
    found = list[np.ndarray]()
    for number in NUMBERS:
        episodes = [
            EpisodeRollouts(f"e{at}", 0.0, (), scores={name: float(v[at]) for name, v in scores.items()})
            for at in np.flatnonzero(BATCH.group == number)
        ]
        found.append(make_group(episodes).advantages(rule))
    # verl computes these in float32.
    np.testing.assert_allclose(
        whitened_(np.concatenate(found)[:, None] * BATCH.mask), theirs.numpy(), rtol=1e-5, atol=1e-5
    )


# Losses


def verls(name: str, **settings: Any) -> tuple[Array, float]:
    """verl's loss, as a mean over the tokens: its gradient and its value."""
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig

    of_loss = {
        key: settings.pop(key) for key in list(settings) if key in PolicyLossConfig.__dataclass_fields__
    }
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=name, **of_loss),
        **{"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, **settings},
    )
    new = tensor(BATCH.new).requires_grad_()
    mode = "seq-mean-token-mean" if name in ("sapo", "gspo") else "token-mean"
    loss, _ = core.get_policy_loss_fn(name)(
        tensor(BATCH.old), new, ADVANTAGES.clone(), MASKED.double(), loss_agg_mode=mode, config=config
    )
    loss.backward()
    assert new.grad is not None
    return new.grad.numpy(), float(loss.detach())


def given(**more: Array) -> dict[str, Tensor]:
    arrays = {"logprobs": BATCH.old, START: BATCH.sampler, SAMPLER: BATCH.sampler, **more}
    inputs = {name: tensor(array)[MASKED] for name, array in arrays.items()}
    rows = torch.arange(len(MASKED))[:, None].expand(MASKED.shape)
    return {
        "advantages": ADVANTAGES[MASKED],
        **inputs,
        SEQUENCE: rows[MASKED],
        MASK: MASKED[MASKED],
    }


def ours_of(name: str, weights: Tensor, inputs: dict[str, Tensor], **settings: float) -> tuple[Array, float]:
    """Our loss, each token times `weights`."""
    new = tensor(BATCH.new).requires_grad_()
    losses = LOSSES[name].configured(name, settings)(new[MASKED], inputs)
    loss = (losses * weights[MASKED]).sum()
    loss.backward()
    assert new.grad is not None
    return new.grad.numpy(), float(loss.detach())


BY_TOKENS = MASKED.double() / MASKED.sum()
BY_SEQUENCES = MASKED / MASKED.sum(-1, keepdim=True) / len(MASKED)

PAIRS: list[tuple[str, str, dict[str, float], dict[str, float], Tensor]] = [
    ("vanilla", "ppo_dual_clip", {"clip_ratio_c": 1.1}, {"dual_clip": 1.1}, BY_TOKENS),
    ("vanilla", "ppo", {"clip_ratio_c": 1e9}, {}, BY_TOKENS),
    ("cispo", "cispo", {}, {}, BY_TOKENS),
    ("sapo", "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, {}, BY_SEQUENCES),
]


@pytest.mark.parametrize(("theirs", "name", "settings", "own", "weights"), PAIRS)
def test_losses_and_gradients_are_verls(
    theirs: str, name: str, settings: dict[str, float], own: dict[str, float], weights: Tensor
) -> None:
    slopes, value = verls(theirs, **settings)
    found, loss = ours_of(name, weights, given(), **own)
    np.testing.assert_allclose(found, slopes, **DECIMAL)
    assert loss == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dppo_has_verls_gradient(kind: str) -> None:
    """verl's loss is -sg(ratio) * advantage * log p, whose value differs."""
    delta = 0.05 if kind == "tv" else 0.005
    bounds = {"clip_ratio": delta, "clip_ratio_low": delta, "clip_ratio_high": delta}
    slopes, _ = verls(f"dppo_{kind}", **bounds, clip_ratio_c=1e9)
    found, _ = ours_of(f"dppo_{kind}", BY_TOKENS, given(), delta_low=delta, delta_high=delta)
    np.testing.assert_allclose(found, slopes, **DECIMAL)


def test_gspo_has_verls_gradient() -> None:
    """By the mean over a sequence's tokens and then over sequences, the first of which ours takes itself."""
    slopes, value = verls("gspo", clip_ratio_low=0.02, clip_ratio_high=0.03)
    whole = MASKED.double() / len(MASKED)
    found, loss = ours_of("gspo", whole, given(), clip_low_threshold=0.98, clip_high_threshold=1.03)
    np.testing.assert_allclose(found, slopes, **DECIMAL)
    assert loss == pytest.approx(value, abs=1e-6)


def marks(values: Array, **settings: Any) -> Array:
    """The covariant tokens, as if the policy had not moved since `values`."""
    items = weighted(ADVANTAGES.numpy())
    return BATCH.of_replies(covariant_tokens(items, BATCH.of_sequences(values), seed="s", **settings))


def test_kl_cov_is_verls() -> None:
    """verl chooses the tokens by the log probabilities of each microbatch as it trains."""
    slopes, value = verls("kl_cov", kl_cov_ratio=0.1, ppo_kl_coef=0.5)
    inputs = given(**{COVARIANT: marks(BATCH.new, share=0.1, band=None)})
    found, loss = ours_of("kl_cov", BY_TOKENS, inputs, kl=0.5)
    np.testing.assert_allclose(found, slopes, **DECIMAL)
    assert loss == pytest.approx(value, abs=1e-6)


def test_clip_cov_leaves_out_what_verl_may_leave_out() -> None:
    """verl draws as many as it leaves out from the same band; here it leaves out all of them."""
    band = (0.05, 0.6)
    slopes, _ = verls("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=band[0], clip_cov_ub=band[1])
    inputs = given(**{COVARIANT: marks(BATCH.new, share=1.0, band=band)})
    found, _ = ours_of("clip_cov", BY_TOKENS, inputs)
    np.testing.assert_allclose(found, slopes, **DECIMAL)
    assert (inputs[COVARIANT] > 0).sum() > 5


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_estimates_of_the_divergence_are_verls(name: str) -> None:
    """verl cuts k3 off at 10, which has no gradient there."""
    new = tensor(BATCH.new).requires_grad_()
    theirs = core.kl_penalty(new, tensor(BATCH.sampler), name)
    kept = (theirs.detach().abs() < 10) & MASKED
    assert kept.sum() > 0.9 * MASKED.sum()
    (theirs * kept).sum().backward()
    with_term, without = (
        ours_of("ppo", kept.double(), given(), **{f"kl_{name}": weight}) for weight in (1.0, 0.0)
    )
    assert new.grad is not None
    np.testing.assert_allclose(with_term[0] - without[0], new.grad.numpy(), **DECIMAL)
    assert with_term[1] - without[1] == pytest.approx(float((theirs * kept).sum().detach()), rel=1e-6)


# Rollout correction


def factors(**settings: Any) -> Array:
    items = weighted(BATCH.mask.astype(float))
    config = RolloutCorrectionConfig.model_validate(settings)
    corrected, _ = correct(items, BATCH.of_sequences(BATCH.old), config)
    return BATCH.of_replies([item.advantages for item in corrected])


@pytest.mark.parametrize(
    ("name", "value", "level", "threshold"),
    [
        ("tis", 1.1, "token", 1.1),
        ("sequence_tis", 1.2, "sequence", 1.2),
        ("icepop", (0.8, 1.2), "token", "0.8_1.2"),
        ("mis", 1.2, "token", "1e-9_1.2"),
        ("sequence_mis", 1.3, "sequence", "1e-9_1.3"),
    ],
)
def test_weights_are_verls(name: str, value: Any, level: str, threshold: Any) -> None:
    theirs, _ = helper.compute_rollout_correction_weights(
        tensor(BATCH.old - BATCH.sampler), MASKED.double(), level, threshold
    )
    np.testing.assert_allclose(factors(**{name: value})[BATCH.mask], theirs.numpy()[BATCH.mask], rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "option", "bounds"),
    [
        ("token_mask", "token_k1", (0.8, 1.25)),
        ("sequence_mask", "seq_sum_k1", (0.7, 1.3)),
        ("geometric_mask", "seq_mean_k1", (0.95, 1.05)),
    ],
)
def test_masks_are_verls(name: str, option: str, bounds: tuple[float, float]) -> None:
    """verl bounds q / p, the reverse of our ratio."""
    low, high = bounds
    kept, _ = helper.compute_rollout_rejection_mask(
        tensor(BATCH.old - BATCH.sampler), MASKED.double(), option, f"{1 / high}_{1 / low}"
    )
    assert 0 < kept.sum() < MASKED.sum()
    np.testing.assert_array_equal(factors(**{name: bounds}), kept.numpy())


def test_the_off_policy_sequence_mask_is_trls() -> None:
    delta = float(((BATCH.sampler - BATCH.new).sum(1) / BATCH.lengths).mean())
    kept = GRPOTrainer.get_off_policy_mask(
        ADVANTAGES, tensor(BATCH.new), tensor(BATCH.sampler), MASKED.double(), delta
    ).expand(MASKED.shape)
    found, _ = ours_of("ppo", BY_TOKENS, given(), off_policy_mask=delta)
    whole, _ = ours_of("ppo", BY_TOKENS, given())
    assert 0 < kept[MASKED].sum() < MASKED.sum()
    np.testing.assert_allclose(found, whole * kept.numpy(), atol=1e-12)


def test_the_tokens_of_highest_entropy_are_trls() -> None:
    fake = SimpleNamespace(
        accelerator=SimpleNamespace(pad_across_processes=lambda each, **_: each, gather=lambda each: each)
    )
    kept = GRPOTrainer.get_high_entropy_mask(fake, tensor(BATCH.entropies), MASKED.long(), 0.8)
    items = weighted(BATCH.mask.astype(float))
    of_most = keep_top_entropy(items, BATCH.of_sequences(BATCH.entropies), 0.2)
    found = BATCH.of_replies([each.advantages for each in of_most])
    np.testing.assert_array_equal(found > 0, kept.bool().numpy())


# A teacher


def test_the_divergence_over_candidates_is_trls() -> None:
    """TRL takes the student's most probable tokens; the formula is the same for any."""
    logits, teacher = torch.randn(2, 50, 30, generator=torch.Generator().manual_seed(1)).double()
    logits.requires_grad_()
    p, t = logits.log_softmax(-1), teacher.log_softmax(-1)
    ids = t.topk(5).indices
    chosen = [each.gather(-1, ids) for each in (p, t)]
    ours = divergence_of_candidates(*chosen)
    theirs = loss_utils.compute_divergence(*map(loss_utils.add_tail_bucket, chosen), 1.0)
    torch.testing.assert_close(ours, theirs, **DECIMAL)
    slopes = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*slopes, **DECIMAL)


# Pairs


def test_dpo_is_trls() -> None:
    """The best and the worst reply of each group, its policy after two steps against the sampler."""
    groups = [np.flatnonzero(BATCH.group == number) for number in NUMBERS]
    differ = [each for each in groups if BATCH.rewards[each].max() > BATCH.rewards[each].min()]
    better, worse = (
        np.array([each[of(BATCH.rewards[each])] for each in differ]) for of in (np.argmax, np.argmin)
    )
    both = np.concatenate([better, worse])
    policy, mask = tensor(BATCH.new[both]).requires_grad_(), MASKED[both]
    nothing = torch.zeros(mask.shape)
    outputs = SimpleNamespace(
        log_probs=policy, entropy=nothing, is_top1=nothing.bool(), mean_logits=nothing, loss=None
    )

    def same(value: Any) -> Any:
        return value

    given = SimpleNamespace(
        beta=0.1,
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        aux_loss_enabled=False,
        use_weighting=False,
        precompute_ref_logps=True,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    start = tensor(BATCH.sampler[both]).sum(1)
    first = torch.ones(len(both), 1)  # The prompt.
    inputs = {
        "input_ids": torch.zeros(len(both), 1 + mask.shape[1], dtype=torch.long),
        "attention_mask": torch.cat([first, mask], 1),
        "completion_mask": torch.cat([0 * first, mask], 1),
        "ref_chosen_logps": start[: len(differ)],
        "ref_rejected_logps": start[len(differ) :],
    }
    theirs = DPOTrainer._compute_loss(given, lambda **_: outputs, inputs, False)
    theirs.backward()
    moved = (BATCH.new - BATCH.sampler).sum(1)
    found = PairLosses.of(moved[better], moved[worse], 0.1)
    assert float(theirs.detach()) == pytest.approx(found.metrics["loss"], rel=1e-6)
    assert policy.grad is not None
    slopes = np.concatenate([found.slopes, -found.slopes])[:, None]
    np.testing.assert_allclose(policy.grad.numpy(), np.broadcast_to(slopes, mask.shape), **DECIMAL)
    measured = {name: values[0] for name, values in given._metrics["train"].items()}
    assert measured["rewards/margins"] == pytest.approx(found.metrics["margin"], rel=1e-6)
    assert measured["rewards/accuracies"] == pytest.approx(found.metrics["accuracy"])


# Converters


def of_two_turns() -> list[RolloutGroup]:
    """Two groups of three episodes; some of the tokens are constrained."""
    made: list[RolloutGroup] = []
    for number in range(2):
        episodes: list[EpisodeRollouts] = []
        for index, reward in enumerate((1.0, 0.0, 0.25)):
            first = make_call(None, [5, 6, 7 + number], [9 + index, 10, 11], constrained=bytes([0, 2, 0]))
            second = make_call(first, [12], [13, 14 + index])
            episodes.append(make_episode([first, second], reward, f"e{number}.{index}"))
        made.append(make_group(episodes, f"g{number}"))
    return made


GROUPS = of_two_turns()
MASKS = [e.rollouts[0].response_loss_mask.astype(int).tolist() for g in GROUPS for e in g.episodes]
WANTED = np.concatenate([group.advantages() for group in GROUPS])


def test_verl_computes_our_advantages_of_what_is_converted() -> None:
    proto = pytest.importorskip("verl.protocol").DataProto.from_single_dict(
        to_verl(RolloutBatch(tuple(GROUPS)))
    )
    advantages, _ = core.compute_grpo_outcome_advantage(
        token_level_rewards=proto.batch["rm_scores"],
        response_mask=proto.batch["response_mask"],
        index=proto.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=False,
    )
    np.testing.assert_allclose(advantages, WANTED[:, None] * np.array(MASKS), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_on_what_is_converted(tmp_path: Path, random_model: Path) -> None:
    rolled = to_trl(GROUPS)
    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        num_generations=3,
        per_device_train_batch_size=6,
        max_steps=1,
        scale_rewards="none",
        report_to=[],
        use_cpu=True,
        beta=0.0,
        save_strategy="no",
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(random_model),
        args=config,
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            random_model, eos_token="w1", pad_token="w0"
        ),
        train_dataset=Dataset.from_list([{"prompt": "w5"}, {"prompt": "w6"}]),
        reward_funcs=[lambda reward, **_: reward],
        rollout_func=lambda prompts, _: rolled,
    )
    inputs = [{"prompt": prompt} for prompt in ("w5", "w6") for _ in range(3)]
    scored = trainer._generate_and_score_completions(inputs)
    np.testing.assert_allclose(scored["advantages"], WANTED, atol=1e-6)
    assert scored["tool_mask"].tolist() == MASKS
    assert scored["prompt_ids"].tolist() == torch.tensor(rolled["prompt_ids"]).tolist()
    assert scored["completion_ids"].tolist() == rolled["completion_ids"]
    trainer.train()

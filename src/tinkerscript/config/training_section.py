from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from tinkerscript.config.recipes import RecipeName, with_recipe
from tinkerscript.config.section import Section

# Keys of `loss_config` that add a divergence from the start policy to the loss.
KL_LOSSES = ("kl_k1", "kl_k2", "kl_k3", "kl_unbiased")

Bounds = tuple[float, float]  # [low, high], both inclusive.

# Advantages that use rewards of earlier steps.
PAST_RULES = ("running_mean", "sample_mean", "running_deviation")

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """Temperature for requests that set none. Tokens sampled at 0 do not train
    (docs/training.md#temperature)."""

    precedence: Literal["program", "run"] = "program"
    """Whose temperature wins: the `program`'s (request or Inspect task), or the `run`'s, which also turns off
    the program's top-p, top-k, min-p and repetition penalty."""

    max_tokens: int = Field(default=0, ge=0)
    """Maximum tokens of a reply for requests without a limit. 0: 64 for a small model, else 512 or half of a
    shorter context."""

    @property
    def reply_tokens(self) -> int:
        return self.max_tokens or 512


CORRECTION_WEIGHTS = ("tis", "sequence_tis", "mis", "sequence_mis", "icepop")
CORRECTION_MASKS = ("token_mask", "sequence_mask", "geometric_mask", "veto")


class RolloutCorrectionConfig(Section):
    tis: float | None = Field(default=None, gt=0)
    """Weight min(w, `tis`) per token (truncated importance sampling). 2 is usual."""

    sequence_tis: float | None = Field(default=None, gt=0)
    """Weight min(product of w, `sequence_tis`) per sequence."""

    mis: float | None = Field(default=None, gt=0)
    """Weight w per token; tokens with w above `mis` carry no loss."""

    sequence_mis: float | None = Field(default=None, gt=0)
    """Weight each sequence by its product of w; above `sequence_mis` it carries no loss."""

    icepop: Bounds | None = None
    """Weight w per token; tokens with w outside [low, high] carry no loss. The paper uses [0.5, 5]."""

    token_mask: Bounds | None = None
    """Tokens with w outside [low, high] carry no loss."""

    sequence_mask: Bounds | None = None
    """Sequences with a product of w outside [low, high] carry no loss."""

    geometric_mask: Bounds | None = None
    """Sequences with a geometric mean of w outside [low, high], such as [0.99, 1.01], carry no loss."""

    veto: Bounds | None = None
    """Sequences with any w outside [low, high], such as [1e-4, 100], carry no loss."""

    off_policy_mask: float = Field(default=0.0, ge=0)
    """Tokens with a negative advantage carry no loss if log p(sampler) - log p(policy), averaged over their
    sequence, exceeds this (DeepSeek-V3.2). 0: off."""

    bypass: bool = False
    """Take the sampler's logprobs as the trainer's: saves a forward pass, but skips the comparison before
    weights change."""

    @field_validator(*CORRECTION_MASKS, "icepop")
    @classmethod
    def _bounds_are_in_order(cls, bounds: Bounds | None) -> Bounds | None:
        if bounds is not None and not 0 <= bounds[0] <= bounds[1]:
            raise ValueError("it must be [low, high], both at least 0")
        return bounds

    @model_validator(mode="after")
    def _parts_combine(self) -> RolloutCorrectionConfig:
        weights = [name for name in CORRECTION_WEIGHTS if getattr(self, name) is not None]
        if len(weights) > 1:
            raise ValueError(
                f"{' and '.join(weights)} each weigh by the same ratio: give one, and any masks "
                f"({', '.join(CORRECTION_MASKS)})"
            )
        if self.bypass and (named := [*weights, *(mask for mask in CORRECTION_MASKS if getattr(self, mask))]):
            raise ValueError(
                f"bypass takes the sampler's log probabilities for the trainer's, so {named[0]} would "
                "always find a ratio of 1: leave out one or the other"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether any part needs the ratio of the trainer's to the sampler's probabilities."""
        return any(getattr(self, name) is not None for name in (*CORRECTION_WEIGHTS, *CORRECTION_MASKS))


class DistillationConfig(Section):
    teacher: str = ""
    """Role (`kind: frozen`) that scores sampled tokens."""

    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the task's reward, relative to the teacher's divergence. 0: only the teacher counts, and
    groups may have one episode."""

    top_k: int = Field(default=0, ge=0)
    """Train on the divergence over the teacher's `top_k` most probable tokens and the rest, as a loss,
    instead of the sampled token's as a reward. Needs a teacher in the trainer. 0: off."""

    @model_validator(mode="after")
    def _candidates_have_a_teacher(self) -> DistillationConfig:
        if self.top_k and not self.teacher:
            raise ValueError(f"top_k: {self.top_k} takes the most probable tokens of a teacher: set teacher")
        return self

    @property
    def is_pure(self) -> bool:
        """Whether the teacher alone decides, without the task's reward."""
        return bool(self.teacher) and not self.reward_coef


class CreditConfig(Section):
    level: Literal["episode", "turn", "state"] = "turn"
    """Advantage of a call's tokens if programs reward single calls: the `episode`'s, or the call's return
    compared with the group's at the same `turn`, or after the same observation, plus the episode's (`state`,
    GiGPO)."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """Factor by which a reward shrinks for each call further back."""

    @model_validator(mode="after")
    def _discounts_calls(self) -> CreditConfig:
        if self.level == "episode" and self.discount != 1:
            raise ValueError(
                f"discount: {self.discount:g} applies to later rewards of a call: set level to turn or state"
            )
        return self


class JudgeConfig(Section):
    function: str = ""
    """Function that returns the rewards of a complete group's episodes, as `module:name` or
    `file.py:name`."""

    role: str = ""
    """Role (`kind: outside` or `frozen`) that ranks a group's episodes, without labels."""

    rubric: str = ""
    """What the role should judge by."""

    @property
    def is_on(self) -> bool:
        return bool(self.function or self.role)

    @model_validator(mode="after")
    def _one_judge(self) -> JudgeConfig:
        if self.function and self.role:
            raise ValueError(f"role: {self.role!r} and function: {self.function!r} both judge; give one")
        if self.rubric and not self.role:
            raise ValueError("rubric is the role's instruction: set role too")
        return self


class CurriculumConfig(Section):
    by: Literal["none", "pass_rate"] = "none"
    """`none`: each pass asks every sample once. `pass_rate`: skip samples that are nearly always or never
    solved, and prefer those in between (docs/training.md#a-curriculum)."""

    pass_reward: float = 1.0
    """Minimum reward of a solved episode, if it reports no `is_success`."""


class EntropyConfig(Section):
    target: float = Field(default=0.0, ge=0)
    """Entropy in nats per token. Below it, the bonus acts and its weight grows by `delta` a step; above it,
    the bonus is off and its weight shrinks. 0: off."""

    delta: float = Field(default=0.005, gt=0)
    """Change per step of the weight, which begins at 0 and is never negative."""


class TrainingConfig(Section):
    recipe: RecipeName = ""
    """A published algorithm, which sets its paper's keys (docs/recipes.md). Your keys win."""

    steps: int = Field(default=100, ge=0)
    """Training steps. Each trains on a batch of groups and publishes a policy version."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups per step, each of another sample."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per group. 1 needs distillation without the task's reward, or a baseline and scale that look
    beyond the group."""

    batch_rule: Literal["groups", "differing_groups"] = "groups"
    """A batch needs enough `groups`, or enough with different rewards (`differing_groups`); the others are
    replaced, up to three times `groups_per_step`."""

    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Which samples are asked, and how often."""

    extra_groups: int = Field(default=0, ge=0)
    """Spare groups, so that stragglers do not delay a step. As many running groups are cancelled once no
    later
    step could train them, at `max_policy_lag: 0` in every step."""

    max_policy_lag: int | None = Field(default=None, ge=0)
    """Maximum steps between the weights that sampled an episode and those that it trains. Above 0, sampling
    overlaps with training (docs/training.md). null: 0, or 1 if clients register their samples."""

    on_stale: Literal["wait", "drop"] = "wait"
    """When a running group would become too old: wait for it (`wait`), or train without its old episodes,
    which still count in the group's baseline (`drop`)."""

    replay_uses: int = Field(default=1, ge=1)
    """Steps that an episode may train in. n adds n - 1 times `groups_per_step` earlier groups to each step,
    up to n - 1 steps old."""

    checkpoint_every: int = Field(default=5, ge=0)
    """Steps between checkpoints, from which `train --resume` continues. 0: only after the last step."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints to keep besides the final and the best one."""

    inspect_log_every: int = Field(default=5, ge=0)
    """Write the episodes of every n-th step and of all evaluations as Inspect logs (`inspect/`). 0: never."""

    on_misalignment: Literal["stop", "warn"] = "stop"
    """If sampler and trainer disagree on logprobs at policy lag 0: end the run before the weights change
    (`stop`), or leave out the sequences known to be wrong (`warn`)."""

    constrained_tokens: Literal["mask", "train", "refuse"] = "mask"
    """Tokens that a grammar forced or restricted (`response_format`, required tools) carry no loss (`mask`),
    train (`train`), or exclude their sequence (`refuse`)."""

    max_mean_dlogp: float = Field(default=0.1, gt=0)
    """Sampler and trainer are misaligned if their logprobs differ by more than this in the mean, at policy
    lag 0. Half of it is a warning."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch, which is split evenly."""

    minibatch_size: int = Field(default=0, ge=0)
    """Minimum sequences per optimizer step; a pass takes as many steps as that allows. 0: `minibatches`
    decides."""

    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over a batch, each reshuffled."""

    advantage_baseline: Literal["group_mean", "leave_one_out", "running_mean", "sample_mean", "none"] = (
        "group_mean"
    )
    """Subtracted from an episode's reward: the mean of its group, of the group's others, of all rewards so
    far, or of its sample's earlier ones, or nothing (docs/training.md#advantages)."""

    advantage_scale: Literal[
        "none", "group_deviation", "group_mean", "batch_deviation", "running_deviation"
    ] = "none"
    """Divides the difference: nothing, the group's deviation or mean, or the deviation over the step's tokens
    or all rewards so far (docs/training.md#advantages)."""

    pass_k: int = Field(default=1, ge=1)
    """An episode's reward becomes the mean, over all sets of k episodes of its group that include it, of the
    set's best reward."""

    reward_weights: dict[str, float] = Field(default_factory=dict[str, float])
    """Scores that replace the reward, with their weights (GDPO). Each score's advantage is divided by its
    deviation in the group before they are added."""

    mask_truncated: bool = False
    """Sequences that end at the token limit carry no loss, but count in the group's baseline."""

    overlong_buffer: float = Field(default=0.0, ge=0, le=1)
    """An episode loses up to 1 of its reward as its longest reply passes through this last share of
    `sampling.max_tokens`. DAPO uses 0.2."""

    length_penalty: dict[Literal["token", "turn"], Cost] = Field(
        default_factory=dict[Literal["token", "turn"], float]
    )
    """Reward lost for each `token` sampled and each `turn` (call): `{turn: 0.05}`."""

    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Share of the step's tokens that train, by highest entropy."""

    adaptive_entropy: EntropyConfig = Field(default_factory=EntropyConfig)
    """An entropy bonus with an adaptive weight (Skywork-OR1). For a fixed weight, set
    `loss_config.entropy`."""

    credit: CreditConfig = Field(default_factory=CreditConfig)
    """How rewards of single model calls count (docs/rewards.md)."""

    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """A judge that compares all episodes of a group (docs/rewards.md)."""

    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the start policy, subtracted from each token's reward. `loss_config`
    adds it to the loss instead."""

    kl_reference_every: int = Field(default=0, ge=0)
    """Steps after which the policy becomes the new reference of KL penalty and losses. 0: it stays the start
    policy."""

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """Training on a teacher's scores (docs/training.md#a-teacher)."""

    loss_fn: str = "ppo"
    """`ppo`, `importance_sampling`, `cispo` or `gspo`; with the embedded engine also `dro`, `ppo_dual_clip`,
    `dppo_tv`, `dppo_kl`, `sapo`, `clip_cov`, `kl_cov`, or your own as `module:name` (docs/extending.md)."""

    loss_config: dict[str, float] = Field(default_factory=dict[str, float])
    """The loss's settings besides its clip thresholds, such as `{dual_clip: 3}`. The embedded engine adds
    `entropy`, `kl_k1`, `kl_k2`, `kl_k3` and `kl_unbiased` to any loss, with these weights
    (docs/training.md#losses)."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Losses clip ratios below 1 - clip_low. null: 0.2, or 3e-4 for `gspo`. 1: never."""

    clip_high: float | None = Field(default=None, ge=0)
    """Losses clip ratios above 1 + clip_high. null: 0.2, or 4e-4 for `gspo`."""

    loss_mean: Literal["sequences", "tokens", "tokens_then_sequences", "episodes"] = "sequences"
    """Divides a minibatch's summed token losses: its trained `sequences` or `tokens`, each sequence's tokens
    and then the sequences, or the planned `episodes` (docs/training.md#means-and-minibatches)."""

    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    """Correction for a sampler with other probabilities than the trainer's
    (docs/training.md#a-sampler-that-is-not-the-trainer). w is the trainer's probability of a token before the
    update, over the sampler's. Give at most one weight and any masks."""

    learning_rate: float = Field(default=0.0, ge=0)
    """AdamW's learning rate after the warmup. 0: the usual one (docs/training.md#the-learning-rate)."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Decay of the learning rate after the warmup, down to a tenth."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps before the full learning rate: step n uses n / (warmup_steps + 1) of it."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""

    grad_clip_norm: float = Field(default=1.0, ge=0)
    """Gradients with a larger norm are scaled down to it. 0: never."""

    @property
    def min_group(self) -> int:
        """Smaller groups are dropped and counted."""
        compares = (
            self.advantage_baseline in ("group_mean", "leave_one_out")
            or self.advantage_scale in ("group_deviation", "group_mean")
            or bool(self.reward_weights)
            or self.judge.is_on
        )
        return max(2, self.pass_k) if compares and not self.distillation.is_pure else 1

    @property
    def kl_losses(self) -> list[str]:
        return [name for name in KL_LOSSES if self.loss_config.get(name)]

    @model_validator(mode="before")
    @classmethod
    def _recipe_is_below(cls, given: Any) -> Any:
        return with_recipe(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _groups_compare(self) -> TrainingConfig:
        if self.pass_k > 1 and self.group_size < self.pass_k:
            raise ValueError(
                f"pass_k: {self.pass_k} takes sets of {self.pass_k} episodes of a group, and group_size is "
                f"{self.group_size}: raise group_size or lower pass_k"
            )
        if self.group_size < self.min_group:
            raise ValueError(
                "group_size: 1 leaves nothing to compare an episode with: set 2 or more, take a baseline "
                "beyond the group (advantage_baseline: sample_mean) without a judge, or train on a teacher "
                "alone (distillation.teacher, and distillation.reward_coef: 0)"
            )
        if self.distillation.is_pure and self.judge.is_on:
            raise ValueError(
                "judge: distillation without the task's reward ignores its verdicts; leave it out, or set "
                "distillation.reward_coef"
            )
        if self.distillation.is_pure and self.batch_rule == "differing_groups":
            raise ValueError(
                "batch_rule: differing_groups would replace groups that distillation without the task's "
                "reward trains on; leave it out, or set distillation.reward_coef"
            )
        if self.batch_rule == "differing_groups" and (
            self.group_size == 1 or self.advantage_baseline in ("running_mean", "sample_mean")
        ):
            raise ValueError(
                "batch_rule: differing_groups would replace groups of equal rewards, on which "
                f"advantage_baseline: {self.advantage_baseline} trains: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _advantages_have_one_rule(self) -> TrainingConfig:
        if self.advantage_baseline == "none" and self.advantage_scale != "batch_deviation":
            raise ValueError(
                "advantage_baseline: none takes the batch's mean as the baseline, which "
                f"advantage_scale: {self.advantage_scale} does not subtract: set batch_deviation"
            )
        if self.pass_k > 1:
            wrong = [
                *(
                    [f"advantage_baseline: {self.advantage_baseline}"]
                    * (self.advantage_baseline != "group_mean")
                ),
                *(
                    [f"advantage_scale: {self.advantage_scale}"]
                    * (self.advantage_scale in ("group_mean", "running_deviation"))
                ),
                *(["reward_weights"] * bool(self.reward_weights)),
            ]
            if wrong:
                raise ValueError(
                    f"pass_k: {self.pass_k} compares sets of episodes with their mean: leave out {wrong[0]}"
                )
        if self.reward_weights and self.advantage_scale in ("group_deviation", "group_mean"):
            raise ValueError(
                f"advantage_scale: {self.advantage_scale}: reward_weights already divides each score by its "
                "own deviation: leave it out, or set batch_deviation"
            )
        for name, is_set in (
            ("overlong_buffer", self.overlong_buffer),
            ("length_penalty", self.length_penalty),
        ):
            if is_set and (self.reward_weights or self.distillation.is_pure):
                instead = "reward_weights" if self.reward_weights else "a teacher alone (distillation)"
                raise ValueError(
                    f"{name} is taken off the reward, and this run trains on {instead} in its place: leave "
                    "one of them out"
                )
        if self.distillation.top_k and (self.top_entropy < 1 or self.rollout_correction.is_on):
            other = "top_entropy" if self.top_entropy < 1 else "rollout_correction"
            raise ValueError(
                f"distillation.top_k: {self.distillation.top_k} is a loss of all tokens, and {other} changes "
                "only advantages: leave one of them out"
            )
        if self.recipe == "gdpo" and not self.reward_weights:
            raise ValueError(
                "recipe: gdpo adds up several scores: name them and their weights in reward_weights, such as "
                "{correct: 1, format: 0.2}"
            )
        return self

    @model_validator(mode="after")
    def _past_rewards_are_comparable(self) -> TrainingConfig:
        rules = {"advantage_baseline": self.advantage_baseline, "advantage_scale": self.advantage_scale}
        named = [f"{name}: {value}" for name, value in rules.items() if value in PAST_RULES]
        is_per_call = self.credit.level == "state" or self.credit.discount != 1
        clashes = {
            "reward_weights, which divides each score by its deviation in the group": self.reward_weights,
            f"replay_uses: {self.replay_uses}, because the past has the replayed rewards already": (
                self.replay_uses > 1
            ),
            "distillation without the task's reward (reward_coef: 0)": self.distillation.is_pure,
            f"credit (level: {self.credit.level}, discount: {self.credit.discount:g}), which compares "
            "single calls": is_per_call and self.advantage_baseline in PAST_RULES,
        }
        for other, is_set in clashes.items():
            if named and is_set:
                raise ValueError(f"{named[0]} does not go with {other}: leave out one of them")
        return self

    @model_validator(mode="after")
    def _bypass_has_what_it_needs(self) -> TrainingConfig:
        if not self.rollout_correction.bypass:
            return self
        if self.kl_penalty_coef:
            raise ValueError(
                "kl_penalty_coef: the penalty needs the policy's log probabilities, and "
                "rollout_correction.bypass takes the sampler's instead: leave out bypass, or "
                "take the divergence as a loss (loss_config.kl_k3)"
            )
        if self.top_entropy < 1 or self.adaptive_entropy.target:
            name = "top_entropy" if self.top_entropy < 1 else "adaptive_entropy"
            raise ValueError(
                f"{name}: the entropies come from the forward pass that rollout_correction.bypass saves: "
                "leave out one or the other"
            )
        return self

    @model_validator(mode="after")
    def _one_entropy_bonus(self) -> TrainingConfig:
        given = self.adaptive_entropy
        if given.target and self.loss_config.get("entropy"):
            raise ValueError(
                f"adaptive_entropy and loss_config.entropy: {self.loss_config['entropy']:g} both set the "
                "weight of the entropy bonus: leave out one of them"
            )
        if "delta" in given.model_fields_set and not given.target and given.delta != EntropyConfig().delta:
            raise ValueError("adaptive_entropy.delta needs adaptive_entropy.target, the entropy to aim at")
        return self

    @model_validator(mode="after")
    def _minibatches_have_one_rule(self) -> TrainingConfig:
        if self.minibatch_size and self.minibatches > 1:
            raise ValueError(
                f"training.minibatch_size: {self.minibatch_size} decides how many optimizer steps there are: "
                f"leave out minibatches: {self.minibatches}"
            )
        return self


class SftConfig(Section):
    data: str = ""
    """JSONL file of chats in OpenAI's format (docs/training.md#supervised-training-on-chats), or a run's
    folder, to train on its best episodes."""

    best: int = Field(default=1, ge=1)
    """If `data` is a run: how many of each group's episodes train, by highest reward, or with `dpo_beta` how
    many pairs."""

    dpo_beta: float = Field(default=0.0, ge=0)
    """DPO on pairs of a run's episodes, with this weight of the divergence from the start policy; 0.1 is
    usual."""

    held_out: int = Field(default=32, ge=0)
    """Chats, chosen by the seed, that measure the loss (`nll`) and never train."""

    batch_size: int = Field(default=32, ge=1)
    """Chats per step."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the data, each in another order."""

    max_tokens: int = Field(default=0, ge=0)
    """Longer chats are left out and counted. 0: the model's context length."""

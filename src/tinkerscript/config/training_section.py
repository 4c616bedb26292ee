"""The settings of training: sampling, GRPO, distillation, supervised training."""

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

KL_LOSSES = ("kl_k1", "kl_k2", "kl_k3", "kl_unbiased")
"""Keys of `loss_config` that add the divergence from the start policy to the loss."""

Bounds = tuple[float, float]
"""The lowest and the highest ratio that is kept."""

Cost = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SamplingConfig(Section):
    temperature: float = Field(default=1.0, ge=0)
    """Temperature if the program does not set one. Each token trains at the temperature that it was sampled
    at; what is sampled at 0 does not train."""

    precedence: Literal["program", "run"] = "program"
    """Whose temperature counts where both name one: the program's (the request's, the Inspect task's config),
    or the run's. `run` also turns off the top-p, top-k, min-p and repetition penalty of programs, and leaves
    their `max_tokens`."""

    max_tokens: int = Field(default=0, ge=0)
    """Maximum number of tokens per model call if the program does not set a limit. 0: 512, or half of a
    shorter context; 64 for a small model."""

    @property
    def reply_tokens(self) -> int:
        """`max_tokens`, also where no run has chosen it yet."""
        return self.max_tokens or 512


CORRECTION_WEIGHTS = ("tis", "sequence_tis", "mis", "sequence_mis", "icepop")
CORRECTION_MASKS = ("token_mask", "sequence_mask", "geometric_mask", "veto")


class RolloutCorrectionConfig(Section):
    """w: the trainer's probability of a token before the update, over the sampler's. One weight at most, and
    any masks."""

    tis: float | None = Field(default=None, gt=0)
    """Token TIS: weigh each token by min(w, `tis`). 2 is usual."""

    sequence_tis: float | None = Field(default=None, gt=0)
    """Sequence TIS: the same with the product of w over the trained tokens of a sequence."""

    mis: float | None = Field(default=None, gt=0)
    """Token MIS: weigh by w, and leave out tokens with a larger w."""

    sequence_mis: float | None = Field(default=None, gt=0)
    """Sequence MIS: the same with the product over the sequence."""

    icepop: Bounds | None = None
    """IcePop: weigh by w, and leave out tokens whose w is outside [low, high]. [0.5, 5] is its authors'."""

    token_mask: Bounds | None = None
    """Leave out tokens whose w is outside, without weighing the others."""

    sequence_mask: Bounds | None = None
    """Leave out sequences whose product of w is outside."""

    geometric_mask: Bounds | None = None
    """Leave out sequences whose geometric mean of w is outside, such as [0.99, 1.01]."""

    veto: Bounds | None = None
    """Leave out sequences with any token whose w is outside, such as [1e-4, 100]."""

    off_policy_mask: float = Field(default=0.0, ge=0)
    """DeepSeek-V3.2's off-policy sequence mask: tokens with a negative advantage carry no loss where the mean
    of log p(sampler) - log p(policy) over their sequence is above this. 0: none."""

    bypass: bool = False
    """Take the sampler's log probabilities for the trainer's, and save the forward pass that computes those.
    Sampler and trainer are then not compared before the weights change (docs/training.md)."""

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
                f"{' and '.join(weights)} each weigh by the same ratio: give one, and masks "
                f"({', '.join(CORRECTION_MASKS)}) beside it"
            )
        if self.bypass and (named := [*weights, *(mask for mask in CORRECTION_MASKS if getattr(self, mask))]):
            raise ValueError(
                f"bypass takes the sampler's log probabilities for the trainer's, so that {named[0]} would "
                "always find a ratio of 1: leave one of them out"
            )
        return self

    @property
    def is_on(self) -> bool:
        """Whether any part needs the ratio of the trainer's to the sampler's probabilities."""
        return any(getattr(self, name) is not None for name in (*CORRECTION_WEIGHTS, *CORRECTION_MASKS))


class DistillationConfig(Section):
    teacher: str = ""
    """Name of the role (`roles`, of `kind: frozen`) that scores every sampled token. Empty: none."""

    reward_coef: float = Field(default=0.0, ge=0)
    """Weight of the task's own reward beside the divergence, which has 1. 0: the teacher alone decides, and
    groups need only one episode."""

    @property
    def is_pure(self) -> bool:
        """Whether the task's reward has no part in training."""
        return bool(self.teacher) and not self.reward_coef


class CreditConfig(Section):
    level: Literal["episode", "turn", "state"] = "turn"
    """How a call's tokens get their advantage if programs reward single calls (docs/rewards.md). With
    `episode`, all tokens have the advantage of the episode. With `turn`, the call's return is compared with
    the returns of the group's episodes at the same turn. With `state`, it is compared with the group's calls
    that saw the same observation, and the result is added to the episode's advantage (GiGPO)."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """The factor by which a reward counts less for each call further back from the one that earned it."""

    @model_validator(mode="after")
    def _discounts_calls(self) -> CreditConfig:
        if self.level == "episode" and self.discount != 1:
            raise ValueError(
                f"discount: {self.discount:g} discounts what later calls earn: set level to turn or state"
            )
        return self


class JudgeConfig(Section):
    function: str = ""
    """Function that sees all episodes of a complete group and gives each its reward, as `module:name` or
    `file.py:name` (docs/rewards.md). Empty: none."""

    role: str = ""
    """Role (`roles`, of `kind: outside` or `frozen`) that ranks the episodes of a group, in place of a
    function: no labels are needed. Empty: none."""

    rubric: str = ""
    """What counts, for the role."""

    @property
    def is_on(self) -> bool:
        """Whether groups are judged."""
        return bool(self.function or self.role)

    @model_validator(mode="after")
    def _one_judge(self) -> JudgeConfig:
        if self.function and self.role:
            raise ValueError(f"role: {self.role!r} and function: {self.function!r} both judge; give one")
        if self.rubric and not self.role:
            raise ValueError("rubric is what a role is told: give role")
        return self


class CurriculumConfig(Section):
    by: Literal["none", "pass_rate"] = "none"
    """`pass_rate`: pass over samples that the run's own episodes nearly always or nearly never pass, and
    prefer those in between (docs/training.md#a-curriculum). `none`: every sample, once in each pass."""

    pass_reward: float = 1.0
    """Reward from which an episode passes that does not say whether it succeeded (`is_success`)."""


class TrainingConfig(Section):
    recipe: RecipeName = ""
    """An algorithm by its paper's name, which sets the keys that the paper sets (docs/recipes.md); those that
    you give win. `train --plan` prints them."""

    steps: int = Field(default=100, ge=0)
    """Training steps. Each trains on one batch of groups and publishes one policy version."""

    groups_per_step: int = Field(default=32, ge=1)
    """Groups, and so samples, per step."""

    group_size: int = Field(default=8, ge=1)
    """Episodes per sample. 1 is for distillation without the task's reward."""

    batch_rule: Literal["groups", "differing_groups"] = "groups"
    """When a batch is complete: after enough complete `groups`, or after enough complete groups whose rewards
    differ (`differing_groups`): the others are replaced, by up to three times `groups_per_step`."""

    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
    """Which samples are asked."""

    extra_groups: int = Field(default=0, ge=0)
    """Groups in flight beyond those that are needed, so that stragglers do not hold a step up. With a
    `max_policy_lag` of 0 the rest of a step is cancelled."""

    max_policy_lag: int | None = Field(default=None, ge=0)
    """Training steps that an episode may be behind the weights that it trains. 0: each step samples its
    groups and then trains on them. Above, groups start while others train, as many as can train in time
    (docs/training.md). null: 0, or 1 where clients register samples of their own."""

    on_stale: Literal["wait", "drop"] = "wait"
    """What a step does if running groups would be too old to train after it. With `wait` it waits for them.
    With `drop` it trains without them: when they end, their old episodes carry no loss, but the rewards still
    count in the group's baseline."""

    replay_uses: int = Field(default=1, ge=1)
    """Training steps that an episode may train in: n - 1 times `groups_per_step` groups of earlier steps join
    each step, up to `replay_uses` - 1 steps old where `max_policy_lag` is less. 1: no replay."""

    checkpoint_every: int = Field(default=5, ge=0)
    """Steps between checkpoints, from which `train --resume` continues; 0: only the last step."""

    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of checkpoints to keep in addition to the final one, and to that of the best evaluation after a
    step that has one."""

    inspect_log_every: int = Field(default=5, ge=0)
    """Write the episodes of every n-th step, and of every evaluation, as Inspect logs to `inspect/` in the
    run folder (`inspect view --log-dir`); 0: none."""

    on_misalignment: Literal["stop", "warn"] = "stop"
    """What to do if the sampler's report does not match the trainer's computation at policy lag 0: `stop`
    before the weights change (the run can be resumed), or `warn` and leave out the sequences known to be
    wrong."""

    constrained_tokens: Literal["mask", "train", "refuse"] = "mask"
    """What to do with sampled tokens whose choice a grammar forced or cut (`response_format`, required
    tools): `mask`, they carry no loss; `train`, they train as if the policy had chosen them freely;
    `refuse`, their sequence does not train."""

    max_mean_dlogp: float = Field(default=0.1, gt=0)
    """Mean difference between the trainer's logprobs and the sampler's, at policy lag 0, above which a
    step is misaligned. Above half of it, a warning is counted."""

    minibatches: int = Field(default=1, ge=1)
    """Optimizer steps per pass over a batch. The sequences that train are split among them, however few they
    are."""

    minibatch_size: int = Field(default=0, ge=0)
    """Sequences of an optimizer step, at least. A pass over a batch has as many steps as that allows, and one
    if fewer sequences train. 0: `minibatches` says how many steps."""

    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over a batch, each reshuffled and split into minibatches."""

    advantage_baseline: Literal["group_mean", "leave_one_out", "none"] = "group_mean"
    """What is subtracted from an episode's reward. `group_mean` is the mean of its group, and
    `leave_one_out` the mean of the group's other episodes (RLOO). `none` subtracts nothing, as REINFORCE++
    does, and needs `advantage_scale: batch_deviation`."""

    advantage_scale: Literal["none", "group_deviation", "group_mean", "batch_deviation"] = "none"
    """What the difference is divided by: nothing; the standard deviation of the group's rewards (GRPO); their
    mean (MaxRL); or, after their mean is subtracted, the standard deviation of the advantages of all tokens
    of the step that may train (REINFORCE++)."""

    pass_k: int = Field(default=1, ge=1)
    """Pass@k training: an episode's reward is the mean of the best reward over all sets of this many episodes
    of its group that have it. 1: its own reward."""

    reward_weights: dict[str, float] = Field(default_factory=dict[str, float])
    """GDPO: scores of a result by name, and their weights, in place of its reward. The advantage of each is
    divided by the deviation of that score in the group before they are added up."""

    mask_truncated: bool = False
    """Overlong filtering: sequences whose last reply the token limit cut off carry no loss. Their rewards
    still count in the group's baseline."""

    overlong_buffer: float = Field(default=0.0, ge=0, le=1)
    """Soft overlong punishment: in the last share of `sampling.max_tokens` the longest reply of an episode
    costs it up to 1 of its reward, in proportion. 0: none. 0.2 is DAPO's."""

    length_penalty: dict[Literal["token", "turn"], Cost] = Field(
        default_factory=dict[Literal["token", "turn"], float]
    )
    """What the length of an episode costs it of its reward: so much for each `token` that the policy sampled,
    and for each `turn`, one of its calls. `{turn: 0.05}`, for example."""

    top_entropy: float = Field(default=1.0, gt=0, le=1)
    """Only this share of the step's tokens trains: those where the policy's entropy is highest."""

    credit: CreditConfig = Field(default_factory=CreditConfig)
    """How the rewards of single model calls train them (docs/rewards.md)."""

    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """Rewards by whoever sees all episodes of a group at once (docs/rewards.md)."""

    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the start policy, subtracted from the reward of each token. 0:
    none. As a loss: `kl_k1`, `kl_k2`, `kl_k3` or `kl_unbiased` of `loss_config`."""

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """Training on the scores of a teacher (docs/training.md)."""

    loss_fn: str = "ppo"
    """Policy-gradient loss, by Tinker's names: `ppo`, `importance_sampling`, `cispo` or `gspo`. For the
    embedded engine also `dro`, `ppo_dual_clip`, `dppo_tv`, `dppo_kl`, `sapo`, `clip_cov` and `kl_cov`, or
    `module:name`, a loss of your own (docs/extending.md)."""

    loss_config: dict[str, float] = Field(default_factory=dict[str, float])
    """Settings of the loss by name, such as `{dual_clip: 3}`, besides the clip thresholds. For the embedded
    engine every loss also has `entropy`, the weight of an entropy bonus, and `kl_k1`, `kl_k2`, `kl_k3` and
    `kl_unbiased`, weights of the divergence from the start policy as a loss (docs/training.md)."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The probability ratio is clipped below 1 - clip_low, by losses that clip. null: the loss's own, 0.2, or
    3e-4 for `gspo`. 1 turns it off."""

    clip_high: float | None = Field(default=None, ge=0)
    """The probability ratio is clipped above 1 + clip_high, by losses that clip. null: the loss's own, 0.2,
    or 4e-4 for `gspo`."""

    loss_mean: Literal["sequences", "tokens", "tokens_then_sequences", "episodes"] = "sequences"
    """What the sum of a minibatch's token losses is divided by: the number of its `sequences`, or of its
    trained `tokens` (DAPO); or each sequence by its own tokens, and then by the sequences (GRPO's paper); or
    the constant number of `episodes` that a minibatch is planned to have, replayed ones included, however few
    of them train."""

    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    """Correction for a sampler whose probabilities differ from the trainer's (bfloat16, other kernels, older
    weights)."""

    learning_rate: float = Field(default=0.0, ge=0)
    """AdamW learning rate after the warmup. 0: the usual one for what trains, all weights or an adapter
    (docs/training.md); the config in the run folder has the number."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "linear"
    """How the learning rate decays after the warmup, down to a tenth of it."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps until the full learning rate: step n of the warmup uses n / (warmup_steps + 1) of it."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""

    grad_clip_norm: float = Field(default=1.0, ge=0)
    """Gradient norm above which gradients are scaled down; 0 turns it off."""

    @property
    def min_group(self) -> int:
        """Episodes that a group needs to train; smaller groups are dropped and counted."""
        return 1 if self.distillation.is_pure else max(2, self.pass_k)

    @property
    def kl_losses(self) -> list[str]:
        """The keys of `loss_config` that add the divergence from the start policy to the loss."""
        return [name for name in KL_LOSSES if self.loss_config.get(name)]

    @model_validator(mode="before")
    @classmethod
    def _recipe_is_below(cls, given: Any) -> Any:
        return with_recipe(cast("Mapping[str, Any]", given)) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _groups_compare(self) -> TrainingConfig:
        """Refuse groups that could not train."""
        if self.pass_k > 1 and self.group_size < self.pass_k:
            raise ValueError(
                f"pass_k: {self.pass_k} takes sets of {self.pass_k} episodes of a group, and group_size is "
                f"{self.group_size}: raise group_size or lower pass_k"
            )
        if self.group_size < self.min_group:
            raise ValueError(
                "group_size: 1 compares an episode with none: set 2 or more, or train on a teacher alone "
                "(distillation.teacher, and distillation.reward_coef: 0)"
            )
        if self.distillation.is_pure and self.judge.is_on:
            raise ValueError(
                "judge: under distillation without the task's reward no verdict counts; leave it out, or set "
                "distillation.reward_coef"
            )
        if self.distillation.is_pure and self.batch_rule == "differing_groups":
            raise ValueError(
                "batch_rule: differing_groups replaces groups that train under distillation without the "
                "task's reward; leave it out, or set distillation.reward_coef"
            )
        return self

    @model_validator(mode="after")
    def _advantages_have_one_rule(self) -> TrainingConfig:
        """Refuse keys of which one would have no effect."""
        if self.advantage_baseline == "none" and self.advantage_scale != "batch_deviation":
            raise ValueError(
                f"advantage_baseline: none takes the batch's mean for the baseline, which "
                f"advantage_scale: {self.advantage_scale} does not subtract: set batch_deviation"
            )
        if self.pass_k > 1:
            wrong = [
                *(
                    [f"advantage_baseline: {self.advantage_baseline}"]
                    * (self.advantage_baseline != "group_mean")
                ),
                *(["advantage_scale: group_mean"] * (self.advantage_scale == "group_mean")),
                *(["reward_weights"] * bool(self.reward_weights)),
            ]
            if wrong:
                raise ValueError(
                    f"pass_k: {self.pass_k} compares sets of episodes with their mean: leave out {wrong[0]}"
                )
        if self.reward_weights and self.advantage_scale in ("group_deviation", "group_mean"):
            raise ValueError(
                f"advantage_scale: {self.advantage_scale}: with reward_weights each score is divided by its "
                "own deviation already: leave it out, or set batch_deviation"
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
        if self.recipe == "gdpo" and not self.reward_weights:
            raise ValueError(
                "recipe: gdpo adds up several scores: name them and their weights in reward_weights, such as "
                "{correct: 1, format: 0.2}"
            )
        return self

    @model_validator(mode="after")
    def _bypass_has_what_it_needs(self) -> TrainingConfig:
        """Refuse what needs the trainer's forward pass before the update."""
        if not self.rollout_correction.bypass:
            return self
        if self.kl_penalty_coef:
            raise ValueError(
                "kl_penalty_coef: with rollout_correction.bypass nothing says that the sampler's log "
                "probabilities, which the penalty is computed from, are the policy's: leave out bypass, or "
                "take the divergence as a loss (loss_config.kl_k3)"
            )
        if self.top_entropy < 1:
            raise ValueError(
                "top_entropy: the entropies come from the forward pass that rollout_correction.bypass saves: "
                "leave one of them out"
            )
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
    """JSONL file of chats. Each line is an object with `messages` in OpenAI's format (`role` and `content`,
    optionally `tool_calls`, `tool_call_id`, `name` and `reasoning_content`), and optionally `tools`. The
    assistant's messages train. Or the folder of a run, whose best episodes train (docs/training.md)."""

    best: int = Field(default=1, ge=1)
    """How many episodes of each group train, those with the highest rewards, where `data` is a run. With
    `dpo_beta`, how many pairs."""

    dpo_beta: float = Field(default=0.0, ge=0)
    """DPO on pairs from the groups of a run: the best episode against the worst, the second best against the
    second worst. This is the weight of the divergence from the start policy; 0.1 is usual. 0: no DPO, the
    best episodes train by their likelihood."""

    held_out: int = Field(default=32, ge=0)
    """Number of chats, chosen by the seed, that never train and on which the loss (nll) is measured."""

    batch_size: int = Field(default=32, ge=1)
    """Chats per step."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the data, each in a different order."""

    max_tokens: int = Field(default=0, ge=0)
    """Longer chats are left out and counted, never truncated. 0: the model's context length."""

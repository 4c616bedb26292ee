"""The settings of training: sampling, GRPO, distillation, supervised training."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from tinkerscript.config.section import Section


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


class RolloutCorrectionConfig(Section):
    method: Literal["none", "truncate", "mask"] = "none"
    """What to do where the sampler's probabilities are not the trainer's: `none`; weigh by their ratio,
    truncated at `cap` (`truncate`), or left out of training above `cap` (`mask`)."""

    level: Literal["token", "sequence"] = "token"
    """Whose ratio: each token's own, or the product over the trained tokens of a sequence."""

    cap: float = Field(default=2.0, gt=0)
    """Largest weight."""


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
    """What the return of a model call is compared with, where a program rewards single calls
    (docs/rewards.md). `episode`: nothing, all tokens have the episode's advantage. `turn`: the returns of
    the group's episodes at the same turn. `state`: those of the group's calls that were shown the same,
    beside the episode's advantage (GiGPO)."""

    discount: float = Field(default=1.0, gt=0, le=1)
    """What a reward counts for the call before the one that earned it, and again for each earlier one."""

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
    """What a step does about running groups that will be too old to train after it. `wait`: it waits for
    them. `drop`: it goes on without them. When such a group ends, its episodes that are too old carry no
    loss, but their rewards still count in the group's baseline."""

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

    advantage_baseline: Literal["group_mean", "leave_one_out"] = "group_mean"
    """What is subtracted from an episode's reward: the mean of its group, or the mean of the group's
    other episodes."""

    advantage_scale: Literal["none", "group_deviation"] = "none"
    """What the difference is divided by: nothing, or the standard deviation of the group's rewards."""

    credit: CreditConfig = Field(default_factory=CreditConfig)
    """How the rewards of single model calls train them (docs/rewards.md)."""

    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """Rewards by whoever sees all episodes of a group at once (docs/rewards.md)."""

    kl_penalty_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence from the start policy, subtracted from the reward of each token. 0:
    none."""

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """Training on the scores of a teacher (docs/training.md)."""

    loss_fn: str = "ppo"
    """Policy-gradient loss, by Tinker's names: `ppo`, `importance_sampling`, `cispo` or `gspo`; `dro`, or
    `module:name`, a loss of your own (docs/extending.md), for the embedded engine."""

    loss_config: dict[str, float] = Field(default_factory=dict[str, float])
    """Settings of the loss by name, such as `{bonus: 0.01}`, besides the clip thresholds."""

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
        return 1 if self.distillation.is_pure else 2

    @model_validator(mode="after")
    def _groups_compare(self) -> TrainingConfig:
        """Refuse groups that could not train."""
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
    assistant's messages train."""

    held_out: int = Field(default=32, ge=0)
    """Number of chats, chosen by the seed, that never train and on which the loss (nll) is measured."""

    batch_size: int = Field(default=32, ge=1)
    """Chats per step."""

    epochs: int = Field(default=1, ge=1)
    """Passes over the data, each in a different order."""

    max_tokens: int = Field(default=0, ge=0)
    """Longer chats are left out and counted, never truncated. 0: the model's context length."""

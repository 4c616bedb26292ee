"""What changes the advantage of single tokens before the loss: `KLPenalty`, `Distillation`, `correct`.

The advantage that a task gives is the same for every token of an episode. The KL penalty adds each token's
divergence from the start policy, distillation the divergence from a teacher, and the rollout correction
weighs each token by the ratio between the trainer's probability and the sampler's.

Invariant: nothing trains without the scores that were asked for. A model that cannot give them ends the step
before any weight changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinkerscript.config import DistillationConfig, RolloutCorrectionConfig, RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.rollout import Rollout
from tinkerscript.train.backends.backend import FrozenModel, TrainerBackend
from tinkerscript.train.frozen_model import open_frozen_role
from tinkerscript.train.tokenizer_check import check_same_tokenizer

ReferenceLogprobs = Callable[[list[IntArray], list[FloatArray]], Awaitable[list[FloatArray]]]
"""Sequences of token ids, int32 [T] each, and the temperature that each token was sampled at, float32 [T]
each, -> each token's log probability under a model that does not train, float32 [T], [0] unused."""


@dataclass
class KLPenalty:
    """The reverse KL divergence from a reference model as part of each token's reward.

    For a sampled token, d = log p(sampler) - log p(reference), both at the temperature that it was sampled
    at: its mean over samples is KL(policy, reference) of the distributions that were sampled from. The
    token's advantage changes by -coef * d; if `centered`, by coef * (mean(d) - d), with the mean over the
    batch's tokens with loss. These are tinker_cookbook's `incorporate_kl_penalty` of its distillation recipe
    and of its RL loop, except that tokens without loss get nothing.
    """

    reference: ReferenceLogprobs
    coef: float
    centered: bool = True

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and mean(d), in nats per token."""
        rollouts = [item.rollout for item in items]
        scores = await self.reference(
            [each.tokens for each in rollouts], [each.temperatures for each in rollouts]
        )
        masks = [each.loss_mask for each in rollouts]
        gaps = [
            np.where(mask, each.logprobs - score, np.float32(0))
            for each, mask, score in zip(rollouts, masks, scores, strict=True)
        ]
        mean = float(sum(gap.sum(dtype=np.float64) for gap in gaps)) / sum(int(mask.sum()) for mask in masks)
        baseline = mean if self.centered else 0.0
        added = [
            np.where(mask, self.coef * (baseline - gap), 0.0).astype(np.float32)
            for mask, gap in zip(masks, gaps, strict=True)
        ]
        return [
            WeightedRollout(item.rollout, item.advantages + more)
            for item, more in zip(items, added, strict=True)
        ], mean


# A teacher

Waiting = Callable[[str], AbstractContextManager[object]]
"""Shows people what is waited for while the context is open."""


class Distillation:
    """On-policy distillation: the policy samples, and a teacher charges each sampled token its divergence.

    Sources: Agarwal et al. 2024, arXiv:2306.13649; Lu and Thinking Machines 2025, "On-Policy Distillation".
    """

    def __init__(
        self, teacher: FrozenModel, config: DistillationConfig, *, waiting: Waiting = lambda _: nullcontext()
    ) -> None:
        self._teacher = teacher
        self._name = config.teacher
        self._waiting = waiting
        self._penalty = KLPenalty(self._score, coef=1.0, centered=False)
        self.scales_logits = teacher.scales_logits
        """Whether the teacher scores at other temperatures than 1."""

        self.reward_coef = config.reward_coef
        """Weight of the task's own reward."""

    def check_tokenizer(self, folder: Path) -> None:
        """Raises ConfigError if the teacher has another tokenizer than the model that trains, in `folder`."""
        whose = f"training.distillation.teacher: {self._name!r}"
        check_same_tokenizer(folder, self._teacher.folder, whose=whose)

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and the mean divergence in nats per token.

        Raises EngineError if the teacher cannot score them.
        """
        return await self._penalty.apply(items)

    async def _score(self, sequences: list[IntArray], temperatures: list[FloatArray]) -> list[FloatArray]:
        with self._waiting(f"the teacher {self._name!r} to score {len(sequences)} sequences"):
            return await self._teacher.logprobs(sequences, temperatures)


@asynccontextmanager
async def open_distillation(
    config: RunConfig,
    backend: TrainerBackend,
    *,
    folder: Path,
    progress: ProgressReporter,
    opened: Mapping[str, FrozenModel] | None = None,
) -> AsyncGenerator[Distillation | None]:
    """The teacher that `training.distillation` names, ready to score; None if it names none.

    `folder`: of the model that trains. `opened`: frozen models by role, one of which is the teacher if its
    settings are the same. Raises ConfigError for a teacher that cannot be opened, or that has another
    tokenizer.
    """
    section = config.training.distillation
    if not section.teacher:
        yield None
        return
    role = config.roles[section.teacher]
    teacher = next((model for name, model in (opened or {}).items() if config.roles[name] == role), None)
    async with AsyncExitStack() as stack:
        if teacher is None:
            opening = open_frozen_role(
                section.teacher,
                role,
                backend,
                folder=folder,
                note=progress.note,
                timeout_s=config.interchange_server.call_timeout_s,
            )
            with progress.waiting(
                f"the teacher {section.teacher!r} ({role.base_url or role.model or 'the start'})"
            ):
                teacher = await stack.enter_async_context(opening)
        made = Distillation(teacher, section, waiting=progress.waiting)
        await asyncio.to_thread(made.check_tokenizer, folder)
        if teacher.max_context < backend.max_context:
            progress.note(
                f"the teacher {section.teacher!r} reads {teacher.max_context} tokens, and the model that "
                f"trains {backend.max_context}: a sequence that is too long for it ends the run"
            )
        yield made


# A sampler whose probabilities are not the trainer's


def correct(
    batch: Sequence[WeightedRollout], trainer: Sequence[FloatArray], config: RolloutCorrectionConfig
) -> tuple[list[WeightedRollout], dict[str, float]]:
    """The batch with the trainer's log probabilities (float32 [T] each) as reference and weighed advantages.

    With q the sampler's probability of a token, old the trainer's before the update, and p the policy's while
    it trains, the loss compares p with old, and each token is weighed by f(old / q), a constant: the first
    ratio is what the update changes, the second what differs without it. f cuts the weight off at a cap
    (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training") or leaves out
    what is above it (Liu et al. 2025, "When Speed Kills Stability").

    The metrics are over the tokens that carry loss: the mean weight, the share above the cap, and the largest
    ratio.
    """
    corrected: list[WeightedRollout] = []
    ratios: list[FloatArray] = []
    weights: list[FloatArray] = []
    for item, old in zip(batch, trainer, strict=True):
        ratio = _ratio(item.rollout, old, config.level)
        weight = np.minimum(ratio, config.cap)
        if config.method == "mask":
            weight = np.where(ratio > config.cap, np.float32(0), ratio)
        scaled = np.where(item.rollout.loss_mask, item.advantages * weight, np.float32(0))
        corrected.append(replace(item, advantages=scaled.astype(np.float32), reference=old))
        ratios.append(ratio[item.rollout.loss_mask])
        weights.append(weight[item.rollout.loss_mask])
    every = np.concatenate(ratios)
    return corrected, {
        "correction/weight": float(np.concatenate(weights).mean()),
        "correction/capped": float((every > config.cap).mean()),
        "correction/max_ratio": float(every.max()),
    }


def _ratio(rollout: Rollout, old: FloatArray, level: str) -> FloatArray:
    """float32 [T]: old / q of each token, or of the whole sequence; 1 where a token carries no loss."""
    gaps = np.where(rollout.loss_mask, old.astype(np.float64) - rollout.logprobs, 0.0)
    if level == "sequence":
        gaps = np.where(rollout.loss_mask, gaps.sum(), 0.0)
    # Beyond any cap that has a meaning; a larger one would not be a finite float32.
    return np.exp(np.minimum(gaps, 80.0)).astype(np.float32)

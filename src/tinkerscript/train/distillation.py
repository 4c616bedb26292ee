"""`Distillation`: a teacher's scores of what was sampled, as a part of the advantages or as a loss.

On-policy distillation: the policy samples, and each sampled token is charged its reverse KL divergence from
the teacher, log p(policy) - log p(teacher) (Agarwal et al. 2024, arXiv:2306.13649; Lu and Thinking Machines
2025, "On-Policy Distillation"). Invariant: nothing trains without the teacher's scores; a teacher that cannot
give them ends the step before any weight changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path

import numpy as np
import tinker

from tinkerscript.config import DistillationConfig, RunConfig
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.rollouts.advantages import WeightedRollout
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.convert.tinker_datum import to_distillation_datum
from tinkerscript.train.backends.backend import FrozenModel, TrainerBackend
from tinkerscript.train.frozen_model import open_frozen_role
from tinkerscript.train.kl_penalty import KLPenalty, divergence
from tinkerscript.train.tokenizer_check import check_same_tokenizer

__all__ = ["Distillation", "open_distillation"]

Waiting = Callable[[str], AbstractContextManager[object]]
"""Shows people what is waited for while the context is open."""


class Distillation:
    """The teacher of a run, and how the run learns from it."""

    def __init__(
        self, teacher: FrozenModel, config: DistillationConfig, *, waiting: Waiting = lambda _: nullcontext()
    ) -> None:
        self._teacher = teacher
        self._config = config
        self._waiting = waiting
        self._penalty = KLPenalty(
            self._score, coef=config.coef, discount=config.discount_factor, centered=False
        )
        self._scores: dict[int, FloatArray] = {}
        """With `mode: loss`: the teacher's log probabilities, by `id` of the step's rollouts."""

    @property
    def is_loss(self) -> bool:
        return self._config.mode == "loss"

    @property
    def reward_coef(self) -> float:
        """Weight of the task's own reward."""
        return self._config.reward_coef

    def check_tokenizer(self, folder: Path) -> None:
        """Raises ConfigError if the teacher has another tokenizer than the model that trains, in `folder`."""
        whose = f"training.distillation.teacher: {self._config.teacher!r}"
        check_same_tokenizer(folder, self._teacher.folder, whose=whose)

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """Have the teacher score a step. Returns the sequences, with `mode: reward` with new advantages, and
        the mean divergence in nats per token. Raises EngineError if the teacher cannot score them."""
        if not self.is_loss:
            return await self._penalty.apply(items)
        scores = await self._score([item.rollout.tokens for item in items])
        self._scores = {id(item.rollout): row for item, row in zip(items, scores, strict=True)}
        return list(items), divergence(items, scores)[1]

    def datum(self, item: WeightedRollout, count: int) -> tinker.Datum:
        """A sequence of the step for the loss `reverse_kl`, divided by `count`."""
        weight = self._config.coef / count
        return to_distillation_datum(item.rollout, self._scores[id(item.rollout)], weight)

    def pull(self, item: WeightedRollout) -> FloatArray:
        """float32 [T]: what the loss `reverse_kl` adds to each token as if it were an advantage."""
        if not self.is_loss:
            return np.zeros_like(item.advantages)
        (gap,), _ = divergence([item], [self._scores[id(item.rollout)]])
        return -self._config.coef * gap

    async def _score(self, sequences: list[IntArray]) -> list[FloatArray]:
        with self._waiting(f"the teacher {self._config.teacher!r} to score {len(sequences)} sequences"):
            return await self._teacher.logprobs(sequences)


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

    `folder`: of the model that trains. `opened`: role -> its model, which is the teacher's where the settings
    are the same. Raises ConfigError for a teacher that cannot be opened, or that has another tokenizer.
    """
    section = config.training.distillation
    if not section.teacher:
        yield None
        return
    role = config.roles[section.teacher]
    teacher = next((model for name, model in (opened or {}).items() if config.roles[name] == role), None)
    async with AsyncExitStack() as stack:
        if teacher is None:
            opening = open_frozen_role(section.teacher, role, backend, folder=folder, note=progress.note)
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

"""`steps_at_rates`: how far one step moves the policy at several learning rates.

Each step trains a run's first recorded groups, from its first weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tinkerscript.config import DistillationConfig, RunConfig
from tinkerscript.errors import ConfigError
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.model_folder import model_folder
from tinkerscript.rollouts.advantages import RolloutGroup
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.train.alignment_check import TrainedModel
from tinkerscript.train.backends import open_backend
from tinkerscript.train.backends.backend import TrainerBackend
from tinkerscript.train.defaults import rates_of, resolved
from tinkerscript.train.learner import Learner

SMALLEST = 1 / 32
"""The smallest rate to try, relative to the usual one."""

DOUBLINGS = 10
TOO_FAR = 0.1  # Nats per token, above which no larger rate is tried.


@dataclass(frozen=True, slots=True)
class RateStep:
    rate: float
    kl: float
    """KL(before, after) in nats per token, Schulman's k3."""

    update_ratio: float | None


async def steps_at_rates(
    config: RunConfig, run: Path, note: Callable[[str], None]
) -> AsyncGenerator[RateStep]:
    """Yield steps at rising rates."""
    model = model_folder(config.engine.model)
    config, _ = resolved(config, model)
    groups = _groups(config, run)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        opening = open_backend(
            config.engine, model, checkpoint_dir=folder, seed=config.seed, restore=None, note=note
        )
        backend = await stack.enter_async_context(opening)
        await backend.client.save_state("start")
        for doubling in range(DOUBLINGS + 1):
            await backend.restore("start")
            rate = rates_of(config, model).usual * SMALLEST * 2**doubling
            found = await _step(config, backend, model, groups, rate)
            yield found
            if found.kl > TOO_FAR:
                return


def _groups(config: RunConfig, run: Path) -> list[RolloutGroup]:
    def differing() -> Iterator[RolloutGroup]:
        for group in recorded_groups(run, trains_constrained=config.training.constrained_tokens == "train"):
            if group.rewards_differ:
                yield group

    groups = [group for _, group in zip(range(config.training.groups_per_step), differing(), strict=False)]
    if not groups:
        raise ConfigError(f"{run} has recorded no group of different rewards, so nothing would train")
    return groups


async def _step(
    config: RunConfig, backend: TrainerBackend, model: Path, groups: Sequence[RolloutGroup], rate: float
) -> RateStep:
    constant = {"learning_rate": rate, "lr_schedule": "constant", "warmup_steps": 0}
    # Only the recorded rewards and the loss count: other models and steps are not at hand.
    plain = {"distillation": DistillationConfig(), "advantage_baseline": "group_mean", "reward_weights": {}}
    training = config.training.model_copy(update={**constant, **plain})
    if training.advantage_scale == "running_deviation":
        training = training.model_copy(update={"advantage_scale": "batch_deviation"})
    learner = Learner(
        backend.client,
        training,
        TrainedModel.of(model, backend),
        AlignmentReport(),
        config.seed,
        start_logprobs=backend.start_logprobs,
    )
    learner.begin(groups)
    await learner.check(step=1)
    before = {id(each.rollout): each.trainer_logprobs for each in learner.compared}
    metrics = await learner.train(1)
    calls = (call for group in groups for episode in group.episodes for call in episode.calls)
    versions = {version for call in calls for version in call.policy_versions}
    learner.begin(groups)
    await learner.check(step=2, lag_of_version=dict.fromkeys(versions, 1))
    await learner.drop_gradients()
    gaps = np.concatenate(
        [
            (each.trainer_logprobs - before[id(each.rollout)])[each.rollout.loss_mask]
            for each in learner.compared
        ]
    ).astype(np.float64)
    kl = float((np.exp(gaps.clip(-20, 20)) - 1 - gaps).mean())
    return RateStep(rate, kl, metrics.get("train/update_ratio"))

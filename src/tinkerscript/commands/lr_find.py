"""`tinkerscript lr-find` measures how far one step moves the policy at each of several learning rates.

Every rate trains the same groups, the first that a run recorded, from the weights that the run began with.
Nothing is written into the run's folder.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tinkerscript.config import DistillationConfig, RunConfig, load_config
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

LIMIT = 0.01
"""Nats per token that a step should move at most: OpenAI Spinning Up's lower `target_kl` for PPO."""

SMALLEST = 1 / 32
"""Of the usual rate."""

DOUBLINGS = 10
TOO_FAR = 0.1  # No larger rate is tried.


@dataclass(frozen=True, slots=True)
class Found:
    rate: float
    kl: float
    """KL(before, after) in nats per token, Schulman's k3."""

    update_ratio: float | None
    """Norm of the change over the norm of the weights. None: the backend does not report it."""


async def lr_find_command(run: Path, overrides: list[str], console: Console) -> int:
    """Print a line for each rate, and the highest whose step stays within `LIMIT`. Raises ConfigError."""
    config = load_config(run / "config.yaml", overrides)
    model = model_folder(config.engine.model)
    config, _ = resolved(config, model)
    first = rates_of(config, model).usual * SMALLEST
    groups = _groups(config, run)
    table = Table("learning rate", "KL of a step", "update / weights")
    found: list[Found] = []
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        opening = open_backend(
            config.engine, model, checkpoint_dir=folder, seed=config.seed, restore=None, note=console.print
        )
        backend = await stack.enter_async_context(opening)
        await backend.client.save_state("start")
        for doubling in range(DOUBLINGS + 1):
            await backend.restore("start")
            found.append(await _step(config, backend, model, groups, first * 2**doubling))
            last = found[-1]
            ratio = "" if last.update_ratio is None else f"{last.update_ratio:.2g}"
            table.add_row(f"{last.rate:.2g}", f"{last.kl:.2g}", ratio)
            if last.kl > TOO_FAR:
                break
    console.print(table)
    console.print(_suggestion(found), highlight=False, soft_wrap=True)
    return 0


def _suggestion(found: Sequence[Found]) -> str:
    within = [each.rate for each in found if each.kl <= LIMIT]
    if not within:
        return f"every rate moves the policy by more than {LIMIT} nats a token; try {found[0].rate / 4:.2g}"
    return f"training.learning_rate: {max(within):.2g} is the highest with at most {LIMIT} nats a token"


def _groups(config: RunConfig, run: Path) -> list[RolloutGroup]:
    def differing() -> Iterator[RolloutGroup]:
        for group in recorded_groups(run, trains_constrained=config.training.constrained_tokens == "train"):
            if group.rewards_differ:
                yield group

    groups = [group for group, _ in zip(differing(), range(config.training.groups_per_step), strict=False)]
    if not groups:
        raise ConfigError(f"{run} has recorded no group of different rewards, so nothing would train")
    return groups


async def _step(
    config: RunConfig, backend: TrainerBackend, model: Path, groups: Sequence[RolloutGroup], rate: float
) -> Found:
    constant = {"learning_rate": rate, "lr_schedule": "constant", "warmup_steps": 0}
    # Only the recorded rewards and the loss count: other models and other steps' rewards are not at hand.
    plain = {"distillation": DistillationConfig(), "advantage_baseline": "group_mean", "reward_weights": {}}
    training = config.training.model_copy(update={**constant, **plain})
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
    before = {id(each.rollout): each for each in learner.compared}
    metrics = await learner.train(1)
    calls = (call for group in groups for episode in group.episodes for call in episode.calls)
    versions = {version for call in calls for version in call.policy_versions}
    learner.begin(groups)
    await learner.check(step=2, lag_of_version=dict.fromkeys(versions, 1))
    await learner.drop_gradients()
    gaps = np.concatenate(
        [
            (each.trainer_logprobs - before[id(each.rollout)].trainer_logprobs)[each.rollout.loss_mask]
            for each in learner.compared
        ]
    ).astype(np.float64)
    kl = float((np.exp(gaps.clip(-20, 20)) - 1 - gaps).mean())
    return Found(rate, kl, metrics.get("train/update_ratio"))

"""Learners as the trainer's tests make them, and clients and publishers without an engine behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker

from tinkerscript.config import TrainingConfig
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.sampler import Sampler
from tinkerscript.testing import ScriptedSampler
from tinkerscript.train.alignment_check import TrainedModel
from tinkerscript.train.backends.backend import Publisher
from tinkerscript.train.learner import Learner
from tinkerscript.train.token_advantages import Distillation, ReferenceLogprobs

LENIENT: dict[str, Any] = {"on_misalignment": "warn", "max_mean_dlogp": 100.0}
"""Settings with which log probabilities may be made up."""


def made_learner(
    client: Any,
    *,
    model: TrainedModel | None = None,
    role: str = "",
    start: ReferenceLogprobs | None = None,
    teacher: Distillation | None = None,
    reply_tokens: int = 0,
    **settings: Any,
) -> Learner:
    """`model`: by default one of 64 ids."""
    return Learner(
        client,
        TrainingConfig.model_validate({"steps": 10, "learning_rate": 0.01, **settings}),
        model=model or TrainedModel(64),
        report=AlignmentReport(),
        seed=1,
        role=role,
        start_logprobs=start,
        distillation=teacher,
        reply_tokens=reply_tokens,
    )


class NotingClient:
    """An engine's training client; notes what trains."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.calls: list[int] = []
        """Sequences of each forward_backward; 0 is an optimizer step."""

        self.losses: list[tuple[str, Any]] = []
        """`loss_fn` and `loss_fn_config` of each forward_backward."""

        self.trained: list[tinker.Datum] = []
        """Without those whose gradient was dropped."""

        self.params: list[tinker.AdamParams] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def forward_backward(self, data: list[tinker.Datum], loss_fn: Any, config: Any, **more: Any) -> Any:
        self.calls.append(len(data))
        self.losses.append((loss_fn, config))
        self.trained += data
        return self.client.forward_backward(data, loss_fn, config, **more)

    def drop_gradients(self) -> Any:
        self.trained.clear()
        return self.client.drop_gradients()

    def optim_step(self, params: tinker.AdamParams) -> Any:
        self.calls.append(0)
        self.params.append(params)
        return self.client.optim_step(params)


class ScriptedClient:
    """A training client without an engine: every log probability is `logprob`."""

    def __init__(self) -> None:
        self.logprob = -0.5
        self.metrics: dict[str, float] = {}
        """Of each optimizer step."""

        self.trained: list[tinker.Datum] = []
        self.steps = 0
        self.drops = 0

    async def forward(self, data: list[tinker.Datum], *_: Any, **__: Any) -> tinker.ForwardBackwardOutput:
        rows = [np.full(datum.model_input.length, self.logprob, np.float32) for datum in data]
        outputs = [{"logprobs": tinker.TensorData.from_numpy(row)} for row in rows]
        metrics = {"loss:sum": 1.0}
        return tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=outputs, metrics=metrics)

    async def forward_backward(self, data: list[tinker.Datum], *_: Any, **__: Any) -> Any:
        self.trained += data
        return await self.forward(data)

    async def drop_gradients(self) -> None:
        self.drops += 1

    async def optim_step(self, _: tinker.AdamParams) -> tinker.types.OptimStepResponse:
        self.steps += 1
        return tinker.types.OptimStepResponse(metrics=self.metrics)


class ScriptedPublisher(Publisher):
    """Publishes the same sampler again and again."""

    max_context = 64

    def __init__(self, sampler: Sampler | None = None, holds: int = 0) -> None:
        self.sampler = sampler or ScriptedSampler(lambda prompt: prompt)
        self.holds = holds
        self.published: list[int] = []

    async def publish(self, policy_version: int) -> Sampler:
        self.published.append(policy_version)
        return self.sampler

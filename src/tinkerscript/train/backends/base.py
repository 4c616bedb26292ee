"""The seam between the training loop and an engine: Tinker's client methods, as structural types.

The embedded engine's clients and those of the `tinker` SDK both fit. Futures are Tinker's `APIFuture`:
awaitable, and with `.result()` for synchronous callers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol

import tinker
from tinker import APIFuture


class SamplingClient(Protocol):
    """Samples from weights that never change."""

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> APIFuture[tinker.SampleResponse]: ...

    def compute_logprobs(self, prompt: tinker.ModelInput) -> APIFuture[list[float | None]]: ...


class TrainingClient(Protocol):
    """Trains one model. Calls take effect in the order in which they were made."""

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]: ...

    def optim_step(self, optim_params: tinker.AdamParams) -> Awaitable[tinker.types.OptimStepResponse]: ...

    def save_state(self, name: str) -> Awaitable[tinker.types.SaveWeightsResponse]: ...

    def save_weights_and_get_sampling_client(self) -> Awaitable[SamplingClient]: ...

"""The seam between a run and the engine that trains and samples its weights.

A run trains through Tinker's methods (`TrainingClient`), one `optimizer_step` at a time, and samples from
what `TrainerBackend.publish` returns. Invariant: a published sampler's weights never change.
"""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import tinker
from tinker.types import LossFnType

from tinkerscript.config import EngineConfig, TrainingConfig
from tinkerscript.engine.losses import SKIPPED_STEPS
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)

SKIPPED = f"train/{SKIPPED_STEPS}"
"""Metric of a training step: optimizer steps that were skipped because the gradient was not finite."""

__all__ = ["FrozenModel", "FrozenSampler", "Publisher", "TrainerBackend", "TrainingClient"]


class TrainingClient(Protocol):
    """Trains one model. Calls take effect in the order in which they are made."""

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


class Publisher(ABC):
    """Makes samplers of the weights that train."""

    max_context: int
    """Token limit of prompt and reply together."""

    seeds = True
    """Whether requests without a seed get one, to make runs repeatable."""

    holds = 0
    """How many versions besides the newest can be held (`Sampler.hold`)."""

    @abstractmethod
    async def publish(self, policy_version: int) -> Sampler:
        """Return a sampler over a frozen copy of the current weights, which reports `policy_version`.

        Raises EngineError if nothing can sample from them.
        """

    async def announce(self, policy_version: int) -> None:  # noqa: B027 (most have nothing to do)
        """Called once the ledger has the version, which may be sampled from now on."""

    def resting(self) -> AbstractAsyncContextManager[None]:
        """While this context is open, the weights train and nothing needs to be sampled."""
        return nullcontext()

    def ended(self, episode_uuid: str) -> None:  # noqa: B027 (most have nothing to do)
        """Called when an episode will make no more model calls."""

    async def failed(self) -> None:
        """Never returns. Raises EngineError if the engine breaks while idle."""
        await asyncio.Event().wait()


class TrainerBackend(Publisher):
    client: TrainingClient
    """Replaced by `start` and `restore`, so do not keep a reference."""

    vocabulary: int
    """Token ids are in [0, vocabulary)."""

    stop_ids: frozenset[int]

    scales_logits = False
    """Whether each token is trained and scored at its sampling temperature. `client` then also takes the
    inputs `temperatures` and `mask` (`engine.losses`)."""

    _start: FrozenModel | None = None

    @classmethod
    def check(cls, config: EngineConfig, model: Path, note: Callable[[str], None]) -> None:
        """Check everything that can be checked without a run folder. Raises ConfigError or EngineError."""

    @classmethod
    @abstractmethod
    def open(
        cls,
        config: EngineConfig,
        model: Path,
        *,
        checkpoint_dir: Path,
        seed: int,
        note: Callable[[str], None],
    ) -> AbstractAsyncContextManager[TrainerBackend]:
        """Open the backend for `config`. Leaving the context closes it.

        `model` is the folder of `engine.model`, and `note` gets messages for the user. Raises ConfigError if
        the config does not fit the backend, and EngineError if the backend is not available.
        """

    @abstractmethod
    async def start(self) -> None:
        """Begin a run with the weights of `engine.checkpoint`, or the model's own."""

    @abstractmethod
    async def restore(self, name: str) -> None:
        """Continue from the checkpoint that `client.save_state(name)` wrote, including the optimizer
        state."""

    @abstractmethod
    async def open_policy(
        self, role: str, checkpoint: str, *, checkpoint_dir: Path, restore: str | None
    ) -> TrainerBackend:
        """Open a second policy over the same model for `role`, with its own weights, optimizer and
        checkpoints.

        It begins with a run's `checkpoint` (empty: as this backend's run began), or continues from its own
        checkpoint named `restore`. This backend closes it. Raises ConfigError and EngineError.
        """

    async def check_loss(self, loss_fn: LossFnType, loss_config: Mapping[str, float] | None) -> None:
        """Raise EngineError if the backend cannot train with this loss. Called before the first episode."""

    @abstractmethod
    async def open_frozen(self, model: str) -> FrozenModel:
        """Open a model that does not train. Weights shared with the one that trains are held once.

        `model` is a folder, an id on the Hugging Face Hub, a run's checkpoint, or another name that the
        backend knows. Empty means the weights that the run began with, also after `restore`. Raises
        ConfigError for an unknown name, and EngineError for a model that cannot be used.
        """

    async def start_logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        """`FrozenModel.logprobs` under the weights that the run began with."""
        if self._start is None:
            self._start = await self.open_frozen("")
        return await self._start.logprobs(sequences, temperatures)


class FrozenModel(ABC):
    """A model with weights that never change. The backend that opened it closes it."""

    sampler: Sampler
    """Samples report the version `FOREIGN_POLICY`, so they do not train."""

    max_context: int
    """Token limit of prompt and reply together."""

    folder: Path
    """Contains the tokenizer and chat format."""

    scales_logits = False
    """Whether it can score at temperatures other than 1."""

    @abstractmethod
    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        """Each token's logprob at its temperature (None: 1).

        Takes int32 [T] and float32 [T] each, returns float32 [T] each. Position 0 has no context and is 0.
        Only models with `scales_logits` take temperatures other than 1. Raises EngineError.
        """


class FrozenSampler(Sampler):
    """Base of the backends' samplers: one policy version, and Tinker's sampling parameters."""

    def __init__(self, policy_version: int) -> None:
        self.policy_version = policy_version

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        params = tinker.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop=request.stop or [*request.stop_token_ids, *request.extra_stop_ids] or None,
        )
        return SampleResult(
            sequences=await self._sequences(request, params, progress),
            policy_version=self.policy_version,
            logprob_kind="raw" if request.temperature == 0 else "processed",
            seed=request.seed,
        )

    @abstractmethod
    async def _sequences(
        self, request: SampleRequest, params: tinker.SamplingParams, progress: ProgressCallback | None
    ) -> list[SampledSequence]:
        """Sample `request.num_samples` sequences. Raises as `Sampler.sample` does."""


def seed_of_role(seed: int, role: str) -> int:
    """The seed of a role's new adapter, in [0, 2^31), which differs from the run's own and other roles'."""
    return zlib.crc32(f"{seed}/{role}".encode()) >> 1


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of an optimizer step."""

    metrics: dict[str, float]
    """`train/loss`, a sum over tokens, and the engine's own metrics such as `train/grad_norm`."""

    logprobs: list[FloatArray]
    """float32 [T] per datum: the target tokens' logprobs before the step. Empty if the backend returns
    none."""


# Tinker's betas with torch's epsilon: with Tinker's 1e-12, rounding decides where a gradient is almost 0.
ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


async def optimizer_step(
    client: TrainingClient,
    datums: list[tinker.Datum],
    config: TrainingConfig,
    *,
    loss_fn: LossFnType,
    loss_config: Mapping[str, float] | None = None,
    learning_rate: float,
    computed: tinker.ForwardBackwardOutput | None = None,
) -> Stepped:
    """Take one AdamW step on the summed loss of `datums`. `computed`: their `forward_backward` output, if it
    already ran."""
    # Send both calls before awaiting either, because a service runs them in order.
    forward = None if computed else client.forward_backward(datums, loss_fn, loss_config)
    optim = client.optim_step(
        tinker.AdamParams(
            learning_rate=learning_rate,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
            **ADAM,
        )
    )
    output = computed if forward is None else await forward
    assert output is not None
    stepped = await optim
    own = {f"train/{name}": value for name, value in (stepped.metrics or {}).items()}
    rows = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs if "logprobs" in row]
    return Stepped({"train/loss": output.metrics["loss:sum"], **own}, rows)


def skipped_note(step: int, metrics: Mapping[str, float]) -> str:
    """A note about optimizer steps that were skipped; empty if none were."""
    number = int(metrics.get(SKIPPED, 0))
    if not number:
        return ""
    were = "step was" if number == 1 else "steps were"
    return f"step {step}: {number} optimizer {were} skipped, because the gradient was not finite"


STEP_GRACE_S = 2.0
"""How long a stopped run may take to finish and save its training step."""

ResultT = TypeVar("ResultT")


async def finish_despite_cancel(work: Coroutine[Any, Any, ResultT], *, within_s: float) -> ResultT:
    """Return the result of `work`. After a cancellation, `work` has `within_s` seconds before it is
    cancelled."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=within_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise

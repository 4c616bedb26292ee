"""The seam between a run and its engine."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import tinker
from tinker.types import LossFnType

from tinkerscript.config import EngineConfig, TrainingConfig
from tinkerscript.engine.losses import SKIPPED_STEPS
from tinkerscript.engine.routing import Routing
from tinkerscript.errors import EngineError
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)

if TYPE_CHECKING:
    from tinkerscript.engine.frozen import TopLogprobs  # Imports PEFT, which takes half a second.

SKIPPED = f"train/{SKIPPED_STEPS}"
"""Metric: optimizer steps skipped because the gradient was not finite."""

__all__ = ["FrozenModel", "FrozenSampler", "Publisher", "TrainerBackend", "TrainingClient"]


class TrainingClient(Protocol):
    """The Tinker methods that a run uses, which take effect in order."""

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
    max_context: int
    seeds = True
    holds = 0
    """How many older versions `Sampler.hold` can hold."""

    @abstractmethod
    async def publish(self, policy_version: int) -> Sampler:
        """A sampler over a frozen copy of the weights. Raises EngineError if nothing can sample them."""

    async def announce(self, policy_version: int) -> None:  # noqa: B027 (most have nothing to do)
        """The ledger has the version, so it may be sampled."""

    def resting(self) -> AbstractAsyncContextManager[None]:
        """The weights train in this context, and sampling may wait."""
        return nullcontext()

    def ended(self, episode_uuid: str) -> None:  # noqa: B027 (most have nothing to do)
        """The episode makes no more model calls."""

    async def failed(self) -> None:
        """Never returns. Raises EngineError if the engine breaks while idle."""
        await asyncio.Event().wait()


class TrainerBackend(Publisher):
    client: TrainingClient
    """`start` and `restore` replace it."""

    vocabulary: int
    stop_ids: frozenset[int]
    scales_logits = False
    """Whether tokens train and are scored at their sampling temperatures."""

    routing: Routing | None = None
    """How experts are chosen, if replayed."""

    _start: FrozenModel | None = None

    @classmethod
    def check(cls, config: EngineConfig, model: Path, note: Callable[[str], None]) -> None:
        """Raises ConfigError or EngineError before a run has a folder."""

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
        """Leaving the context closes the backend. `note` gets messages for the user.

        Raises ConfigError, and EngineError if the backend is not available.
        """

    @abstractmethod
    async def start(self) -> None:
        """Begin with the weights of `engine.checkpoint`, or the model's own."""

    @abstractmethod
    async def restore(self, name: str) -> None:
        """Continue from the checkpoint `name`, including the optimizer state."""

    @abstractmethod
    async def open_policy(
        self, role: str, checkpoint: str, *, checkpoint_dir: Path, restore: str | None
    ) -> TrainerBackend:
        """Open a second policy over the same model, with its own weights, optimizer and checkpoints.

        It begins with a run's `checkpoint` (empty: like this backend's run), or continues from `restore`.
        """

    async def check_loss(self, loss_fn: LossFnType, loss_config: Mapping[str, float] | None) -> None:
        """Raise EngineError if the backend cannot train with this loss."""

    @abstractmethod
    async def open_frozen(self, model: str) -> FrozenModel:
        """Open a model that does not train. Shared weights are held once.

        `model`: a folder, a Hugging Face id, a run's checkpoint, or a name that the backend knows; empty: the
        run's first weights. Raises ConfigError for an unknown name, EngineError for an unusable model.
        """

    async def start_logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        if self._start is None:
            self._start = await self.open_frozen("")
        return await self._start.logprobs(sequences, temperatures)

    async def renew_start(self, checkpoint: Path) -> None:
        self._start = None  # Both weights may not fit into memory.
        self._start = await self.open_frozen(str(checkpoint))


class FrozenModel(ABC):
    """A model that never changes. Its backend closes it."""

    sampler: Sampler
    """Samples have the version `FOREIGN_POLICY`."""

    max_context: int
    folder: Path
    scales_logits = False
    """Whether it scores at temperatures other than 1."""

    @abstractmethod
    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        """Return each token's logprob at its temperature (None: 1). Position 0 has no context and is 0.

        Takes int32 [T] and float32 [T] each, returns float32 [T] each. Raises EngineError.
        """

    async def top_logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray], top: int
    ) -> list[TopLogprobs]:
        """Like `logprobs`, also for the `top` most probable tokens at each position."""
        raise EngineError(f"the model in {self.folder} scores only given tokens (distillation.top_k: {top})")


class FrozenSampler(Sampler):
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
        """Raises as `Sampler.sample` does."""


def seed_of_role(seed: int, role: str) -> int:
    """Return the seed of a role's new adapter, in [0, 2^31)."""
    return zlib.crc32(f"{seed}/{role}".encode()) >> 1


@dataclass(frozen=True, slots=True)
class Stepped:
    metrics: dict[str, float]
    logprobs: list[FloatArray]
    """float32 [T] per datum: the targets' before the step. Empty if not returned."""


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
    """Take one AdamW step on the summed loss. `computed`: the datums' `forward_backward` output, if any."""
    # Send both calls before awaiting either: a service runs them in order.
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
    number = int(metrics.get(SKIPPED, 0))
    if not number:
        return ""
    were = "step was" if number == 1 else "steps were"
    return f"step {step}: {number} optimizer {were} skipped, because the gradient was not finite"


STEP_GRACE_S = 2.0

ResultT = TypeVar("ResultT")


async def finish_despite_cancel(work: Coroutine[Any, Any, ResultT], *, within_s: float) -> ResultT:
    """Await `work`. A cancellation takes effect only after `within_s`."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=within_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise

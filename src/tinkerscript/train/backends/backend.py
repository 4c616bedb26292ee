"""The seam between a run and what trains and samples its weights.

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
"""Metric of a training step: optimizer steps that were not taken, because the gradient was not finite."""

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
    """Prompt and response tokens together, at most."""

    seeds = True
    """Whether requests without a seed get one, so that a run can be repeated."""

    holds = 0
    """How many older versions than the newest may be held (`Sampler.hold`)."""

    @abstractmethod
    async def publish(self, policy_version: int) -> Sampler:
        """A sampler over a frozen copy of the current weights, which answers as `policy_version`.

        Raises EngineError if nothing can sample from them.
        """

    async def announce(self, policy_version: int) -> None:  # noqa: B027 (most have nothing to do)
        """What `publish` returned may be sampled from now: the ledger has the version."""

    def resting(self) -> AbstractAsyncContextManager[None]:
        """While the context is open nothing has to be sampled, since the weights train."""
        return nullcontext()

    def ended(self, episode_uuid: str) -> None:  # noqa: B027 (most have nothing to do)
        """An episode makes no more model calls."""

    async def failed(self) -> None:
        """Never returns; raises EngineError when it breaks while nothing is asked of it."""
        await asyncio.Event().wait()


class TrainerBackend(Publisher):
    """Trains and samples the weights of one run."""

    client: TrainingClient
    """Set anew by `start` and `restore`; do not keep an earlier one."""

    vocabulary: int
    """Token ids are in [0, vocabulary)."""

    stop_ids: frozenset[int]
    """Ids that end a text."""

    scales_logits = False
    """Whether it trains and scores each token at the temperature that it was sampled at: `client` then takes
    the inputs `temperatures` and `mask` (`engine.losses`) beside those of a loss."""

    _start: FrozenModel | None = None

    @classmethod
    def check(cls, config: EngineConfig, model: Path, note: Callable[[str], None]) -> None:
        """Raises ConfigError or EngineError for what can be known before a run has a folder."""

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
        """The backend for `config`; leaving the context closes it.

        `model`: the folder of `engine.model`; `note` gets messages for the user.

        Raises ConfigError if the config does not fit the backend, EngineError if the backend is not
        available.
        """

    @abstractmethod
    async def start(self) -> None:
        """Begin a run with the weights of `engine.checkpoint`, or with the model's own."""

    @abstractmethod
    async def restore(self, name: str) -> None:
        """Continue from the checkpoint that `client.save_state(name)` wrote, optimizer state included."""

    @abstractmethod
    async def open_policy(
        self, role: str, checkpoint: str, *, checkpoint_dir: Path, restore: str | None
    ) -> TrainerBackend:
        """A second policy over the same model, with weights, an optimizer and a folder of checkpoints of its
        own, for the role `role`. This backend closes it.

        It begins with the checkpoint `checkpoint` of a run (empty: as this backend's run began), or continues
        from its own one named `restore`. Raises ConfigError and EngineError.
        """

    async def check_loss(self, loss_fn: LossFnType, loss_config: Mapping[str, float] | None) -> None:
        """Raise EngineError if the backend cannot train with this loss. Called before the first episode."""

    @abstractmethod
    async def open_frozen(self, model: str) -> FrozenModel:
        """A model beside the one that trains. What it has in common with that one is held once.

        `model`: a folder, an id of the Hugging Face Hub or a checkpoint of a run, or what else the backend
        has names for; empty: the weights that the run began with, also after `restore`. Raises ConfigError
        for a name of nothing, EngineError for a model that cannot be used.
        """

    async def start_logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        """`FrozenModel.logprobs` of the weights that the run began with."""
        if self._start is None:
            self._start = await self.open_frozen("")
        return await self._start.logprobs(sequences, temperatures)


class FrozenModel(ABC):
    """A model whose weights never change. The backend that opened it closes it."""

    sampler: Sampler
    """Its samples have `FOREIGN_POLICY` as their version: they do not train."""

    max_context: int
    """Prompt and response tokens together, at most."""

    folder: Path
    """Has its tokenizer and its chat format."""

    scales_logits = False
    """Whether it scores at other temperatures than 1."""

    @abstractmethod
    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        """Each token's log probability at its temperature; None: at 1.

        int32 [T] and float32 [T] each in, float32 [T] each out; position 0 has no context and is 0. Only what
        `scales_logits` takes temperatures other than 1. Raises EngineError.
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
        """`request.num_samples` sequences; raises as `Sampler.sample` does."""


def seed_of_role(seed: int, role: str) -> int:
    """The seed of a role's new adapter, in [0, 2^31): each role has another one than the policy."""
    return zlib.crc32(f"{seed}/{role}".encode()) >> 1


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an optimizer step answered."""

    metrics: dict[str, float]
    """`train/loss`, the sum, and the engine's own metrics of the step, such as `train/grad_norm`."""

    logprobs: list[FloatArray]
    """float32 [T] for each datum: of its target tokens, before the step. Empty if the backend gives none."""


ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
"""Tinker's betas, and torch's epsilon: Tinker's 1e-12 lets rounding decide where a gradient is almost 0."""


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
    """One AdamW step on the summed loss of `datums`. `computed`: what `forward_backward` of them has answered
    already."""
    # Send both before awaiting either: a service executes the calls in order.
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
    """What to tell of optimizer steps that were not taken; empty: all were."""
    number = int(metrics.get(SKIPPED, 0))
    if not number:
        return ""
    were = "step was" if number == 1 else "steps were"
    return f"step {step}: {number} optimizer {were} skipped, because the gradient was not finite"


STEP_GRACE_S = 2.0
"""Seconds in which the training step of a run that is stopped may end and be saved."""

ResultT = TypeVar("ResultT")


async def finish_despite_cancel(work: Coroutine[Any, Any, ResultT], *, within_s: float) -> ResultT:
    """The result of `work`. A cancellation waits for its end, and after `within_s` seconds cancels it."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task], timeout=within_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise

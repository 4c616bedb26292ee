"""`EmbeddedBackend`: the engine in the trainer's process. Checkpoints are Hugging Face folders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import tinker

from tinkerscript.config import EngineConfig, LoraConfig
from tinkerscript.engine.context import check_device
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.grammars import GrammarError
from tinkerscript.engine.running_batch import Alternatives, SampledRow
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient
from tinkerscript.engine.training import EmbeddedTrainingClient
from tinkerscript.engine.weights import LoraSettings
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_template import templates_with_defaults
from tinkerscript.model_folder import base_of_adapter, model_folder
from tinkerscript.remote_folder import local_checkpoint
from tinkerscript.rollouts.call import (
    FOREIGN_POLICY,
    FloatArray,
    IntArray,
    pack_ids,
    pack_logprobs,
    unpack_ids,
)
from tinkerscript.sampler import (
    Constraint,
    Progress,
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    refuse_unsupported,
)
from tinkerscript.train.backends.backend import (
    FrozenModel,
    FrozenSampler,
    TrainerBackend,
    seed_of_role,
)
from tinkerscript.train.tokenizer_check import check_loads_the_same

if TYPE_CHECKING:
    from tinkerscript.engine.frozen import (  # Imports PEFT, which takes half a second.
        FrozenWeights,
        TopLogprobs,
    )


HELD_BYTES = 2**30


class EmbeddedBackend(TrainerBackend):
    scales_logits = True

    def __init__(
        self,
        engine: EmbeddedEngine,
        start: str | Path = "",
        *,
        client: EmbeddedTrainingClient | None = None,
        checkpoint_dir: Path | None = None,
    ) -> None:
        self.engine = engine
        self._start_folder = Path(start).expanduser() if start else None
        self._checkpoint_dir = checkpoint_dir or engine.checkpoint_dir
        self._client: EmbeddedTrainingClient = client or engine.create_training_client()
        self.client = self._client
        self.max_context = engine.max_context
        self.vocabulary = engine.vocabulary
        self.stop_ids = engine.context.eos_ids
        self.routing = engine.routing
        self.holds = max(int(engine.is_lora), HELD_BYTES // engine.version_bytes)

    @classmethod
    def check(cls, config: EngineConfig, model: Path, note: Callable[[str], None]) -> None:
        check_device(config.device)
        check_loads_the_same(model, note)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: EngineConfig,
        model: Path,
        *,
        checkpoint_dir: Path,
        seed: int,
        note: Callable[[str], None],
    ) -> AsyncGenerator[EmbeddedBackend]:
        if base := base_of_adapter(model):
            raise ConfigError(
                f"engine.model: {config.model!r} holds a LoRA adapter; name its base, {base}, as the model, "
                "the adapter as engine.checkpoint, and its rank as engine.lora.rank"
            )
        with EmbeddedEngine(
            model_folder(config.model, weights=True, note=note),
            checkpoint_dir=checkpoint_dir,
            seed=seed,
            threads=config.threads or 1,
            max_batch=config.max_batch,
            cache_tokens=config.cache_tokens,
            device=config.device,
            dtype=config.dtype,
            notes=templates_with_defaults(model, config.chat_template_kwargs),
            lora=_lora(config.lora, seed),
            quantization=config.quantization,
            activation_checkpointing=config.activation_checkpointing,
            devices=config.devices,
            sharding=config.sharding,
            routing_replay=config.routing_replay,
            log_dir=checkpoint_dir.parent / "logs",
        ) as engine:
            for warning in engine.warnings:
                note(warning)
            yield cls(engine, local_checkpoint(config.checkpoint, note=note))

    async def failed(self) -> None:
        if self.engine.ranks is None:
            await super().failed()
        else:
            await asyncio.shield(asyncio.wrap_future(self.engine.ranks.failure))

    async def start(self) -> None:
        if self._start_folder is not None:
            await self._client.load_state(self._start_folder)

    async def restore(self, name: str) -> None:
        await self._client.load_state_with_optimizer(self._checkpoint_dir / name)

    async def open_policy(
        self, role: str, checkpoint: str, *, checkpoint_dir: Path, restore: str | None
    ) -> EmbeddedBackend:
        start = (await asyncio.to_thread(local_checkpoint, checkpoint)) or self._start_folder or ""
        lora = self.engine.lora
        lora = lora and replace(lora, seed=seed_of_role(lora.seed, role))
        client = await self.engine.train_copy(lora=lora, checkpoint_dir=checkpoint_dir)
        policy = EmbeddedBackend(self.engine, start, client=client, checkpoint_dir=checkpoint_dir)
        await (policy.start() if restore is None else policy.restore(restore))
        return policy

    async def publish(self, policy_version: int) -> Sampler:
        return EmbeddedSampler(await self._client.save_weights_and_get_sampling_client(), policy_version)

    async def open_frozen(self, model: str) -> FrozenModel:
        if model:
            folder = await asyncio.to_thread(model_folder, model, weights=True)
            base = await asyncio.to_thread(base_of_adapter, folder)
        else:
            folder = self._start_folder or self.engine.folder
            # A frozen adapter can share the base that LoRA keeps.
            base = self.engine.folder if self.engine.is_lora else None
        adapter = folder if base is not None and folder != base else None
        weights = await asyncio.to_thread(self.engine.open_frozen, base or folder, adapter)
        return EmbeddedFrozenModel(weights, folder)


def _lora(config: LoraConfig, seed: int) -> LoraSettings | None:
    if not config.rank:
        return None
    return LoraSettings(config.rank, config.alpha, tuple(config.targets), seed)


class EmbeddedFrozenModel(FrozenModel):
    scales_logits = True

    def __init__(self, weights: FrozenWeights, folder: Path) -> None:
        self._weights = weights
        self.folder = folder
        self.max_context = weights.context.max_context
        self.sampler = EmbeddedSampler(weights.sampling)

    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        return await asyncio.wrap_future(self._weights.logprobs(sequences, temperatures))

    async def top_logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray], top: int
    ) -> list[TopLogprobs]:
        return await asyncio.wrap_future(self._weights.top_logprobs(sequences, temperatures, top))


class EmbeddedSampler(FrozenSampler):
    def __init__(self, client: EmbeddedSamplingClient, policy_version: int = FOREIGN_POLICY) -> None:
        super().__init__(policy_version)
        self._client = client

    async def _sequences(
        self, request: SampleRequest, params: tinker.SamplingParams, progress: ProgressCallback | None
    ) -> list[SampledSequence]:
        if request.repetition_penalty != 1:
            refuse_unsupported(
                request,
                "the embedded engine",
                constraints=True,
                top_logprobs=True,
                min_p=True,
                images=True,
            )
        relay = ProgressRelay(progress, asyncio.get_running_loop()) if progress is not None else None
        if request.constraint is not None:
            await self._compile(request.constraint)
        rows = self._client.sample_rows(
            unpack_ids(request.prompt).tolist(),
            request.num_samples,
            params,
            stop_ids=[*request.stop_token_ids, *request.extra_stop_ids],
            min_p=request.min_p,
            sampled=request.sampled,
            known=request.known,
            report=relay.report if relay else None,
            top_logprobs=request.top_logprobs,
            grammar=request.constraint.grammar if request.constraint else None,
            images=request.images,
        )
        try:
            sequences = [_packed(row) for row in await asyncio.wrap_future(rows)]
        except GrammarError as error:
            assert request.constraint is not None
            raise _unusable(request.constraint, error) from error
        if self.policy_version == FOREIGN_POLICY:  # It never trains.
            return [msgspec.structs.replace(each, experts=b"") for each in sequences]
        return sequences

    def cut(self) -> None:
        self._client.cut()

    def hold(self) -> AbstractContextManager[Sampler]:
        return nullcontext(EmbeddedSampler(self._client.apart(), self.policy_version))

    async def _compile(self, constraint: Constraint) -> None:
        """Compiling can take a second, and releases the GIL."""
        try:
            await asyncio.to_thread(self._client.compile_grammar, constraint.grammar)
        except GrammarError as error:
            raise _unusable(constraint, error) from error


def _unusable(constraint: Constraint, error: GrammarError) -> GatewayError:
    message = f"{constraint.asked_by} is not supported by this engine: {error}"
    return GatewayError(400, "unsupported_parameter", message, param=constraint.asked_by)


@dataclass(slots=True)
class _Undelivered:
    offset: int
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[Alternatives] = field(default_factory=list[Alternatives])


class ProgressRelay:
    def __init__(self, callback: ProgressCallback, loop: asyncio.AbstractEventLoop) -> None:
        self._callback = callback
        self._loop = loop
        self._lock = threading.Lock()
        self._undelivered: dict[int, _Undelivered] = {}

    def report(self, index: int, offset: int, token: int, logprob: float, top: Alternatives) -> None:
        with self._lock:
            is_first = not self._undelivered
            tokens = self._undelivered.setdefault(index, _Undelivered(offset))
            tokens.ids.append(token)
            tokens.logprobs.append(logprob)
            tokens.top.append(top)
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return

    def _deliver(self) -> None:
        with self._lock:
            delivered, self._undelivered = self._undelivered, {}
        for index, tokens in delivered.items():
            top_ids, top_logprobs = _packed_top(tokens.top)
            self._callback(
                Progress(
                    index=index,
                    offset=tokens.offset,
                    sampled=pack_ids(tokens.ids),
                    logprobs=pack_logprobs(tokens.logprobs),
                    top_ids=top_ids,
                    top_logprobs=top_logprobs,
                )
            )


def _packed(row: SampledRow) -> SampledSequence:
    top_ids, top_logprobs = _packed_top(row.top)
    return SampledSequence(
        sampled=pack_ids(row.ids),
        logprobs=pack_logprobs(row.logprobs),
        stop_reason="stop" if row.stop_reason == "stop" else "length",
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        constrained=row.constrained,
        experts=row.experts,
        is_cut=row.stop_reason == "cut",
    )


def _packed_top(top: Sequence[Alternatives]) -> tuple[bytes, bytes]:
    pairs = [pair for alternatives in top for pair in alternatives]
    return pack_ids([token for token, _ in pairs]), pack_logprobs([logprob for _, logprob in pairs])

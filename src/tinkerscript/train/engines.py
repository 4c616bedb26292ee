"""`Engine`: what trains and samples a run, in this process or behind Tinker's protocol.

The loop sees Tinker's training client, checkpoints by name, and two limits. What differs is here: where
weights are, what a checkpoint's folder holds, who waits for an outage.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import tinker

from tinkerscript.config import EngineConfig
from tinkerscript.dashboard.watcher import ProgressReporter
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.training_client import EmbeddedTrainingClient
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.model_folder import context_of, model_folder, stop_ids_of, vocabulary_of
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.train.backends.base import SamplingClient, TrainingClient
from tinkerscript.train.patience import PatientClient, SlowCallNotifier

TINKER_PATH = "tinker://"
KEY_VARIABLE = "TINKER_API_KEY"
POINTER = "tinker.json"
"""In a checkpoint's folder of a run whose weights are at a service: where they are."""


class Engine(ABC):
    """Samples and trains the weights of one run."""

    client: TrainingClient
    max_context: int
    """Tokens of prompt and response together, at most."""

    vocabulary: int
    stop_ids: frozenset[int]
    """Ids that end a text."""

    @abstractmethod
    async def start(self) -> None:
        """Begin a run: with the weights of `engine.checkpoint`, or with the model's own."""

    @abstractmethod
    async def restore(self, name: str) -> None:
        """Go on from a checkpoint; what `client` was before must not be used any more."""

    @abstractmethod
    async def start_logprobs(self, sequences: list[IntArray]) -> list[FloatArray]:
        """Under the weights that the run began with, also after `restore`.

        int32 [T] each in, float32 [T] each out; position 0, which has nothing before it, is 0.
        """


class EmbeddedBackend(Engine):
    """The engine in this process; a checkpoint is a Hugging Face folder."""

    def __init__(self, engine: EmbeddedEngine, start: str) -> None:
        """`start`: folder of a checkpoint to begin with; empty: the model's own weights."""
        self._engine = engine
        self._start_folder = Path(start).expanduser() if start else None
        self._start_copy: EmbeddedTrainingClient | None = None
        self._client: EmbeddedTrainingClient = engine.create_training_client()
        self.client = self._client
        self.max_context = engine.max_context
        self.vocabulary = engine.vocabulary
        self.stop_ids = engine.host.eos_ids

    async def start(self) -> None:
        """Take the weights to begin with; the optimizer starts anew."""
        if self._start_folder is not None:
            await self._client.load_state(self._start_folder)

    async def restore(self, name: str) -> None:
        await self._client.load_state_with_optimizer(self._engine.checkpoint_dir / name)

    async def start_logprobs(self, sequences: list[IntArray]) -> list[FloatArray]:
        if self._start_copy is None:
            self._start_copy = await self._engine.train_copy(self._start_folder)
        output = await self._start_copy.forward([_whole(ids) for ids in sequences], "cross_entropy")
        rows = [row["logprobs"].to_numpy() for row in output.loss_fn_outputs]
        return [np.concatenate([[0.0], row]).astype(np.float32) for row in rows]


class TinkerBackend(Engine):
    """A service that speaks Tinker's protocol; a checkpoint's folder holds the path of the weights there."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        config: EngineConfig,
        *,
        model: str,
        max_context: int,
        checkpoint_dir: Path,
        seed: int,
        patience: SlowCallNotifier,
    ) -> None:
        self._service = service
        self._config = config
        self._model = model
        self._checkpoint_dir = checkpoint_dir
        self._seed = seed
        self._patience = patience
        self._start_sampler: SamplingClient | None = None
        self.max_context = max_context
        self.vocabulary = vocabulary_of(model_folder(config.model))
        self.stop_ids = stop_ids_of(model_folder(config.model))

    async def start(self) -> None:
        """Make the run at the service, from the checkpoint to begin with if there is one."""
        if self._config.checkpoint:
            self._use(await self._from_checkpoint())
            return
        future = self._service.create_lora_training_client(
            self._model, rank=self._config.lora_rank, seed=self._seed
        )
        self._use(await self._patience.wait(future, "create_lora_training_client"))

    async def _from_checkpoint(self) -> tinker.TrainingClient:
        """A run of its own, with the weights of `engine.checkpoint` and a new optimizer."""
        path = self._config.checkpoint
        if not path.startswith(TINKER_PATH):
            path = _pointed_to(Path(path))
        future = self._service.create_training_client_from_state(path)
        return await self._patience.wait(future, "create_training_client_from_state")

    async def start_logprobs(self, sequences: list[IntArray]) -> list[FloatArray]:
        if self._start_sampler is None:
            self._start_sampler = await self._sampler_of_start()
        prompts = [tinker.ModelInput.from_ints(ids.tolist()) for ids in sequences]
        futures = [self._start_sampler.compute_logprobs(prompt) for prompt in prompts]
        rows = await self._patience.wait(asyncio.gather(*futures), "compute_logprobs")
        return [np.array([0.0, *row[1:]], dtype=np.float32) for row in rows]

    async def _sampler_of_start(self) -> SamplingClient:
        if self._config.checkpoint:
            # A sampler is made of a run's weights, so a run is made for it.
            client = await self._from_checkpoint()
            future = client.save_weights_and_get_sampling_client()
            return await self._patience.wait(future, "save_weights_and_get_sampling_client")
        future = self._service.create_sampling_client(base_model=self._model)
        return await self._patience.wait(future, "create_sampling_client")

    def _use(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self.client = PatientClient(client, self._patience, self._save)

    async def _save(self, name: str) -> tinker.types.SaveWeightsResponse:
        saved = await self._patience.wait(self._client.save_state(name, overwrite=True), "save_state")
        pointer = {"path": saved.path, "base_url": self._config.base_url, "model": self._model}
        _write_folder(self._checkpoint_dir / name, POINTER, json.dumps(pointer, indent=2) + "\n")
        return saved

    async def restore(self, name: str) -> None:
        path = _pointed_to(self._checkpoint_dir / name)
        future = self._service.create_training_client_from_state_with_optimizer(path)
        self._use(await self._patience.wait(future, "create_training_client_from_state_with_optimizer"))


@asynccontextmanager
async def opened_engine(
    config: EngineConfig, *, checkpoint_dir: Path, seed: int, restore: str | None, watcher: ProgressReporter
) -> AsyncGenerator[Engine]:
    """The engine that `config` names, with the weights of the checkpoint `restore` if given.

    Raises ConfigError for a service that cannot be used.
    """
    opening = _embedded(config, checkpoint_dir, seed)
    if config.backend == "tinker":
        opening = _tinker(config, checkpoint_dir, seed, watcher)
    async with opening as engine:
        if restore is not None:
            await engine.restore(restore)
        else:
            await engine.start()
        yield engine


@asynccontextmanager
async def _embedded(config: EngineConfig, checkpoint_dir: Path, seed: int) -> AsyncGenerator[Engine]:
    with EmbeddedEngine(
        model_folder(config.model),
        checkpoint_dir=checkpoint_dir,
        seed=seed,
        threads=config.threads,
        max_batch=config.max_batch,
        device=config.device,
        dtype=config.dtype,
    ) as engine:
        yield EmbeddedBackend(engine, config.checkpoint)


@asynccontextmanager
async def _tinker(
    config: EngineConfig, checkpoint_dir: Path, seed: int, watcher: ProgressReporter
) -> AsyncGenerator[Engine]:
    if not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"engine.backend: tinker needs the environment variable {KEY_VARIABLE}; for a server of "
            "`tinkerscript engine --port` any value that begins with tml- will do"
        )
    patience = SlowCallNotifier(config.base_url or "the Tinker service", watcher.note)
    service = await patience.wait(asyncio.to_thread(_connect, config.base_url), "connect")
    try:
        model, max_context = await _limits(service, config, patience)
        yield TinkerBackend(
            service,
            config,
            model=model,
            max_context=max_context,
            checkpoint_dir=checkpoint_dir,
            seed=seed,
            patience=patience,
        )
    finally:
        await service.close("interrupted", detail="the trainer ended")


def _whole(ids: IntArray) -> tinker.Datum:
    """For the log probability of every token after the first."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(ids[1:].astype(np.int64)),
            "weights": tinker.TensorData.from_numpy(np.ones(len(ids) - 1, np.float32)),
        },
    )


def _pointed_to(folder: Path) -> str:
    """The tinker:// path of a checkpoint's folder. Raises ConfigError for one of another backend."""
    file = folder.expanduser() / POINTER
    if not file.is_file():
        raise ConfigError(
            f"engine.backend: {folder} is no checkpoint of a service ({POINTER} is not there); use the "
            "backend that it was made with"
        )
    return json.loads(file.read_text(encoding="utf-8"))["path"]


def _connect(base_url: str) -> tinker.ServiceClient:
    try:
        return tinker.ServiceClient(base_url=base_url or None)
    except tinker.TinkerError as error:
        raise EngineError(f"engine.base_url: {base_url or 'the Tinker service'}: {error}") from error


async def _limits(
    service: tinker.ServiceClient, config: EngineConfig, patience: SlowCallNotifier
) -> tuple[str, int]:
    """The model's name at the service and its context length. Raises ConfigError if it cannot be trained."""
    rest = await asyncio.to_thread(tinker.RestClient, base_url=config.base_url or None)
    capabilities = await patience.wait(rest.get_server_capabilities(), "get_server_capabilities")
    models = {model.model_name: model for model in capabilities.supported_models if model.model_name}
    name = config.service_model or (next(iter(models)) if len(models) == 1 else "")
    if name not in models:
        raise ConfigError(
            f"engine.service_model: {config.service_model!r} is not one of {', '.join(sorted(models))}"
        )
    if models[name].trainable is False:
        raise ConfigError(f"engine.service_model: the service does not train {name!r}")
    own = context_of(model_folder(config.model))
    return name, min(own, models[name].max_context_length or own)


def _write_folder(folder: Path, name: str, text: str) -> None:
    """Make a folder with one file, whole or not at all."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    (staging / name).write_text(text, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)

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
from typing import Any

import tinker

from tinkerscript.config import EngineConfig, model_folder
from tinkerscript.dashboard.watcher import Watcher
from tinkerscript.engine.clients import TrainingClient
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.engine.training_client import EmbeddedTrainingClient
from tinkerscript.errors import ConfigError, EngineError
from tinkerscript.train.patience import Patience, PatientClient

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
    async def restore(self, name: str) -> None:
        """Go on from a checkpoint; what `client` was before must not be used any more."""


class EmbeddedBackend(Engine):
    """The engine in this process; a checkpoint is a Hugging Face folder."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine
        self._client: EmbeddedTrainingClient = engine.create_training_client()
        self.client = self._client
        self.max_context = engine.max_context
        self.vocabulary = engine.vocabulary
        self.stop_ids = engine.host.eos_ids

    async def restore(self, name: str) -> None:
        await self._client.load_state_with_optimizer(self._engine.checkpoint_dir / name)


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
        patience: Patience,
    ) -> None:
        self._service = service
        self._config = config
        self._model = model
        self._checkpoint_dir = checkpoint_dir
        self._seed = seed
        self._patience = patience
        self.max_context = max_context
        self.vocabulary = _vocabulary(model_folder(config.model))
        self.stop_ids = _stop_ids(model_folder(config.model))

    async def start(self) -> None:
        """Make the run at the service."""
        future = self._service.create_lora_training_client(
            self._model, rank=self._config.lora_rank, seed=self._seed
        )
        self._use(await self._patience.wait(future, "create_lora_training_client"))

    def _use(self, client: tinker.TrainingClient) -> None:
        self._client = client
        self.client = PatientClient(client, self._patience, self._save)

    async def _save(self, name: str) -> tinker.types.SaveWeightsResponse:
        saved = await self._patience.wait(self._client.save_state(name, overwrite=True), "save_state")
        pointer = {"path": saved.path, "base_url": self._config.base_url, "model": self._model}
        _write_folder(self._checkpoint_dir / name, POINTER, json.dumps(pointer, indent=2) + "\n")
        return saved

    async def restore(self, name: str) -> None:
        file = self._checkpoint_dir / name / POINTER
        if not file.is_file():
            raise ConfigError(
                f"engine.backend: {file.parent} is no checkpoint of a service; go on with the backend that "
                "the run began with"
            )
        path: str = json.loads(file.read_text(encoding="utf-8"))["path"]
        future = self._service.create_training_client_from_state_with_optimizer(path)
        self._use(await self._patience.wait(future, "create_training_client_from_state_with_optimizer"))


@asynccontextmanager
async def opened_engine(
    config: EngineConfig, *, checkpoint_dir: Path, seed: int, restore: str | None, watcher: Watcher
) -> AsyncGenerator[Engine]:
    """The engine that `config` names, with the weights of the checkpoint `restore` if given.

    Raises ConfigError for a service that cannot be used.
    """
    opening = _embedded(config, checkpoint_dir, seed)
    if config.backend == "tinker":
        opening = _tinker(config, checkpoint_dir, seed, watcher, start=restore is None)
    async with opening as engine:
        if restore is not None:
            await engine.restore(restore)
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
        yield EmbeddedBackend(engine)


@asynccontextmanager
async def _tinker(
    config: EngineConfig, checkpoint_dir: Path, seed: int, watcher: Watcher, *, start: bool
) -> AsyncGenerator[Engine]:
    if not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"engine.backend: tinker needs the environment variable {KEY_VARIABLE}; for a server of "
            "`tinkerscript engine --port` any value that begins with tml- will do"
        )
    patience = Patience(config.base_url or "the Tinker service", watcher.note)
    service = await patience.wait(asyncio.to_thread(_connect, config.base_url), "connect")
    try:
        model, max_context = await _limits(service, config, patience)
        backend = TinkerBackend(
            service,
            config,
            model=model,
            max_context=max_context,
            checkpoint_dir=checkpoint_dir,
            seed=seed,
            patience=patience,
        )
        if start:
            await backend.start()
        yield backend
    finally:
        await service.close("interrupted", detail="the trainer ended")


def _connect(base_url: str) -> tinker.ServiceClient:
    try:
        return tinker.ServiceClient(base_url=base_url or None)
    except tinker.TinkerError as error:
        raise EngineError(f"engine.base_url: {base_url or 'the Tinker service'}: {error}") from error


async def _limits(service: tinker.ServiceClient, config: EngineConfig, patience: Patience) -> tuple[str, int]:
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
    own = _max_context(model_folder(config.model))
    return name, min(own, models[name].max_context_length or own)


def _config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config") or config


def _vocabulary(folder: Path) -> int:
    return int(_config_of(folder)["vocab_size"])


def _stop_ids(folder: Path) -> frozenset[int]:
    generation = folder / "generation_config.json"
    config: dict[str, Any] = json.loads(generation.read_text(encoding="utf-8")) if generation.exists() else {}
    ids: int | list[int] = config.get("eos_token_id") or _config_of(folder).get("eos_token_id") or []
    return frozenset([ids] if isinstance(ids, int) else ids)


def _max_context(folder: Path) -> int:
    return int(_config_of(folder)["max_position_embeddings"])


def _write_folder(folder: Path, name: str, text: str) -> None:
    """Make a folder with one file, whole or not at all."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    (staging / name).write_text(text, encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    staging.rename(folder)

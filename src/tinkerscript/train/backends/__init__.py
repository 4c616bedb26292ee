"""The engines that train and sample a run: a module and an entry of `BACKENDS` each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tinkerscript.config import EngineConfig
from tinkerscript.errors import ConfigError
from tinkerscript.train.backends.backend import TrainerBackend

__all__ = ["BACKENDS", "backend_named", "open_backend", "waited_for"]


def _embedded() -> type[TrainerBackend]:
    from tinkerscript.train.backends.embedded_engine import EmbeddedBackend

    return EmbeddedBackend


def _tinker() -> type[TrainerBackend]:
    from tinkerscript.train.backends.tinker_service import TinkerBackend

    return TinkerBackend


BACKENDS: dict[str, Callable[[], type[TrainerBackend]]] = {"embedded": _embedded, "tinker": _tinker}


def backend_named(name: str) -> type[TrainerBackend]:
    if name not in BACKENDS:
        raise ConfigError(f"engine.backend: {name!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[name]()


def waited_for(config: EngineConfig) -> str:
    if config.backend == "tinker":
        return f"the Tinker service ({config.base_url or 'TINKER_BASE_URL, or the hosted one'})"
    on_devices = f" on {config.devices} devices" if config.devices > 1 else ""
    return f"the engine to load {config.checkpoint or config.model}{on_devices}"


@asynccontextmanager
async def open_backend(
    config: EngineConfig,
    model: Path,
    *,
    checkpoint_dir: Path,
    seed: int,
    restore: str | None,
    note: Callable[[str], None],
) -> AsyncGenerator[TrainerBackend]:
    backend_class = backend_named(config.backend)
    opening = backend_class.open(config, model, checkpoint_dir=checkpoint_dir, seed=seed, note=note)
    async with opening as backend:
        await (backend.start() if restore is None else backend.restore(restore))
        yield backend

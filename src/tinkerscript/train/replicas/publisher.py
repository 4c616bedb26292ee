"""`ReplicaPublisher`: vLLM replicas sample the weights that the embedded engine trains.

A version is in `adapters/policy-<run>-<version>-<digest>`: an adapter, or all weights.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from tinkerscript.access_tokens import ADMIN_TOKEN, read_token
from tinkerscript.addresses import ADAPTERS_FOLDER
from tinkerscript.config import InferenceConfig, RunConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.errors import ConfigError
from tinkerscript.gateway.samplers.remote import api_key
from tinkerscript.processes.launcher import MAX_RESTARTS, Child, Launcher, Slot
from tinkerscript.processes.planned import KEY, REPLICA_MODEL, PlannedProcess, plan_of
from tinkerscript.processes.supervisor import Supervisor, run_beside
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.sampler import Sampler
from tinkerscript.train.backends.backend import Publisher, TrainerBackend
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.replicas.pool import HANG_S, PROVE_S, Published, ReplicaPool, Scorer
from tinkerscript.train.replicas.replica import Replica
from tinkerscript.train.step_metrics import StepFacts
from tinkerscript.vllm_plugin import ADAPTERS_TOKEN, write_manifest

PROOFS = "replicas.jsonl"


@dataclass(eq=False)
class ReplicaPublisher(Publisher):
    pool: ReplicaPool
    engine: EmbeddedEngine
    supervisor: Supervisor
    folder: Path
    config: InferenceConfig
    holds: int
    seeds = False
    """Seeds slow vLLM down, and samples depend on the batch anyway."""

    def __post_init__(self) -> None:
        self.max_context = self.engine.max_context
        self._adapters = self.folder / ADAPTERS_FOLDER
        self._run = re.sub(r"[^\w.]", "_", self.folder.name)

    async def publish(self, policy_version: int) -> Sampler:
        fresh = self._adapters / "new"
        fresh.mkdir(parents=True)
        await self.engine.write_weights(fresh)
        folder = named(fresh, f"policy-{self._run}-{policy_version}")
        await self.pool.publish(Published(policy_version, folder))
        return self.pool

    @asynccontextmanager
    async def resting(self) -> AsyncGenerator[None]:
        if not self.config.sleep:
            yield
            return
        await self.pool.sleep()
        try:
            yield
        finally:
            await self.engine.free_memory()
            await self.pool.wake()

    async def announce(self, policy_version: int) -> None:
        await self.pool.announce(policy_version)

    def ended(self, episode_uuid: str) -> None:
        self.pool.release(episode_uuid)

    async def failed(self) -> None:
        await run_beside(self.supervisor, asyncio.create_task(self.pool.failed()))

    def metrics(self, facts: StepFacts) -> dict[str, float]:
        serving = sum(replica.serving for replica in self.pool.replicas)
        counts = {f"replicas/{name}": float(count) for name, count in self.pool.counts.items()}
        return {"replicas/serving": float(serving), "replicas/max_gap": self.pool.max_gap, **counts}


def named(folder: Path, name: str) -> Path:
    target = folder.with_name(f"{name}-{write_manifest(folder)}")
    folder.rename(target)
    return target


@asynccontextmanager
async def open_replicas(
    config: RunConfig,
    folder: Path,
    backend: TrainerBackend,
    note: Callable[[str], None],
    *,
    launcher: Launcher | None = None,
    server_url: str = "",
    prove_s: float = PROVE_S,
    hang_s: float = HANG_S,
) -> AsyncGenerator[ReplicaPublisher]:
    """Open the replicas that `config` launches or names; leaving the context ends them.

    `server_url`: where other machines' replicas download adapters; empty if they share the run's folder.
    """
    if not isinstance(backend, EmbeddedBackend):
        raise ConfigError(f"engine.backend: {config.engine.backend} has no weights for replicas")
    inference, engine = config.inference, backend.engine
    timeout_s = config.interchange_server.call_timeout_s
    adapters = folder / ADAPTERS_FOLDER
    shutil.rmtree(adapters, ignore_errors=True)
    launched = _launched(
        [process for process in plan_of(config, folder) if process.name.startswith("replica ")],
        config,
        model=engine.folder,
        folder=folder,
        adapters=f"{server_url}/{ADAPTERS_FOLDER}" if server_url else str(adapters),
    )
    async with Supervisor(max_restarts=MAX_RESTARTS, note=note, launcher=launcher) as supervisor:
        key = api_key(inference.api_key_env, os.environ)
        others = [
            Replica(url, url, inference, api_key=key, timeout_s=timeout_s, adapters=engine.is_lora)
            for url in inference.replicas
        ]
        canaries = [named(path, f"canary-{path.name}-0") for path in await engine.write_canaries(adapters)]

        def restart(replica: Replica) -> None:
            if replica in launched:
                replica.leave()
                supervisor.kill(launched[replica])

        pool = ReplicaPool(
            [*launched, *others],
            inference,
            keep=config.live_versions,
            model_folder=engine.folder,
            vocabulary=engine.vocabulary,
            max_context=engine.max_context,
            canaries=canaries,
            score=_scorer(engine),
            exact=engine.dtype == torch.float32,
            restart=restart,
            record=folder / PROOFS,
            note=note,
            timeout_s=timeout_s,
            prove_s=prove_s,
            hang_s=hang_s,
        )
        for replica, child in launched.items():
            child.on_death = _on_death(pool, replica)
            child.may_restart = pool.is_awake.is_set
            await supervisor.start(child)
        try:
            await run_beside(supervisor, asyncio.create_task(pool.begin()))
            yield ReplicaPublisher(pool, engine, supervisor, folder, inference, config.held_versions)
        finally:
            await pool.aclose()


def _launched(
    planned: Sequence[PlannedProcess], config: RunConfig, *, model: Path, folder: Path, adapters: str
) -> dict[Replica, Child]:
    key = secrets.token_hex(16)
    inference = config.inference.model_copy(update={"model": REPLICA_MODEL})
    values: dict[str, str] = {Slot.MODEL: str(model), Slot.ADAPTERS: adapters, Slot.KEY: key}
    admin = read_token(os.environ, ADMIN_TOKEN)
    known = {**os.environ, KEY: key, **({ADAPTERS_TOKEN: admin} if admin else {})}
    found: dict[Replica, Child] = {}
    for process in planned:
        replica = Replica(
            process.name,
            "",
            inference,
            api_key=key,
            timeout_s=config.interchange_server.call_timeout_s,
            is_launched=True,
            adapters=bool(config.engine.lora.rank),
        )
        found[replica] = child = process.child(folder, lambda incarnation: values, known)
        child.on_start = replica.move
    return found


def _on_death(pool: ReplicaPool, replica: Replica) -> Callable[[int, int], None]:
    def on_death(incarnation: int, code: int) -> None:
        replica.leave()
        pool.lose(replica, f"died (exit code {code})")

    return on_death


def _scorer(engine: EmbeddedEngine) -> Scorer:
    async def score(
        folder: Path, prompts: Sequence[IntArray], tokens: Sequence[NDArray[np.int64]]
    ) -> list[FloatArray]:
        client = await engine.sample_copy(folder)
        scored = [
            # An extra id, because the last position is not scored.
            client.score(
                tinker.ModelInput.from_ints([*ids.tolist(), 0]),
                chosen=(np.full(len(chosen), len(ids) - 1, np.int64), chosen),
            )
            for ids, chosen in zip(prompts, tokens, strict=True)
        ]
        found = [(await each).chosen for each in scored]
        return [each for each in found if each is not None]

    return score

"""`open_frozen_role`: a `frozen` role as a model that samples and scores.

A vLLM server holds it if the role has a `base_url`, else the run's backend. We wait up to `MAX_WAIT_S` for an
unreachable server.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

from tinkerscript.config import InferenceConfig, RoleConfig
from tinkerscript.errors import ConfigError, EngineError, GatewayError
from tinkerscript.gateway.samplers.inference_server import Upstream
from tinkerscript.gateway.samplers.probe import ServerFacts
from tinkerscript.gateway.samplers.remote import RemoteSampler, api_key, examine
from tinkerscript.gateway.samplers.vllm import VllmServer
from tinkerscript.rollouts.call import FloatArray, IntArray, pack_ids
from tinkerscript.sampler import Sampler, SampleRequest
from tinkerscript.train.backends.backend import FrozenModel, TrainerBackend
from tinkerscript.train.tokenizer_check import check_tokenizer_of_server

MAX_WAIT_S = 600.0

REQUESTS_AT_ONCE = 64

CONNECT_RETRY_S = 1.0

RETRY_NOTE_S = 60.0

# vLLM sends -9999.0 for -inf, which JSON cannot hold.
NOTHING = -9998.0


@asynccontextmanager
async def open_frozen_role(
    name: str,
    role: RoleConfig,
    backend: TrainerBackend,
    *,
    folder: Path,
    note: Callable[[str], None],
    timeout_s: float,
    max_wait_s: float = MAX_WAIT_S,
    environ: Mapping[str, str] = os.environ,
) -> AsyncGenerator[FrozenModel]:
    """`folder` has the tokenizer of `backend`'s model. `timeout_s` limits one request."""
    if role.base_url:
        async with _served(name, role, folder, note, environ, timeout_s, max_wait_s) as model:
            yield model
        return
    try:
        model = await backend.open_frozen(role.model)
    except (ConfigError, EngineError) as error:
        raise ConfigError(f"roles.{name}.model: {role.model!r}: {error}") from error
    yield model


@asynccontextmanager
async def _served(
    name: str,
    role: RoleConfig,
    folder: Path,
    note: Callable[[str], None],
    environ: Mapping[str, str],
    timeout_s: float,
    max_wait_s: float,
) -> AsyncGenerator[ServedFrozenModel]:
    try:
        key = api_key(role.api_key_env, environ)
        server = VllmServer(
            Upstream(role.base_url, api_key=key, max_in_flight=REQUESTS_AT_ONCE, timeout_s=timeout_s)
        )
    except ConfigError as error:
        raise ConfigError(f"roles.{name}: {error}") from error
    async with aclosing(server):
        # The server's weight names are not versions of the run's policy.
        facts = structs.replace(await _examined(name, role, server, folder), weight_version=None)
        sampler = RemoteSampler(server, facts, timeout_s=timeout_s)
        yield ServedFrozenModel(name, server, facts, sampler, folder, note, max_wait_s)


async def _examined(name: str, role: RoleConfig, server: VllmServer, folder: Path) -> ServerFacts:
    section = InferenceConfig(backend="vllm", base_url=role.base_url, model=role.model)
    try:
        facts = await examine(server, section, folder)
        if not facts.rescored:
            raise ConfigError(f"{server.url} does not score prompts (prompt_logprobs); use vLLM")
        await check_tokenizer_of_server(
            folder,
            lambda text: server.encode(text, facts.model),
            longest=facts.max_context,
            whose=f"the model at {server.url}",
        )
    except ConfigError as error:
        raise ConfigError(f"roles.{name}: {error}") from error
    except GatewayError as error:
        raise ConfigError(f"roles.{name}: {error.message}") from error
    return facts


@dataclass(eq=False)
class ServedFrozenModel(FrozenModel):
    name: str
    server: VllmServer
    facts: ServerFacts
    sampler: Sampler
    folder: Path
    note: Callable[[str], None]
    max_wait_s: float

    def __post_init__(self) -> None:
        self._name = f"roles.{self.name} at {self.server.url}"
        self._noted = 0.0  # Last report, in event-loop time. 0: not waiting.
        self._model = self.facts.model
        self.max_context = self.facts.max_context

    async def logprobs(
        self, sequences: list[IntArray], temperatures: list[FloatArray] | None = None
    ) -> list[FloatArray]:
        del temperatures  # `prompt_logprobs` uses temperature 1.
        tasks = [asyncio.create_task(self._scored(ids)) for ids in sequences]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _scored(self, ids: IntArray) -> FloatArray:
        if len(ids) < 2:
            return np.zeros(len(ids), np.float32)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            try:
                scores = await self._scores(ids)
            except GatewayError as error:
                waited = loop.time() - began
                if error.status not in (503, 504) or waited > self.max_wait_s:
                    raise EngineError(f"{self._name}: {error.message} (waited {waited:.0f} s)") from error
                self._tell(error.message, loop.time())
                await asyncio.sleep(CONNECT_RETRY_S)
                continue
            self._tell("", loop.time())
            return np.array([0.0, *scores], dtype=np.float32)

    async def _scores(self, ids: IntArray) -> list[float]:
        request = SampleRequest(prompt=pack_ids(ids), max_tokens=1)
        (sample,) = await self.server.sample(request, self._model, score_from=1)
        if len(sample.scores) != len(ids) - 1:
            raise EngineError(
                f"{self._name}: got {len(sample.scores)} logprobs for a prompt of {len(ids)} tokens"
            )
        for place, score in enumerate(sample.scores, 1):
            if not NOTHING < score <= 1e-3:
                raise EngineError(f"{self._name}: the log probability of token {ids[place]} is {score}")
        return sample.scores

    def _tell(self, reason: str, now: float) -> None:
        """Report a wait once for concurrent requests. An empty `reason` ends it."""
        if reason and (not self._noted or now - self._noted >= RETRY_NOTE_S):
            self._noted = now
            self.note(f"waiting for {self._name}: {reason}")
        elif not reason and self._noted:
            self._noted = 0.0
            self.note(f"{self._name} answers again")

"""`Replica`: one vLLM server that samples for a run, with the versions that it has loaded.

Its next-token logprobs tell which weights it has, always through an adapter, because vLLM 0.32 has two faults
with adapters on the head (docs/vllm.md#what-was-run; `punica_wrapper.add_lora_logits`). Methods that ask the
server raise GatewayError.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from tinkerscript.config import InferenceConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.samplers.inference_server import Upstream
from tinkerscript.gateway.samplers.probe import ServerFacts
from tinkerscript.gateway.samplers.remote import RemoteSampler, examine
from tinkerscript.gateway.samplers.vllm import VllmServer
from tinkerscript.processes.launcher import Started
from tinkerscript.rollouts.call import IntArray, pack_ids
from tinkerscript.sampler import SampleRequest, SampleResult
from tinkerscript.tokenizer import LightTokenizer

PROOF_TOP = 20
"""vLLM's default limit per position."""

CHECK_TIMEOUT_S = 5.0


class LostError(Exception):
    """A replica is lost, or lacks the version."""


@dataclass(eq=False)
class Replica:
    name: str
    url: str
    config: InferenceConfig
    api_key: str = ""
    timeout_s: float = field(kw_only=True)
    is_launched: bool = False
    """Whether the run starts it, and `move` says where."""

    adapters: bool = True

    def __post_init__(self) -> None:
        self._former: list[VllmServer] = []
        self._is_up = asyncio.Event()
        self._connect(self.url)
        self._facts: ServerFacts | None = None
        self._samplers: dict[int, RemoteSampler] = {}
        self._text: Callable[[list[int]], str] | None = None
        self._calls: dict[asyncio.Task[SampleResult], int] = {}

        self.pinned = 0
        self.tokens = 0.0
        self.serving = False
        self._weights = ""

    @property
    def load(self) -> tuple[int, int]:
        """(running calls, pinned episodes)"""
        return len(self._calls), self.pinned

    @property
    def in_flight(self) -> Counter[int]:
        return Counter(self._calls.values())

    @property
    def versions(self) -> list[int]:
        return sorted(self._samplers)

    def _connect(self, url: str) -> None:
        self.url = url
        self._server = VllmServer(
            Upstream(
                url,
                api_key=self.api_key,
                timeout_s=self.timeout_s,
            )
        )
        self._is_gone = asyncio.Event()
        if url:
            self._is_up.set()

    def move(self, process: Started) -> None:
        self._former.append(self._server)
        self._connect(f"http://{process.host}:{process.port}")

    def leave(self) -> None:
        self._is_up.clear()
        self._is_gone.set()

    async def begin(self, model_folder: Path, timeout_s: float) -> ServerFacts:
        """Wait until the server responds."""
        self._samplers.clear()
        self._weights = ""
        self.tokens = 0.0
        if self.config.on_publish == "continue" and self._text is None:
            self._text = LightTokenizer(model_folder).decode
        config = self.config.model_copy(update={"start_timeout_s": timeout_s, "model": self.base})
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_up.wait()
                await self._rouse()
        except TimeoutError:
            raise ConfigError(f"{self.name} was not started within {timeout_s:g} s") from None
        gone = asyncio.create_task(self._is_gone.wait())
        examining = asyncio.create_task(examine(self._server, config, model_folder, rescore=False))
        try:
            await asyncio.wait({gone, examining}, return_when=asyncio.FIRST_COMPLETED)
            if not examining.done():
                return await self.begin(model_folder, timeout_s)
            self._facts = examining.result()
            return self._facts
        finally:
            gone.cancel()
            examining.cancel()
            await asyncio.gather(gone, examining, return_exceptions=True)

    async def _rouse(self) -> None:
        with suppress(GatewayError):
            if not self.adapters:
                await self._server.resume()
            if self.config.sleep:
                await self._server.wake()

    @property
    def base(self) -> str:
        """The model's name without an adapter; empty if there is only one."""
        return self.config.model if self._facts is None else self._facts.model

    async def take(self, folder: Path) -> None:
        """Load full weights, which ends running calls. Adapters load when a request names them."""
        name = folder.name
        if self.adapters or self._weights == name:
            return
        self._weights = ""
        samplers, self._samplers = self._samplers, {}
        await self._interrupt(samplers)
        await self._server.load_weights(name, name.split("-")[-2])
        self._weights = name

    async def likeliest(self, folder: Path, prompts: Sequence[IntArray]) -> list[dict[int, float]]:
        """Return the likeliest ids after each prompt (int32 [P])."""
        name = folder.name

        async def one(ids: IntArray) -> dict[int, float]:
            request = SampleRequest(prompt=pack_ids(ids), max_tokens=1, top_logprobs=PROOF_TOP)
            model = name if self.adapters else self.base
            (sample,) = await self._server.sample(request, model, cache_salt=name)
            return sample.top[0]

        return list(await asyncio.gather(*(one(ids) for ids in prompts)))

    def offer(self, version: int, name: str) -> None:
        assert self._facts is not None
        if self.adapters:
            facts = structs.replace(self._facts, model=name, weight_version=None)
        else:
            facts = structs.replace(self._facts, weight_version=str(version))
        self._samplers[version] = RemoteSampler(
            self._server, facts, timeout_s=self.timeout_s, cache_salt=name, text=self._text
        )

    async def sample(self, request: SampleRequest, version: int, *, is_held: bool = False) -> SampleResult:
        """Raises LostError. `cut` leaves `is_held` calls alone."""
        sampler = self._samplers.get(version)
        if sampler is None:
            raise LostError(f"{self.name} does not have version {version}")
        call = asyncio.ensure_future((sampler.uncut() if is_held else sampler).sample(request))
        self._calls[call] = version
        try:
            await asyncio.wait([call])
            if call.cancelled():
                raise LostError(f"{self.name} did not answer")
            result = call.result()
        finally:
            call.cancel()
            del self._calls[call]
        if self.adapters:
            return structs.replace(result, policy_version=version)
        if (result.policy_version, result.policy_version_end) != (version, None):
            message = f"it samples from other weights than those of version {version}"
            raise GatewayError(503, "engine_unavailable", message)
        return result

    def cut(self, newest: int) -> None:
        for version, sampler in self._samplers.items():
            if version < newest:
                sampler.cut()

    async def _interrupt(self, samplers: Mapping[int, RemoteSampler]) -> None:
        """End running calls with partial samples if they can continue, else by LostError. The server must
        still have their weights.
        """
        if self._text is not None:
            for sampler in samplers.values():
                sampler.cut()
            await asyncio.gather(*self._calls, return_exceptions=True)
        self._abandon_all()

    def abandon(self, version: int) -> None:
        for call, of in self._calls.items():
            if of == version:
                call.cancel()

    async def retire(self, version: int, name: str) -> None:
        """Unload an adapter after running calls."""
        self._samplers.pop(version, None)
        if self.adapters:
            await self._server.unload_adapter(name)

    def lose(self) -> None:
        self.serving = False
        self.pinned = 0
        self._abandon_all()
        self._samplers.clear()

    def _abandon_all(self) -> None:
        for call in self._calls:
            call.cancel()

    async def sleep(self) -> None:
        """Release memory, and end running calls."""
        samplers = self._samplers
        if self._text is not None:  # A cut is permanent.
            self._samplers = {version: replace(sampler) for version, sampler in samplers.items()}
        await self._interrupt(samplers)
        await self._server.sleep()

    async def wake(self) -> None:
        await self._server.wake()

    async def tokens_sampled(self) -> float:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            self.tokens = await self._server.tokens_sampled()
        return self.tokens

    async def aclose(self) -> None:
        for server in (*self._former, self._server):
            await server.aclose()

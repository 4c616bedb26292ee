"""`RemoteSampler` samples from a vLLM server, and `remote_sampler` opens the server in the config.

Every server is probed before use. A request that it cannot honor fully is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tinkerscript.config import InferenceConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.samplers.inference_server import Upstream
from tinkerscript.gateway.samplers.probe import Probe, ServerFacts
from tinkerscript.gateway.samplers.vllm import Cut, ServerDescription, ServerSample, VllmServer
from tinkerscript.rollouts.call import FOREIGN_POLICY, LogprobKind, pack_ids, pack_logprobs, unpack_ids
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
    fitted,
    refuse_unsupported,
)

PROGRESS_POLL_S = 0.25

PROBE_TIMEOUT_S = 60.0  # The first requests may compile kernels.
PROMPTS = ("Tell me something.", "Write one sentence about the sea.", "What is 17 + 25?")
# Cases that tokenizers handle differently.
TOKENIZER_TEXT = "Ünïcode 漢字 12345\n\n\tdef f(x): return x  # e\u0301 🙂"
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RemoteSampler(Sampler):
    """Weights without a number are `FOREIGN_POLICY`."""

    server: VllmServer
    facts: ServerFacts  # With a `weight_version`, the server is asked again.
    timeout_s: float = 300.0
    cache_salt: str = ""  # Different salts never share the server's prefix cache.
    # Finds stop strings that earlier weights began; None if nothing is cut.
    text: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        self._weights = self.facts.weight_version
        self._is_cut = asyncio.Event()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        refuse_unsupported(
            request,
            "an inference server",
            constraints=False,
            top_logprobs=True,
            min_p=True,
            repetition_penalty=True,
            mixed_stops=True,
        )
        before = self._weights
        try:
            async with asyncio.timeout(self.timeout_s):
                sized = fitted(request, self.facts.max_context, "the inference server")
                samples = await self.server.sample(
                    sized,
                    self.facts.model,
                    cache_salt=self.cache_salt,
                    cut=Cut(self._is_cut, self._ends(request)) if self.text else None,
                )
        except TimeoutError:
            message = f"the inference server did not answer within {self.timeout_s:g} s"
            raise GatewayError(504, "engine_timeout", message) from None
        first, last = await self._versions(before)
        return SampleResult(
            sequences=[_sequence(each, request.top_logprobs) for each in samples],
            policy_version=first,
            logprob_kind=self._logprob_kind(request),
            policy_version_end=last if last != first else None,
        )

    def cut(self) -> None:
        self._is_cut.set()

    def uncut(self) -> RemoteSampler:
        return replace(self, text=None)

    def _ends(self, request: SampleRequest) -> Callable[[Sequence[int]], bool] | None:
        # The server misses stop strings that begin in the earlier part.
        text, stops = self.text, request.stop
        if not (text and stops and request.sampled):
            return None
        window = max(len(stop.encode()) for stop in stops) + 8
        before = unpack_ids(request.prompt)[-request.sampled :][-window:].tolist()

        def ends(ids: Sequence[int]) -> bool:
            return len(ids) < window and any(stop in text([*before, *ids][-window:]) for stop in stops)

        return ends

    def close(self) -> None:
        self.server.close()

    async def aclose(self) -> None:
        await self.server.aclose()

    async def _versions(self, before: str | None) -> tuple[int, int]:
        """Return the first and last version that may have sampled.

        The server reports its weights only outside of calls, so the first call after an update counts as
        changed. Raises GatewayError 503 if a version is missing, as after a restart.
        """
        if self.facts.weight_version is not None:
            self._weights = await self.server.weight_version()
        first, last = _number(before), _number(self._weights)
        if first != last and FOREIGN_POLICY in (first, last):
            message = (
                f"the inference server's weights changed from {before} to {self._weights}, which are not both"
                " numbers; retry"
            )
            raise GatewayError(503, "engine_unavailable", message)
        return first, last

    def _logprob_kind(self, request: SampleRequest) -> LogprobKind:
        # `processed` means before top-p, top-k and min-p, and vLLM renormalizes after them.
        truncated = request.top_p < 1 or request.top_k > 0 or request.min_p > 0
        if request.repetition_penalty != 1 or (truncated and self.facts.logprob_kind == "processed"):
            return "unknown"
        return self.facts.logprob_kind


def _number(weights: str | None) -> int:
    return int(weights) if weights and weights.isdecimal() else FOREIGN_POLICY


def _sequence(sample: ServerSample, top: int) -> SampledSequence:
    most_likely = [_most_likely(each, top) for each in sample.top] if top else []
    if top and sample.ids and min(map(len, most_likely), default=0) < top:
        raise GatewayError(
            502, "engine_error", f"the inference server reported fewer than {top} top_logprobs"
        )
    return SampledSequence(
        sampled=pack_ids(sample.ids),
        logprobs=pack_logprobs(sample.logprobs),
        stop_reason=sample.stop_reason,
        top_ids=pack_ids([token for pairs in most_likely for token, _ in pairs]),
        top_logprobs=pack_logprobs([logprob for pairs in most_likely for _, logprob in pairs]),
        is_cut=sample.is_cut,
    )


def _most_likely(logprobs: dict[int, float], number: int) -> list[tuple[int, float]]:
    # A server may add the sampled token.
    return sorted(logprobs.items(), key=lambda pair: -pair[1])[:number]


@asynccontextmanager
async def remote_sampler(
    config: InferenceConfig, *, model_folder: Path, environ: Mapping[str, str], timeout_s: float
) -> AsyncGenerator[RemoteSampler]:
    async with aclosing(inference_server(config, environ, timeout_s=timeout_s)) as server:
        facts = await examine(server, config, model_folder)
        logger.info("sampler.probed facts=%s", facts.describe())
        yield RemoteSampler(server, facts, timeout_s=timeout_s)


def inference_server(config: InferenceConfig, environ: Mapping[str, str], *, timeout_s: float) -> VllmServer:
    """Does not contact the server."""
    if not config.base_url:
        raise ConfigError("inference.backend: vllm needs inference.base_url, such as http://127.0.0.1:8000")
    upstream = Upstream(
        config.base_url,
        api_key=api_key(config.api_key_env, environ),
        timeout_s=max(timeout_s, PROBE_TIMEOUT_S),
    )
    return VllmServer(upstream)


async def examine(
    server: VllmServer, config: InferenceConfig, model_folder: Path, *, rescore: bool = True
) -> ServerFacts:
    renderer = ChatRenderer(model_folder)
    description = await _description(server, config.start_timeout_s)
    model = _choose_model(description, config, server)
    prompts = [renderer.render([{"role": "user", "content": text}], []) for text in PROMPTS]
    probe = Probe(server, model, prompts)
    ids = renderer.tokenizer.encode(TOKENIZER_TEXT)
    return await probe.run(description, text=TOKENIZER_TEXT, ids=ids, rescore=rescore)


async def _description(server: VllmServer, timeout_s: float) -> ServerDescription:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await server.describe()
        except GatewayError as error:
            name = f"the vLLM server at {server.url}"
            if error.status not in (503, 504):
                raise ConfigError(f"{name}: {error.message}") from error
            if asyncio.get_running_loop().time() > deadline:
                waited = f"within inference.start_timeout_s ({timeout_s:g} s)"
                raise ConfigError(f"{name} did not answer {waited}: {error.message}") from error
        await asyncio.sleep(PROGRESS_POLL_S)


def _choose_model(description: ServerDescription, config: InferenceConfig, server: VllmServer) -> str:
    known = ", ".join(repr(name) for name in description.models)
    if config.model:
        if config.model not in description.models:
            raise ConfigError(f"inference.model: {server.url} serves {known}, not {config.model!r}")
        return config.model
    bases = [name for name in description.models if name not in description.adapters]
    if len(bases) != 1:
        raise ConfigError(f"inference.model: {server.url} serves {known}; name one")
    return bases[0]


def api_key(variable: str, environ: Mapping[str, str]) -> str:
    if not variable:
        return ""
    key = environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"inference.api_key_env: the environment variable {variable} is not set")
    return key

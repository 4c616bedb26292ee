"""`RemoteSampler`: a vLLM or SGLang server as the gateway's sampler; `remote_sampler` opens the one in the
config.

Invariants: no sampler is opened without a successful probe. A result holds what the server reported, under
the facts that the probe pinned, with the version of the weights that the operator or the server named. A
request that cannot be honored in full is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tinkerscript.config import InferenceConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
    refuse_unsupported,
)
from tinkerscript.gateway.samplers.inference_server import (
    InferenceServer,
    ServerDescription,
    ServerRequest,
    ServerSample,
    Upstream,
)
from tinkerscript.gateway.samplers.probe import Probe, ServerFacts
from tinkerscript.gateway.samplers.sglang import SglangServer
from tinkerscript.gateway.samplers.vllm import VllmServer
from tinkerscript.rollouts.call import FOREIGN_POLICY, LogprobKind, pack_ids, pack_logprobs, unpack_ids

POLL_S = 0.25
"""Interval at which to check for a server that is not up yet."""

PROBE_TIMEOUT_S = 60.0
"""Per request of the probe: the first ones may compile kernels."""

PROMPTS = ("Tell me something.", "Write one sentence about the sea.", "What is 17 + 25?")
"""User messages that the probe samples after."""

TOKENIZER_TEXT = "Ünïcode 漢字 12345\n\n\tdef f(x): return x  # e\u0301 🙂"
"""Encoded here and by the server: it has the cases that tokenizers handle differently."""

SERVERS: dict[str, Callable[[Upstream], InferenceServer]] = {"vllm": VllmServer, "sglang": SglangServer}
"""`inference.backend` -> the server behind an address."""

logger = logging.getLogger(__name__)


class RemoteSampler(Sampler):
    """Samples from `server`. If it names its weights by numbers, they replace `policy_version`."""

    def __init__(
        self,
        server: InferenceServer,
        facts: ServerFacts,
        *,
        policy_version: int = FOREIGN_POLICY,
        timeout_s: float = 300.0,
        cache_salt: str = "",
    ) -> None:
        """`cache_salt`: requests with another one never share the server's prefix cache with these."""
        self._server = server
        self._cache_salt = cache_salt
        self._policy_version = policy_version
        self._timeout_s = timeout_s
        self._weights = facts.weight_version
        self._closed = asyncio.Event()
        self.facts = facts

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Reports no progress: streams of these servers have lost ids, so nothing is streamed."""
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
        samples = [each for part in await self._all(self._requests(request)) for each in part]
        versions = await self._versions(samples, before)
        return SampleResult(
            sequences=[_sequence(each, request.top_logprobs) for each in samples],
            policy_version=self._number(versions[0]) if versions else self._policy_version,
            logprob_kind=self._logprob_kind(request),
            policy_version_end=self._number(versions[-1]) if len(versions) > 1 else None,
        )

    def close(self) -> None:
        """Refuse requests from now on, and those that wait."""
        self._closed.set()

    async def aclose(self) -> None:
        """Close the connections."""
        self.close()
        await self._server.aclose()

    def _requests(self, request: SampleRequest) -> list[ServerRequest]:
        """One request, or one per sequence if the server would sample the same sequence n times."""
        prompt = unpack_ids(request.prompt).tolist()
        room = self.facts.max_context - len(prompt)
        if room < 1:
            raise GatewayError(
                400,
                "context_length_exceeded",
                f"the inference server's context holds {self.facts.max_context} tokens; the prompt has "
                f"{len(prompt)} and leaves no room for a reply",
                param="messages",
            )
        if request.seed is not None and not self.facts.seeds:
            remedy = self._server.remedies["seed"]
            raise GatewayError(
                400,
                "unsupported_parameter",
                f"seed: the inference server does not honor seeds; leave it out, or {remedy}",
                param="seed",
            )
        whole = ServerRequest(
            prompt=prompt,
            max_tokens=min(request.max_tokens, room),
            n=request.num_samples,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            seed=request.seed,
            stop_token_ids=[*request.stop_token_ids, *request.extra_stop_ids],
            stop=request.stop,
            top_logprobs=request.top_logprobs,
            cache_salt=self._cache_salt,
        )
        if whole.n == 1 or (self.facts.siblings and whole.seed is None):
            return [whole]
        return [
            msgspec.structs.replace(whole, n=1, seed=None if whole.seed is None else whole.seed + index)
            for index in range(whole.n)
        ]

    async def _all(self, requests: Sequence[ServerRequest]) -> list[list[ServerSample]]:
        """The samples of all requests; the first error cancels the others."""
        tasks = [asyncio.create_task(self._server.sample(each, self.facts.model)) for each in requests]
        closed = asyncio.create_task(self._closed.wait())
        try:
            async with asyncio.timeout(self._timeout_s):
                while waiting := [task for task in tasks if not task.done()]:
                    await asyncio.wait((closed, *waiting), return_when=asyncio.FIRST_COMPLETED)
                    if closed.done():
                        raise GatewayError(503, "engine_unavailable", "the server is shutting down; retry")
                    for task in waiting:
                        if task.done():
                            task.result()
                return [task.result() for task in tasks]
        except TimeoutError:
            message = f"the inference server did not answer within {self._timeout_s:g} s"
            raise GatewayError(504, "engine_timeout", message) from None
        finally:
            closed.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _versions(self, samples: Sequence[ServerSample], before: str | None) -> list[str]:
        """Names of the weights that sampled, oldest first; more than one if they may have changed meanwhile.

        Exact if the server keeps track per token. Otherwise the weights are compared with those of the
        previous request, so the first one after an update always counts as changed.
        """
        if before is None and self._weights is None:
            return []
        seen = [version for each in samples for version in each.weight_versions]
        if not seen:
            reported = [each.weight_version for each in samples if each.weight_version is not None]
            now = reported[-1] if reported else await self._server.weight_version()
            seen = [version for version in (before, now) if version is not None]
        if seen:
            self._weights = seen[-1]
        return list(dict.fromkeys(seen))

    def _number(self, weights: str) -> int:
        return int(weights) if weights.isdecimal() else self._policy_version

    def _logprob_kind(self, request: SampleRequest) -> LogprobKind:
        """`processed` is before top-p, top-k and min-p: logprobs renormalized after them are of neither kind,
        nor are those that may come before or after a repetition penalty."""
        if request.repetition_penalty != 1:
            return "unknown"
        truncated = request.top_p < 1 or request.top_k > 0 or request.min_p > 0
        if self.facts.logprob_kind == "processed" and self.facts.renormalizes and truncated:
            return "unknown"
        return self.facts.logprob_kind


def _sequence(sample: ServerSample, top: int) -> SampledSequence:
    """Raises GatewayError 502 if `sample` has fewer than `top` of the most likely ids somewhere."""
    most_likely = [_most_likely(each, top) for each in sample.top] if top else []
    if top and any(len(pairs) < top for pairs in most_likely or [[]]):
        raise GatewayError(
            502, "engine_error", f"the inference server reported fewer than {top} top_logprobs"
        )
    return SampledSequence(
        sampled=pack_ids(sample.ids),
        logprobs=pack_logprobs(sample.logprobs),
        stop_reason=sample.stop_reason,
        top_ids=pack_ids([token for pairs in most_likely for token, _ in pairs]),
        top_logprobs=pack_logprobs([logprob for pairs in most_likely for _, logprob in pairs]),
    )


def _most_likely(logprobs: dict[int, float], number: int) -> list[tuple[int, float]]:
    """Best first. A server may add the sampled token to the number requested."""
    return sorted(logprobs.items(), key=lambda pair: -pair[1])[:number]


@asynccontextmanager
async def remote_sampler(
    config: InferenceConfig, *, model_folder: Path, environ: Mapping[str, str], timeout_s: float
) -> AsyncGenerator[RemoteSampler]:
    """A probed sampler over the server in `config`. Leaving the context closes its connections.

    `model_folder` has the tokenizer and the chat format of the model that the server serves.
    Raises ConfigError if the server cannot be reached or used.
    """
    server = inference_server(config, environ, timeout_s=timeout_s)
    try:
        facts = await examine(server, config, model_folder)
        logger.info("sampler.probed facts=%s", facts.describe())
        sampler = RemoteSampler(server, facts, policy_version=config.policy_version, timeout_s=timeout_s)
        try:
            yield sampler
        finally:
            sampler.close()
    finally:
        await server.aclose()


def inference_server(
    config: InferenceConfig, environ: Mapping[str, str], *, timeout_s: float
) -> InferenceServer:
    """The server in `config`, not contacted yet. Raises ConfigError."""
    if not config.base_url:
        example = "http://127.0.0.1:8000" if config.backend == "vllm" else "http://127.0.0.1:30000"
        raise ConfigError(f"inference.backend: {config.backend} needs inference.base_url, such as {example}")
    upstream = Upstream(
        config.base_url,
        api_key=api_key(config.api_key_env, environ),
        max_in_flight=config.max_in_flight,
        timeout_s=max(timeout_s, PROBE_TIMEOUT_S),
    )
    return SERVERS[config.backend](upstream)


async def examine(
    server: InferenceServer, config: InferenceConfig, model_folder: Path, *, rescore: bool = True
) -> ServerFacts:
    """Wait for the server, choose its model, and probe it. Raises ConfigError.

    `rescore`: compare log probabilities of sampled tokens with those of the same tokens in a prompt.
    """
    renderer = ChatRenderer(model_folder)
    description = await _description(server, config.start_timeout_s)
    model = _choose_model(description, config, server)
    prompts = [renderer.render([{"role": "user", "content": text}], []) for text in PROMPTS]
    probe = Probe(server, model, prompts)
    ids = renderer.tokenizer.encode(TOKENIZER_TEXT)
    return await probe.run(description, text=TOKENIZER_TEXT, ids=ids, rescore=rescore)


async def _description(server: InferenceServer, timeout_s: float) -> ServerDescription:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await server.describe()
        except GatewayError as error:
            name = f"the {server.kind} server at {server.url}"
            if error.status not in (503, 504):
                raise ConfigError(f"{name}: {error.message}") from error
            if asyncio.get_running_loop().time() > deadline:
                waited = f"within inference.start_timeout_s ({timeout_s:g} s)"
                raise ConfigError(f"{name} did not answer {waited}: {error.message}") from error
        await asyncio.sleep(POLL_S)


def _choose_model(description: ServerDescription, config: InferenceConfig, server: InferenceServer) -> str:
    known = ", ".join(repr(name) for name in description.models)
    if config.model:
        if config.model not in description.models:
            raise ConfigError(f"inference.model: {server.url} serves {known}, not {config.model!r}")
        return config.model
    bases = [name for name in description.models if name not in description.adapters]
    if len(bases) != 1 and server.kind == "vllm":
        raise ConfigError(f"inference.model: {server.url} serves {known}; name one")
    return bases[0]


def api_key(variable: str, environ: Mapping[str, str]) -> str:
    """What the variable holds; empty if none is named. Raises ConfigError if it is not set."""
    if not variable:
        return ""
    key = environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"inference.api_key_env: the environment variable {variable} is not set")
    return key

"""`RemoteSampler`: a vLLM or SGLang server as the gateway's sampler.

The invariant: a result holds what the server reported under the facts that the probe pinned, with the version
of the weights that the operator or the server named; a call that cannot be honoured in full is refused.

Opens the sampler that a config names: waits for the server, probes it, pins what was found.

Invariant: no sampler is handed out that the probe has not been through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
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
from tinkerscript.rollouts.call import LogprobKind, pack_ids, pack_logprobs, unpack_ids

FOREIGN_POLICY = -1
"""Policy version of weights that the trainer never published: what they sampled does not train."""


class RemoteSampler(Sampler):
    """Samples from `server`; a server that names its weights by numbers overrides `policy_version`."""

    def __init__(
        self,
        server: InferenceServer,
        facts: ServerFacts,
        *,
        policy_version: int = FOREIGN_POLICY,
        timeout_s: float = 300.0,
    ) -> None:
        self._server = server
        self._policy_version = policy_version
        self._timeout_s = timeout_s
        self._weights = facts.weight_version
        self._closed = asyncio.Event()
        self.facts = facts

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Nobody is told of progress: streams of these servers have lost ids, so nothing is streamed."""
        refuse_unsupported(request, "an inference server", constraints=False, top_logprobs=True)
        asks = self._asks(request)
        before = self._weights
        answers = [answer for part in await self._all(asks) for answer in part]
        versions = await self._versions(answers, before)
        return SampleResult(
            sequences=[_sequence(answer, request.top_logprobs) for answer in answers],
            policy_version=self._number(versions[0]) if versions else self._policy_version,
            logprob_kind=self._logprob_kind(request),
            policy_version_end=self._number(versions[-1]) if len(versions) > 1 else None,
        )

    def close(self) -> None:
        """The server shuts down: refuse what waits and what comes."""
        self._closed.set()

    async def aclose(self) -> None:
        """Close the connections."""
        self.close()
        await self._server.aclose()

    def _asks(self, request: SampleRequest) -> list[ServerRequest]:
        """One request, or one for each sequence where the server would sample one sequence n times."""
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
                f"seed: the inference server does not honour seeds; leave it out, or {remedy}",
                param="seed",
            )
        ask = ServerRequest(
            prompt=prompt,
            max_tokens=min(request.max_tokens, room),
            n=request.num_samples,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            stop=request.stop,
            top_logprobs=request.top_logprobs,
        )
        if ask.n == 1 or (self.facts.siblings and ask.seed is None):
            return [ask]
        return [
            msgspec.structs.replace(ask, n=1, seed=None if ask.seed is None else ask.seed + index)
            for index in range(ask.n)
        ]

    async def _all(self, asks: Sequence[ServerRequest]) -> list[list[ServerSample]]:
        """The answers to all, or the first error; the others are cancelled then."""
        tasks = [asyncio.create_task(self._server.ask(ask, self.facts.model)) for ask in asks]
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

    async def _versions(self, answers: Sequence[ServerSample], before: str | None) -> list[str]:
        """Names of the weights behind a call, oldest first; more than one if they may have changed midway.

        Exact where the server keeps account of it for each token. Elsewhere the weights are compared with
        those of the call before, so that the first call after an update counts as changed, if it is or not.
        """
        if before is None and self._weights is None:
            return []
        seen = [version for answer in answers for version in answer.weight_versions]
        if not seen:
            told = [answer.weight_version for answer in answers if answer.weight_version is not None]
            now = told[-1] if told else await self._server.weight_version()
            seen = [version for version in (before, now) if version is not None]
        if seen:
            self._weights = seen[-1]
        return list(dict.fromkeys(seen))

    def _number(self, weights: str) -> int:
        return int(weights) if weights.isdecimal() else self._policy_version

    def _logprob_kind(self, request: SampleRequest) -> LogprobKind:
        """`processed` is before top-p and top-k: what a server renormalised after them is neither kind."""
        truncated = request.top_p < 1 or request.top_k > 0
        if self.facts.logprob_kind == "processed" and self.facts.renormalises and truncated:
            return "unknown"
        return self.facts.logprob_kind


def _sequence(answer: ServerSample, alternatives: int) -> SampledSequence:
    """Raises GatewayError 502 for an answer with fewer alternatives than were asked for."""
    best = [_best(top, alternatives) for top in answer.top] if alternatives else []
    if alternatives and any(len(place) < alternatives for place in best or [[]]):
        raise GatewayError(
            502, "engine_error", f"the inference server gave fewer than {alternatives} top_logprobs"
        )
    return SampledSequence(
        sampled=pack_ids(answer.ids),
        logprobs=pack_logprobs(answer.logprobs),
        stop_reason=answer.stop_reason,
        top_ids=pack_ids([token for place in best for token, _ in place]),
        top_logprobs=pack_logprobs([logprob for place in best for _, logprob in place]),
    )


def _best(top: dict[int, float], number: int) -> list[tuple[int, float]]:
    """The most likely first. A server may add the sampled token to as many as were asked for."""
    return sorted(top.items(), key=lambda pair: -pair[1])[:number]


POLL_S = 0.25
"""Between two looks at a server that is not there yet."""


PROBE_TIMEOUT_S = 60.0
"""For one request of the probe: the first ones may compile kernels."""


PROMPTS = ("Tell me something.", "Write one sentence about the sea.", "What is 17 + 25?")
"""Messages that the probe samples after."""


TOKENIZER_TEXT = "Ünïcode 漢字 12345\n\n\tdef f(x): return x  # e\u0301 🙂"
"""Encoded here and by the server: whatever tokenizers do differently is in it."""


logger = logging.getLogger(__name__)


@asynccontextmanager
async def remote_sampler(
    config: InferenceConfig, *, model_folder: Path, environ: Mapping[str, str], timeout_s: float
) -> AsyncGenerator[RemoteSampler]:
    """A sampler over the server of `config`, probed; its connections close with the context.

    `model_folder` holds the tokenizer and chat format of the model that is served there.
    Raises ConfigError for a server that is not there, or cannot be used.
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
    """The server that `config` names, not looked at yet. Raises ConfigError."""
    if not config.base_url:
        example = "http://127.0.0.1:8000" if config.backend == "vllm" else "http://127.0.0.1:30000"
        raise ConfigError(f"inference.backend: {config.backend} needs inference.base_url, such as {example}")
    upstream = Upstream(
        config.base_url,
        api_key=_api_key(config.api_key_env, environ),
        max_in_flight=config.max_in_flight,
        timeout_s=max(timeout_s, PROBE_TIMEOUT_S),
    )
    return VllmServer(upstream) if config.backend == "vllm" else SglangServer(upstream)


async def examine(server: InferenceServer, config: InferenceConfig, model_folder: Path) -> ServerFacts:
    """Wait for the server, choose the model, probe it. Raises ConfigError."""
    renderer = ChatRenderer(model_folder)
    description = await _described(server, config.start_timeout_s)
    model = _choose_model(description, config, server)
    prompts = [renderer.render([{"role": "user", "content": text}], []) for text in PROMPTS]
    probe = Probe(server, model, prompts)
    return await probe.run(description, text=TOKENIZER_TEXT, ids=renderer.tokenizer.encode(TOKENIZER_TEXT))


async def _described(server: InferenceServer, timeout_s: float) -> ServerDescription:
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
    if len(description.models) != 1 and server.kind == "vllm":
        raise ConfigError(f"inference.model: {server.url} serves {known}; name one")
    return description.models[0]


def _api_key(variable: str, environ: Mapping[str, str]) -> str:
    if not variable:
        return ""
    key = environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"inference.api_key_env: the environment variable {variable} is not set")
    return key

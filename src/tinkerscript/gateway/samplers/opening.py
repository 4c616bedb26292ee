"""Opens the sampler that a config names: waits for the server, probes it, pins what was found.

Invariant: no sampler is handed out that the probe has not been through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from tinkerscript.config import InferenceConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gateway.samplers.probe import Probe, ServerFacts
from tinkerscript.gateway.samplers.remote import RemoteSampler
from tinkerscript.gateway.samplers.server import InferenceServer, ServerDescription
from tinkerscript.gateway.samplers.sglang import SglangServer
from tinkerscript.gateway.samplers.upstream import Upstream
from tinkerscript.gateway.samplers.vllm import VllmServer

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

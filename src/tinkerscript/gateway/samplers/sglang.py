"""`SglangServer`: token ids in and out of SGLang's native `POST /generate`.

The wire format, as of SGLang 0.5.23 (`python/sglang/srt/`: `managers/tokenizer_manager.py`,
`managers/schedule_batch.py`, `layers/sampler.py`, `entrypoints/http_server.py`) and the pull requests named
below; https://github.com/sgl-project/sglang, https://docs.sglang.io/basic_usage/native_api.html:

- `input_ids` is the prompt. With n = 1 the reply is an object, otherwise a list of them.
- `return_logprob` puts `[log probability, id, text or null]` for every sampled token into
  `meta_info.output_token_logprobs`; `output_ids` beside `meta_info` holds the ids too. `top_logprobs_num`
  gives `output_top_logprobs`; `logprob_start_len` gives `input_token_logprobs` from that position on.
- The log probabilities are of the distribution after temperature and before top-p and top-k (pull/2664), of
  temperature 1 for greedy sampling or with SGLANG_RETURN_ORIGINAL_LOGPROB=1 (pull/8375).
- `finish_reason` is `{"type": "stop", "matched": id or string}`, `{"type": "length", "length": n}` or
  `{"type": "abort", ...}`. The stop token is among the ids. The model's own end-of-sequence ids end a turn
  too; `ignore_eos` would turn off the request's stop ids with them, so it is not sent.
- The server's `preferred_sampling_params` fill in what a request omits, so everything is sent.
- `sampling_seed` is honored only with --enable-deterministic-inference, and then n > 1 samples one sequence
  n times: `RemoteSampler` sends n requests instead.
- `--allow-auto-truncate` silently shortens prompts; `meta_info.prompt_tokens` shows it.
- JSON has no -inf and no NaN: they arrive as null. -3.4e38 stands for -inf in some paths.
- `/abort_request` with a `rid` aborts one request; with n > 1 the requests have ids of their own, and only
  the closed connection aborts them (noticed within seconds).
- `weight_version` in `meta_info` is `default` until a weight update names it; `weight_versions`, where the
  server sends it, lists spans `{version, start, end}` of the sampled tokens.
- `/load_lora_adapter` and `/unload_lora_adapter` (0.4.10 and newer, servers with --enable-lora) answer 400 if
  they fail; unloading waits for the adapter's requests. `/v1/models` lists adapters, with their `parent`.
  A request names its adapter as `lora_path`. `extra_key` separates prefixes in the cache.
- `/update_weights_from_disk` answers 400 if it fails, and empties the cache of prefixes.
- `/metrics` is there with --enable-metrics.
- `/model_info` and `/server_info` were called `/get_model_info` and `/get_server_info`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.samplers.inference_server import (
    NOT_FINITE,
    IdsFrom,
    InferenceServer,
    MissingIdsError,
    ServerDescription,
    ServerRequest,
    ServerSample,
    Upstream,
    agreed,
    check_counts,
    check_prompt,
    contradiction,
    decode,
    metric,
)
from tinkerscript.rollouts.call import StopReason

REMEDIES = {
    "ids": "use an SGLang whose /generate returns meta_info.output_token_logprobs, with no proxy between "
    "that drops it",
    "stop": "use an SGLang whose output_token_logprobs hold the stop token",
    "logits": "SGLang sends log probabilities; check for a proxy that alters replies",
    "wrong": "use another version of SGLang, or this one without speculative decoding",
    "seed": "start SGLang with --enable-deterministic-inference",
}

_NO_ADAPTER = re.compile(r"lora.*(not loaded|never been loaded)", re.IGNORECASE)
"""How SGLang refuses a request for an adapter that it does not have."""

logger = logging.getLogger(__name__)

TokenLogprob = tuple[float | None, int, str | None]


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None


class _Span(msgspec.Struct):
    version: str


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None = None
    prompt_tokens: int | None = None
    output_token_logprobs: list[TokenLogprob] | None = None
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    input_token_logprobs: list[TokenLogprob] | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None


class _Generated(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    served_model_name: str | None = None
    weight_version: str | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _ServerInfo(msgspec.Struct):
    version: str = "unknown"
    context_length: int | None = None
    max_req_input_len: int | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class SglangServer(InferenceServer):
    """SGLang's runtime."""

    kind = "sglang"
    remedies = REMEDIES

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._aborting = set[asyncio.Task[None]]()
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._adapters = set[str]()
        """Names that stand for adapters, whether they are loaded or not."""

        self.url = upstream.url

    async def describe(self) -> ServerDescription:
        info = await self._model_info()
        body = await self._first("/server_info", "/get_server_info")
        server = decode(body, _ServerInfo) if body else _ServerInfo()
        models = await self._models()
        # The smaller limit applies: memory may allow less than the model does.
        known = [server.context_length, *(model.max_model_len for model in models)]
        limits = [limit for limit in known if limit]
        if server.max_req_input_len:
            limits.append(server.max_req_input_len + 1)
        if not limits:
            raise contradiction(f"neither {self.url}/server_info nor /v1/models reports the context length")
        names = [info.served_model_name or info.model_path, *(model.id for model in models)]
        return ServerDescription(
            models=list(dict.fromkeys(name for name in names if name)),
            adapters=[model.id for model in models if model.parent],
            max_context=min(limits),
            version=server.version,
            weight_version=info.weight_version,
        )

    async def sample(self, request: ServerRequest, model: str) -> list[ServerSample]:
        rid, adapter = uuid4().hex, model if model in self._adapters else ""
        try:
            body = await self._upstream.post("/generate", request_body(request, rid, adapter))
        except asyncio.CancelledError:
            self._abort(rid)
            raise
        except GatewayError as error:
            if adapter and _NO_ADAPTER.search(error.message):
                message = f"{self.url} no longer has the adapter {adapter} (did it restart?); retry"
                raise GatewayError(503, "engine_unavailable", message) from error
            raise
        many = body.lstrip()[:1] == b"["
        generated = decode(body, list[_Generated]) if many else [decode(body, _Generated)]
        if len(generated) != request.n:
            raise contradiction(f"{len(generated)} sequences for a request for {request.n}")
        return [_sample_of(each, request) for each in generated]

    async def weight_version(self) -> str | None:
        return (await self._model_info()).weight_version

    async def encode(self, text: str, model: str) -> list[int] | None:
        prompt = {"model": model, "prompt": text, "add_special_tokens": False}
        body = await self._upstream.post_optional("/tokenize", prompt)
        return decode(body, _Tokens).tokens if body else None

    async def load_adapter(self, name: str, folder: Path) -> None:
        self._adapters.add(name)
        if name in self._unloading:
            await self._unloading[name]
        if not await self._has(name):
            await self._upstream.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    async def unload_adapter(self, name: str) -> None:
        """In the background: it waits for the adapter's requests."""

        async def unload() -> None:
            try:
                if await self._has(name):
                    await self._upstream.post("/unload_lora_adapter", {"lora_name": name})
            except GatewayError as error:
                logger.warning("sglang.not_unloaded url=%s adapter=%s error=%s", self.url, name, error)
            finally:
                del self._unloading[name]

        if name not in self._unloading:
            self._unloading[name] = asyncio.create_task(unload())

    async def load_weights(self, name: str, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "weight_version": version, "abort_all_requests": True}
        await self._upstream.post("/update_weights_from_disk", body)

    async def sleep(self) -> None:
        """In a server with --enable-memory-saver and --enable-weights-cpu-backup."""
        await self._upstream.post("/pause_generation", {"mode": "abort"})
        await self._upstream.post("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._upstream.post("/resume_memory_occupation", {})
        await self._upstream.post("/continue_generation", {})

    async def tokens_sampled(self) -> float:
        return metric(await self._upstream.get("/metrics"), "sglang:generation_tokens_total", at=self.url)

    async def aclose(self) -> None:
        for task in self._unloading.values():
            task.cancel()
        await asyncio.gather(*self._aborting, *self._unloading.values(), return_exceptions=True)
        await self._upstream.aclose()

    async def _models(self) -> list[_Model]:
        body = await self._upstream.get("/v1/models")
        return decode(body, _Models).data if body else []

    async def _has(self, adapter: str) -> bool:
        return any(model.id == adapter for model in await self._models())

    async def _model_info(self) -> _ModelInfo:
        body = await self._first("/model_info", "/get_model_info")
        if body is None:
            raise contradiction(f"{self.url} has no /model_info: is it SGLang?")
        return decode(body, _ModelInfo)

    async def _first(self, *paths: str) -> bytes | None:
        for path in paths:
            if (body := await self._upstream.get(path)) is not None:
                return body
        return None

    def _abort(self, rid: str) -> None:
        async def send() -> None:
            await self._upstream.post_optional("/abort_request", {"rid": rid})

        task = asyncio.create_task(send())
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)


def request_body(request: ServerRequest, rid: str, adapter: str = "") -> dict[str, Any]:
    """The JSON of `POST /generate`, with every parameter that a server might default differently."""
    sampling: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        "n": request.n,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": request.repetition_penalty,
        "min_new_tokens": 0,
        "stop": request.stop,
        "stop_token_ids": request.stop_token_ids,
        "ignore_eos": False,
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    optional = {
        "rid": rid if request.n == 1 else "",
        "lora_path": adapter,
        "extra_key": request.cache_salt,
    }
    return {
        "input_ids": request.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1 if request.score_from is None else request.score_from - 1,
        "top_logprobs_num": request.top_logprobs,
        "return_text_in_logprobs": False,
        "stream": False,
        **{name: value for name, value in optional.items() if value},
    }


def _sample_of(generated: _Generated, request: ServerRequest) -> ServerSample:
    meta = generated.meta_info
    check_prompt(request.prompt, None, meta.prompt_tokens)
    stop_reason = _stop_reason(meta.finish_reason)
    if meta.output_token_logprobs is None:
        raise MissingIdsError("the reply has no meta_info.output_token_logprobs", REMEDIES["ids"])
    ids = [token for _, token, _ in meta.output_token_logprobs]
    sources: dict[IdsFrom, list[int] | None] = {
        "output_token_logprobs": ids,
        "token_ids": generated.output_ids,
    }
    agreed(sources)
    logprobs = [_finite(value) for value, _, _ in meta.output_token_logprobs]
    check_counts(ids, logprobs)
    return ServerSample(
        ids=ids,
        logprobs=logprobs,
        stop_reason=stop_reason,
        ids_from="output_token_logprobs",
        top=[_top(entry) for entry in meta.output_top_logprobs or []] if request.top_logprobs else [],
        scores=_scores(meta.input_token_logprobs or [], request),
        weight_version=meta.weight_version,
        weight_versions=[span.version for span in meta.weight_versions or []],
    )


def _top(entry: list[TokenLogprob] | None) -> dict[int, float]:
    return {token: _finite(value) for value, token, _ in entry or []}


def _scores(entries: list[TokenLogprob], request: ServerRequest) -> list[float]:
    """Entries of the last tokens; the first entry is null, or the preceding token's."""
    if request.score_from is None:
        return []
    wanted = request.prompt[request.score_from :]
    entries = entries[-len(wanted) :] if wanted else []
    if [token for _, token, _ in entries] != wanted:
        return []
    return [_finite(value) for value, _, _ in entries]


def _finite(value: float | None) -> float:
    return NOT_FINITE if value is None else value


def _stop_reason(reason: _FinishReason | None) -> StopReason:
    match reason:
        case _FinishReason(type="stop"):
            return "stop"
        case _FinishReason(type="length"):
            return "length"
        case None:
            raise contradiction("it has no finish_reason")
        case _FinishReason(type="abort", message=message):
            said = message or "no reason given"
            raise GatewayError(
                503, "engine_unavailable", f"the inference server aborted the call ({said}); retry"
            )
        case _:
            raise contradiction(f"finish_reason {reason.type!r} is neither stop nor length")

"""`VllmServer`: token ids in and out of vLLM's `POST /v1/completions`.

The wire format is vLLM 0.32.0's (`vllm/entrypoints/openai/completion/`, `vllm/v1/`); pull requests and issues
are at https://github.com/vllm-project/vllm:

- A `prompt` of ids is used unchanged. `return_token_ids` (since 0.10.2, pull/22587) adds `token_ids`
  and `prompt_token_ids` to every choice; `return_tokens_as_token_ids` writes `token_id:123` for a
  token's text. Unknown fields are ignored, so the probe checks the reply.
- `logprobs: n` reports `token_logprobs` and `top_logprobs` (the sampled token and the n most likely
  ones), with -9999.0 for anything lower. `--max-logprobs` (20) is the largest n.
- `--logprobs-mode` (since 0.10, pull/21398): the default `raw_logprobs` is at temperature 1.
  `processed_logprobs` is after temperature, top-p and top-k, normalized over the remaining tokens.
- Omitted parameters default to the model's generation_config.json, so we send all.
- `token_ids` include the stop token, or every token up to the one that completes a stop string.
  `ignore_eos` keeps the request's stop ids.
- `prompt_logprobs: 0` adds one dict per prompt token, keyed by its id; the first is null.
- n > 1 with a seed samples n different sequences, as if with consecutive seeds.
- Streaming through tool parsers loses ids (issues/27482), but completions have no parser. Each chunk
  has new `token_ids` and `token_logprobs`, the first also `prompt_token_ids`.
- `finish_reason: abort` ends requests that `/pause` or `/abort_requests` dropped.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.samplers.inference_server import Upstream
from tinkerscript.rollouts.call import StopReason, unpack_ids
from tinkerscript.sampler import SampleRequest

TOKEN_ID = "token_id:"
VLLM_REMEDIES = {
    "ids": "use vLLM 0.10.2 or newer (return_token_ids), with no proxy between that drops fields",
    "stop": "vLLM reports the stop token in token_ids; check for a proxy that alters replies",
    "logits": "start vLLM with --logprobs-mode raw_logprobs or processed_logprobs",
    "wrong": "use another version of vLLM, or this one without speculative decoding",
}


T = TypeVar("T")


NOT_FINITE = float("nan")  # The server sends null for it.


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    ids: list[int]
    logprobs: list[float]  # -9999.0 and NaN stand for values that JSON cannot hold.
    stop_reason: StopReason
    top: list[dict[int, float]] = []
    scores: list[float] = []  # Logprobs of the prompt from `score_from` on, at temperature 1.
    is_cut: bool = False  # A `Cut` ended it, so `stop_reason` means nothing.


@dataclass(frozen=True, slots=True)
class Cut:
    event: asyncio.Event
    # Whether a sample is complete for a reason unknown to the server.
    ends: Callable[[Sequence[int]], bool] | None = None


class ServerDescription(msgspec.Struct, frozen=True, kw_only=True):
    models: list[str]
    max_context: int
    adapters: list[str] = []
    version: str = "unknown"
    weight_version: str | None = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float | None


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Failure(msgspec.Struct):
    code: int = 500


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Failure | None = None  # Ends a stream.


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str = "unknown"


class _WeightInfo(msgspec.Struct):
    weight_version: str | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


class VllmServer:
    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.url = upstream.url
        self.close = upstream.close

    async def describe(self) -> ServerDescription:
        body = await self._upstream.get("/v1/models")
        models = decode(body, _Models).data if body else []
        lengths = [model.max_model_len for model in models if model.max_model_len]
        if not models or not lengths:
            raise contradiction(f"{self.url}/v1/models names no model with a max_model_len")
        version = await self._upstream.get("/version")
        return ServerDescription(
            models=[model.id for model in models],
            adapters=[model.id for model in models if model.parent],
            max_context=min(lengths),
            version=decode(version, _Version).version if version else "unknown",
            weight_version=await self.weight_version(),
        )

    async def sample(
        self,
        request: SampleRequest,
        model: str,
        *,
        cache_salt: str = "",
        score_from: int | None = None,
        cut: Cut | None = None,
    ) -> list[ServerSample]:
        """`score_from` is the first prompt position to score. Raises GatewayError 400 for a refused request,
        502 for a reply without ids or with a contradiction, and 503 or 504 without a reply.
        """
        prompt = unpack_ids(request.prompt).tolist()
        asked = request_body(request, prompt, model, cache_salt, score_from)
        if cut is not None:
            streamed = [_Streamed(request, prompt, cut.ends) for _ in range(request.num_samples)]
            await self._stream(asked, streamed, cut.event)
            return [each.sample() for each in streamed]
        completion = decode(await self._upstream.post("/v1/completions", asked), _Completion)
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        if len(choices) != request.num_samples:
            raise contradiction(f"{len(choices)} choices for a request for {request.num_samples}")
        count = completion.usage.prompt_tokens if completion.usage else None
        return [_sample_of(choice, prompt, count, request.top_logprobs, score_from) for choice in choices]

    async def _stream(self, body: dict[str, Any], samples: list[_Streamed], cut: asyncio.Event) -> None:
        reading = asyncio.ensure_future(self._read(body | {"stream": True}, samples))
        ending = asyncio.ensure_future(cut.wait())
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            reading.cancel()
            ending.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)

    async def _read(self, body: dict[str, Any], samples: list[_Streamed]) -> None:
        async with self._upstream.slot(), self._upstream.open("POST", "/v1/completions", body) as response:
            await self._upstream.check(response)
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                data = line.removeprefix("data: ").encode()
                chunk = decode(data, _Chunk)
                if chunk.error is not None:
                    self._upstream.refuse(chunk.error.code, data)
                for choice in chunk.choices:
                    if not 0 <= choice.index < len(samples):
                        raise contradiction(f"choice {choice.index} of a request for {len(samples)}")
                    samples[choice.index].take(choice)
                if all(each.stop_reason for each in samples):
                    return
        message = f"the inference server {self.url} ended a stream before its samples were complete; retry"
        raise GatewayError(503, "engine_unavailable", message)

    async def weight_version(self) -> str | None:
        body = await self._upstream.get("/weight_info")
        return decode(body, _WeightInfo).weight_version if body else None

    async def encode(self, text: str, model: str) -> list[int] | None:
        prompt = {"model": model, "prompt": text, "add_special_tokens": False}
        body = await self._upstream.post_optional("/tokenize", prompt)
        return decode(body, _Tokens).tokens if body else None

    async def unload_adapter(self, name: str) -> None:
        body = await self._upstream.get("/v1/models")
        # After a restart the server would refuse.
        if body and name in {model.id for model in decode(body, _Models).data}:
            await self._upstream.post_optional("/v1/unload_lora_adapter", {"lora_name": name})

    async def load_weights(self, name: str, version: str) -> None:
        """Load the weights of `name` and call them `version`, aborting running samples.

        A failure may leave the server paused until `resume`. It needs our plugin and a server in development
        mode.
        """
        await self._control("/init_weight_transfer_engine", init_info={"name": name})
        await self._control("/pause?mode=abort")
        await self._control("/start_weight_update")
        await self._control("/update_weights", update_info={"name": name})
        await self._control("/finish_weight_update", weight_version=version)
        await self.resume()

    async def resume(self) -> None:
        await self._control("/resume")

    async def sleep(self) -> None:
        """Free device memory, aborting running samples.

        It needs a server in development mode with --enable-sleep-mode.
        """
        await self._control("/sleep?level=1&mode=abort")

    async def wake(self) -> None:
        await self._control("/wake_up")

    async def _control(self, path: str, **body: Any) -> None:
        if await self._upstream.post_optional(path, body) is None:
            raise GatewayError(
                502, "engine_error", f"{self.url} has no {path}: start vLLM with VLLM_SERVER_DEV_MODE=1"
            )

    async def tokens_sampled(self) -> float:
        return metric(await self._upstream.get("/metrics"), "vllm:generation_tokens_total", at=self.url)

    async def aclose(self) -> None:
        await self._upstream.aclose()


class _Streamed:
    def __init__(
        self, request: SampleRequest, prompt: list[int], ends: Callable[[Sequence[int]], bool] | None
    ) -> None:
        self._request = request
        self._prompt = prompt
        self._ends = ends
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[dict[int, float]] = []
        self.stop_reason: StopReason | None = None

    def take(self, choice: _Choice) -> None:
        found = _tokens_of(choice, self._prompt, None, self._request.top_logprobs)
        for number, (token, logprob) in enumerate(zip(*found[:2], strict=True)):
            if self.stop_reason:
                return
            self._ids.append(token)
            self._logprobs.append(logprob)
            self._top += found[2][number : number + 1]
            if self._ends and self._ends(self._ids):
                self.stop_reason = "stop"
        if choice.finish_reason:
            self.stop_reason = self.stop_reason or _stop_reason(choice.finish_reason)

    def sample(self) -> ServerSample:
        return ServerSample(
            ids=self._ids,
            logprobs=self._logprobs,
            stop_reason=self.stop_reason or "length",
            top=self._top,
            is_cut=self.stop_reason is None,
        )


def request_body(
    request: SampleRequest, prompt: list[int], model: str, cache_salt: str, score_from: int | None
) -> dict[str, Any]:
    # Send every parameter that may have another default.
    stop_token_ids = [*request.stop_token_ids, *request.extra_stop_ids]
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "n": request.num_samples,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": request.repetition_penalty,
        "min_tokens": 0,
        "stop": request.stop,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": bool(stop_token_ids),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
        "echo": False,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if score_from is not None:
        body["prompt_logprobs"] = 0
    if cache_salt:
        body["cache_salt"] = cache_salt
    return body


def _sample_of(
    choice: _Choice, prompt: list[int], count: int | None, top: int, score_from: int | None
) -> ServerSample:
    ids, logprobs, likeliest = _tokens_of(choice, prompt, count, top)
    return ServerSample(
        ids=ids,
        logprobs=logprobs,
        stop_reason=_stop_reason(choice.finish_reason),
        top=likeliest,
        scores=_scores(choice.prompt_logprobs or [], prompt, score_from),
    )


def _tokens_of(
    choice: _Choice, prompt: list[int], count: int | None, top: int
) -> tuple[list[int], list[float], list[dict[int, float]]]:
    check_prompt(prompt, choice.prompt_token_ids, count)
    if choice.logprobs is None or choice.token_ids is None:
        raise contradiction(f"it has no token_ids or no logprobs; {VLLM_REMEDIES['ids']}")
    logprobs = [NOT_FINITE if value is None else value for value in choice.logprobs.token_logprobs]
    check_counts(choice.token_ids, logprobs)
    check_ids(choice.token_ids)
    likeliest = [_top(entry) for entry in choice.logprobs.top_logprobs or []] if top else []
    return choice.token_ids, logprobs, likeliest


def _top(entry: dict[str, float | None] | None) -> dict[int, float]:
    try:
        found = {
            int(token.removeprefix(TOKEN_ID)): NOT_FINITE if value is None else value
            for token, value in (entry or {}).items()
        }
    except ValueError as error:
        raise contradiction(f"top_logprobs has no ids ({error}); {VLLM_REMEDIES['ids']}") from error
    check_ids(found)
    return found


def _scores(
    entries: list[dict[str, _PromptLogprob] | None], prompt: list[int], score_from: int | None
) -> list[float]:
    if score_from is None or len(entries) != len(prompt):
        return []
    scores: list[float] = []
    for token, entry in list(zip(prompt, entries, strict=True))[score_from:]:
        found = (entry or {}).get(str(token))
        scores.append(NOT_FINITE if found is None or found.logprob is None else found.logprob)
    return scores


def _stop_reason(reason: str | None) -> StopReason:
    match reason:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort" | None:
            raise GatewayError(503, "engine_unavailable", "the inference server aborted the call; retry")
        case _:
            raise contradiction(f"finish_reason {reason!r} is neither stop nor length")


def metric(body: bytes | None, name: str, *, at: str) -> float:
    pattern = rf"^{name}(?:{{[^}}]*}})? (\S+)$"
    found = re.findall(pattern, (body or b"").decode(errors="replace"), re.MULTILINE)
    if not found:
        raise GatewayError(502, "engine_error", f"{at}/metrics has no {name}")
    return sum(float(each) for each in found)


def contradiction(message: str) -> GatewayError:
    return GatewayError(502, "engine_error", f"the inference server's reply cannot be used: {message}")


def check_counts(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    if len(ids) != len(logprobs):
        raise contradiction(f"logprob and token counts differ ({len(logprobs)} and {len(ids)})")


def check_ids(ids: Collection[int]) -> None:
    if ids and not 0 <= min(ids) <= max(ids) < 2**31:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise contradiction(f"{wrong} is no token id; {VLLM_REMEDIES['wrong']}")


def check_prompt(sent: Sequence[int], used: Sequence[int] | None, count: int | None) -> None:
    if used is not None and list(used) != list(sent):
        raise contradiction(
            f"it sampled after another prompt than the one sent ({len(used)} ids for {len(sent)})"
        )
    if count is not None and count != len(sent):
        raise contradiction(f"it counts {count} prompt tokens where {len(sent)} were sent")


def decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise contradiction(f"its form is unknown ({error})") from error

"""`InferenceServer`: the seam to a kind of server that samples for us, and `Upstream`, the HTTP connection
to one.

`ServerRequest` goes out, `ServerSample`s come back. Invariants: ids and log probabilities are what the
server reported, one log probability per id; nothing is derived from text, and a reply that contradicts
itself is an error. A request that may have sampled is retried at most once, and only if not a single byte of
a reply came; a cancelled request closes its connection, which is how servers learn that nobody waits.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import StopReason

CONNECT_TIMEOUT_S = 5.0


_CONTEXT = re.compile(r"context length|maximum context|longer than the model|max_model_len", re.IGNORECASE)
"""How the servers say that a prompt does not fit."""


_SHOWN = 500
"""Characters of a server's message that an error quotes."""


_NOTHING_ANSWERED = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError)
"""Errors which, before the first byte of a reply, mean that there is none."""


class Upstream:
    """HTTP to one server, with at most `max_in_flight` requests at a time. Raises only GatewayError."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str = "",
        max_in_flight: int = 256,
        timeout_s: float = 300.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`base_url` may end in `/v1`, as OpenAI's clients expect it."""
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._slots = asyncio.Semaphore(max_in_flight)
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=max_in_flight + 8, max_keepalive_connections=max_in_flight),
            transport=transport,
            trust_env=False,
        )

    async def get(self, path: str) -> bytes | None:
        """The body of the reply; None if the server has no such path. Raises GatewayError."""
        return await self._send("GET", path, None)

    async def post(self, path: str, body: Any) -> bytes:
        """The body of the reply to JSON `body`. Raises GatewayError."""
        async with self._slots:
            reply = await self._send("POST", path, msgspec.json.encode(body))
        if reply is None:
            raise GatewayError(502, "engine_error", f"{self.url} has no {path}")
        return reply

    async def post_optional(self, path: str, body: Any) -> bytes | None:
        """`post` without the limit on requests in flight; None if the server has no such path."""
        return await self._send("POST", path, msgspec.json.encode(body))

    async def aclose(self) -> None:
        """Close the pool."""
        await self._http.aclose()

    async def _send(self, method: str, path: str, content: bytes | None) -> bytes | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._exchange(method, path, content)
        except httpx.ConnectTimeout:
            raise GatewayError(503, "engine_unavailable", f"cannot connect to {self.url}; retry") from None
        except TimeoutError:
            message = f"the inference server {self.url} did not answer within {self._timeout_s:g} s"
            raise GatewayError(504, "engine_timeout", message) from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            message = f"the inference server {self.url} is unreachable ({reason}); retry"
            raise GatewayError(503, "engine_unavailable", message) from error
        if response.status_code == 404 and not _has_message(response.content):
            return None
        if not response.is_success:
            raise self._refusal(response)
        return response.content

    async def _exchange(self, method: str, path: str, content: bytes | None) -> httpx.Response:
        headers = {"Content-Type": "application/json"} if content is not None else {}
        request = self._http.build_request(method, path, content=content, headers=headers)
        try:
            response = await self._http.send(request, stream=True)
        except _NOTHING_ANSWERED:
            # A pooled connection that the server has closed, or a server that is restarting.
            response = await self._http.send(request, stream=True)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response

    def _refusal(self, response: httpx.Response) -> GatewayError:
        status, said = response.status_code, message_of_refusal(response.content)
        if status in (400, 413, 422):
            if is_context_error(said):
                return GatewayError(400, "context_length_exceeded", said, param="messages")
            return GatewayError(400, "invalid_request", f"the inference server refused the request: {said}")
        if status in (401, 403):
            message = f"{self.url} refused our key (HTTP {status}: {said}); see inference.api_key_env"
            return GatewayError(502, "engine_error", message)
        if status in (408, 504):
            return GatewayError(504, "engine_timeout", f"{self.url} timed out: {said}")
        if status == 429 or status >= 500:
            return GatewayError(503, "engine_unavailable", f"{self.url} answered {status}: {said}; retry")
        return GatewayError(502, "engine_error", f"{self.url} answered {status}: {said}")


class _Detail(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """`{"error": {"message": ...}}` (both servers), `{"error": "..."}`, `{"message": ...}` (older vLLM)."""

    error: _Detail | str | None = None
    message: str = ""
    detail: Any = None


def message_of_refusal(body: bytes) -> str:
    """The message of an error body, or the body itself."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:_SHOWN].decode(errors="replace")
    error = refusal.error.message if isinstance(refusal.error, _Detail) else refusal.error
    return str(error or refusal.message or refusal.detail or body[:_SHOWN].decode(errors="replace"))[:_SHOWN]


def is_context_error(said: str) -> bool:
    """Whether a server says that a prompt does not fit."""
    return _CONTEXT.search(said) is not None


def _has_message(body: bytes) -> bool:
    """Whether a 404 came from an endpoint that exists (an unknown model), not from a missing one."""
    try:
        refusal = msgspec.json.decode(body, type=_Refusal)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return bool(refusal.error or refusal.message)


IdsFrom = Literal["token_ids", "token_id strings", "output_token_logprobs"]
"""The field of a reply that has the sampled ids."""


T = TypeVar("T")


NOT_FINITE = float("nan")
"""A log probability that the server sent as null: JSON has neither -inf nor NaN."""


class MissingIdsError(GatewayError):
    """A reply without the sampled ids. `remedy` names the flag or version to use."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(502, "engine_error", f"{message}; {remedy}")
        self.remedy = remedy


class ServerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a server; lengths are in tokens."""

    prompt: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    stop: list[str] = []
    top_logprobs: int = 0
    """How many of the most likely ids to report at each position."""

    cache_salt: str = ""
    """Requests with another salt share no cached prefixes with this one; empty: none."""

    score_from: int | None = None
    """Also report the log probabilities of the prompt's tokens from this position on."""


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled sequence, as the server reported it."""

    ids: list[int]
    logprobs: list[float]
    """One per id. -9999.0 and NaN stand for values that the server could not send."""

    stop_reason: StopReason
    ids_from: IdsFrom
    top: list[dict[int, float]] = []
    """The most likely ids of each position, with their log probabilities, if requested."""

    scores: list[float] = []
    """Log probabilities of the prompt's tokens from `ServerRequest.score_from` on, at temperature 1."""

    weight_version: str | None = None
    """The server's name for its weights at the end of the request, if replies have it."""

    weight_versions: list[str] = []
    """All weights that sampled this, oldest first, if the server keeps track."""


class ServerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a server reports about itself."""

    models: list[str]
    """Names that requests may use."""

    max_context: int
    """Maximum length of prompt and reply together, in tokens."""

    adapters: list[str] = []
    """Those of `models` that are adapters over another one."""

    version: str = "unknown"
    """Version of the server's software."""

    weight_version: str | None = None
    """The server's name for its weights; None if it has none."""


class InferenceServer(ABC):
    """A server that takes and returns token ids. Subclasses know the wire format."""

    kind: str
    """`vllm` or `sglang`."""

    url: str
    remedies: dict[str, str]
    """What is wrong (`ids`, `stop`, `logits`, `wrong`, `seed`) -> what to do about it."""

    @abstractmethod
    async def describe(self) -> ServerDescription:
        """Raises GatewayError."""

    @abstractmethod
    async def sample(self, request: ServerRequest, model: str) -> list[ServerSample]:
        """Sample `request.n` sequences, in order.

        Raises MissingIdsError; GatewayError: 400 for a request that the server refuses, 502 for a reply that
        contradicts itself or the request, 503 and 504 if no reply came.
        """

    @abstractmethod
    async def weight_version(self) -> str | None:
        """The server's current name for its weights; None if it has none. Raises GatewayError."""

    @abstractmethod
    async def encode(self, text: str, model: str) -> list[int] | None:
        """Ids of `text` by the server's tokenizer; None if it has no such endpoint. Raises GatewayError."""

    @abstractmethod
    async def load_adapter(self, name: str, folder: Path) -> None:
        """Have `name`, as a request's `model`, be the adapter in `folder`. Raises GatewayError."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, if it is loaded. Raises GatewayError."""

    @abstractmethod
    async def load_weights(self, name: str, folder: Path, version: str) -> None:
        """Replace all weights with those in `folder`, and call them `version`; what is sampled meanwhile is
        aborted. Raises GatewayError.
        """

    @abstractmethod
    async def sleep(self) -> None:
        """Give up the memory of its devices; what is sampled is aborted. Raises GatewayError."""

    @abstractmethod
    async def wake(self) -> None:
        """Take the memory back, with the weights that it had. Raises GatewayError."""

    @abstractmethod
    async def tokens_sampled(self) -> float:
        """How many tokens the server has sampled, by its metrics. Raises GatewayError."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""


def metric(body: bytes | None, name: str, *, at: str) -> float:
    """The sum of a metric in Prometheus's text format; `at`: whose it is. Raises GatewayError 502."""
    pattern = rf"^{name}(?:{{[^}}]*}})? (\S+)$"
    found = re.findall(pattern, (body or b"").decode(errors="replace"), re.MULTILINE)
    if not found:
        raise GatewayError(502, "engine_error", f"{at}/metrics has no {name}")
    return sum(float(each) for each in found)


def contradiction(message: str) -> GatewayError:
    """The error for a reply that cannot be recorded as what was sampled."""
    return GatewayError(502, "engine_error", f"the inference server's reply cannot be used: {message}")


def check_counts(ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Raise GatewayError 502 unless there is one log probability per id."""
    if len(ids) != len(logprobs):
        raise contradiction(f"logprob and token counts differ ({len(logprobs)} and {len(ids)})")


def check_prompt(sent: Sequence[int], used: Sequence[int] | None, count: int | None) -> None:
    """Raise GatewayError 502 if the server sampled after another prompt than `sent`.

    `used` and `count`: the prompt and its length as the server reports them, if it does.
    """
    if used is not None and list(used) != list(sent):
        raise contradiction(
            f"it sampled after another prompt than the one sent ({len(used)} ids for {len(sent)})"
        )
    if count is not None and count != len(sent):
        raise contradiction(f"it counts {count} prompt tokens where {len(sent)} were sent")


def agreed(sources: dict[IdsFrom, list[int] | None]) -> tuple[IdsFrom, list[int]] | None:
    """The first field that has ids. Raises GatewayError 502 if another one has different ids."""
    found: list[tuple[IdsFrom, list[int]]] = [(name, ids) for name, ids in sources.items() if ids is not None]
    if not found:
        return None
    name, ids = found[0]
    for other, others in found[1:]:
        if others != ids:
            raise contradiction(f"its ids in {name} and in {other} differ")
    return name, ids


def decode(body: bytes, kind: type[T]) -> T:
    """Decode JSON as `kind`. Raises GatewayError 502."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise contradiction(f"its form is unknown ({error})") from error

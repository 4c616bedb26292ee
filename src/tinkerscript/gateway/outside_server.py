"""`OutsideServer`: chat completions of an OpenAI-compatible server that a role names.

Invariants: its key goes into the `Authorization` header of requests to it, and nowhere else: no error quotes
a refusal of the key, nor any text that has the key in it. At most `max_in_flight` requests are open, and none
for longer than `timeout_s`; redirects are not followed.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from tinkerscript.config import RoleConfig, RunConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.dialects.dialect import FinishReason
from tinkerscript.gateway.samplers.inference_server import is_context_error, message_of_refusal

CONNECT_TIMEOUT_S = 5.0

MAX_REPLY_BYTES = 16 * 2**20

_FINISH: Mapping[str | None, FinishReason] = {
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
"""What a server says -> why the reply ended; everything else is its end."""

logger = logging.getLogger(__name__)


class TextDelta(Struct, frozen=True):
    """New text of one choice."""

    index: int
    content: str
    reasoning: str


class OutsideChoice(Struct, kw_only=True):
    """One reply, whole."""

    message: ChatMessage
    finish_reason: FinishReason


class OutsideReply(Struct, kw_only=True):
    """The answer to one request."""

    choices: list[OutsideChoice]
    tokens: tuple[int, int]
    """Of the prompt, and of all choices, as the server counted them; 0 if it did not."""


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(Struct):
    """A message, or what is new of one."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    index: int = 0
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Body(Struct):
    """A completion, or a chunk of one."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


_READ_BODY = msgspec.json.Decoder(_Body).decode
_READ_MODELS = msgspec.json.Decoder(_Models).decode


class OutsideServer:
    """The server of one role. Raises only GatewayError, and names the role, never the address."""

    def __init__(
        self,
        role: str,
        config: RoleConfig,
        *,
        api_key: str = "",
        processes: int = 1,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`processes`: that share `max_in_flight`."""
        self.role = role
        self.max_tokens = config.max_tokens
        self._model = config.model
        self._timeout_s = config.timeout_s
        self._key = api_key
        self._limit = max(1, config.max_in_flight // max(1, processes))
        self._slots = asyncio.Semaphore(self._limit)
        self._length_field = "max_tokens"
        self._closing = asyncio.Event()
        self._http = httpx.AsyncClient(
            base_url=config.base_url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=self._limit + 1, max_keepalive_connections=self._limit),
            transport=transport,
            trust_env=False,
        )

    async def ask(
        self,
        request: Mapping[str, Any],
        *,
        max_tokens: int,
        n: int = 1,
        report: Callable[[TextDelta], None] | None = None,
    ) -> OutsideReply:
        """The answer to a chat request with these fields. `report` gets its text as it comes.

        Raises GatewayError: 400 for what the server refuses, 429 or 503 to try again, 504 if it takes longer
        than its time limit, 502 for an answer that is none.
        """
        closing = asyncio.create_task(self._closing.wait())
        asking = asyncio.create_task(self._ask(request, max_tokens, n, report))
        try:
            await asyncio.wait((asking, closing), return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                message = "is not asked any more: the interchange server is shutting down; retry"
                raise self._error(503, "role_unavailable", message)
            return asking.result()
        finally:
            for task in (asking, closing):
                task.cancel()
            await asyncio.gather(asking, closing, return_exceptions=True)

    def close(self) -> None:
        """Refuse requests from now on, and those that wait."""
        self._closing.set()

    async def aclose(self) -> None:
        """Close the connections."""
        self.close()
        await self._http.aclose()

    async def _ask(
        self,
        request: Mapping[str, Any],
        max_tokens: int,
        n: int,
        report: Callable[[TextDelta], None] | None,
    ) -> OutsideReply:
        async with self._slot():
            try:
                async with asyncio.timeout(self._timeout_s):
                    body = {"model": await self._model_name(), **request}
                    if n > 1:
                        body["n"] = n
                    reply = _Reading(n, report)
                    await self._send(body, max_tokens, reply)
                    return reply.result()
            except TimeoutError:
                message = f"did not answer within {self._timeout_s:g} s (roles.{self.role}.timeout_s)"
                raise self._error(504, "role_timeout", message) from None
            except httpx.HTTPError as error:
                # Its text may have the address, whose parts are nobody's business.
                message = f"cannot be reached ({type(error).__name__}); retry"
                raise self._error(503, "role_unavailable", message) from None
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
                message = f"sent what is no chat completion: {self._without_key(str(error))}"
                raise self._error(502, "role_error", message) from None

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        """One of the requests that may be open. Raises GatewayError 503 if there is none in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._slots.acquire()
        except TimeoutError:
            message = (
                f"has had {self._limit} requests open for {self._timeout_s:g} s, which is all that it may "
                f"have (roles.{self.role}.max_in_flight); retry"
            )
            raise self._error(503, "role_busy", message) from None
        try:
            yield
        finally:
            self._slots.release()

    async def _model_name(self) -> str:
        """The config's, or that of the only model that the server has."""
        if not self._model:
            async with self._open("GET", "/v1/models", None) as response:
                names = [model.id for model in _READ_MODELS(await _body_of(response)).data]
            if len(names) != 1:
                message = f"serves {len(names)} models; name one of them in roles.{self.role}.model"
                raise self._error(502, "role_error", message)
            self._model = names[0]
        return self._model

    async def _send(self, body: dict[str, Any], max_tokens: int, reply: _Reading) -> None:
        """Post `body`, and read the answer; a server that wants the other name of the limit gets that."""
        for _ in range(2):
            try:
                await self._post({**body, self._length_field: max_tokens}, reply)
            except GatewayError as error:
                if self._length_field != "max_tokens" or "max_completion_tokens" not in error.message:
                    raise
                self._length_field = "max_completion_tokens"
            else:
                return

    async def _post(self, body: dict[str, Any], reply: _Reading) -> None:
        if reply.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._open("POST", "/v1/chat/completions", msgspec.json.encode(body)) as response:
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                reply.whole(_READ_BODY(await _body_of(response)))
                return
            async for data in _events_of(response):
                reply.chunk(_READ_BODY(data))

    @asynccontextmanager
    async def _open(self, method: str, path: str, content: bytes | None) -> AsyncGenerator[httpx.Response]:
        """The answer to a request, unread. Raises GatewayError for one that is a refusal."""
        headers = {"Content-Type": "application/json"} if content is not None else {}
        request = self._http.build_request(method, path, content=content, headers=headers)
        response = await self._http.send(request, stream=True)
        try:
            if not response.is_success:
                raise self._refusal(response.status_code, await _body_of(response))
            yield response
        finally:
            await response.aclose()

    def _refusal(self, status: int, body: bytes) -> GatewayError:
        if status in (401, 403):  # What it says may have the key in it, in parts.
            message = f"refused the run's key (HTTP {status}); see roles.{self.role}.api_key_env"
            return self._error(502, "role_error", message)
        said = self._without_key(message_of_refusal(body))
        if status in (400, 413, 422):
            code = "context_length_exceeded" if is_context_error(said) else "invalid_request"
            return self._error(400, code, f"refused the request: {said}")
        if status in (408, 504):
            return self._error(504, "role_timeout", f"timed out: {said}")
        if status == 429:
            return self._error(429, "role_rate_limited", f"has too many requests: {said}")
        if status >= 500:
            return self._error(503, "role_unavailable", f"answered {status}: {said}; retry")
        return self._error(502, "role_error", f"answered {status}: {said}")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "(the key)") if self._key else text

    def _error(self, status: int, code: str, what: str) -> GatewayError:
        message = f"the server of the role {self.role!r} {what}"
        logger.info("role.failed role=%s status=%d code=%s message=%s", self.role, status, code, message)
        return GatewayError(status, code, message)


class _Reading:
    """The choices of one answer as they come, whole or in chunks."""

    def __init__(self, n: int, report: Callable[[TextDelta], None] | None) -> None:
        self.streams = report is not None
        self._report = report
        self._messages = [_Gathered() for _ in range(n)]
        self._tokens = (0, 0)

    def whole(self, body: _Body) -> None:
        """Take a completion. Raises ValueError for one that has an error, or too many choices."""
        self._take(body, [each.message for each in body.choices])

    def chunk(self, body: _Body) -> None:
        """Take a chunk. Raises as `whole`."""
        self._take(body, [each.delta for each in body.choices])

    def result(self) -> OutsideReply:
        """Raises ValueError if a choice is missing or has not ended."""
        missing = [index for index, each in enumerate(self._messages) if not each.ended]
        if missing:
            raise ValueError(f"{len(missing)} of {len(self._messages)} choices are missing or cut off")
        return OutsideReply(choices=[each.choice() for each in self._messages], tokens=self._tokens)

    def _take(self, body: _Body, messages: list[_Message | None]) -> None:
        if body.error is not None:
            raise ValueError(f"an error instead: {message_of_refusal(msgspec.json.encode(body))}")
        if body.usage is not None:
            self._tokens = (max(0, body.usage.prompt_tokens or 0), max(0, body.usage.completion_tokens or 0))
        for choice, message in zip(body.choices, messages, strict=True):
            if not 0 <= choice.index < len(self._messages):
                raise ValueError(f"a choice number {choice.index} of {len(self._messages)}")
            gathered = self._messages[choice.index]
            if message is not None:
                content, reasoning = gathered.add(message)
                if self._report and (content or reasoning):
                    self._report(TextDelta(choice.index, content, reasoning))
            gathered.ended = gathered.ended or choice.finish_reason


class _Gathered:
    """One choice so far."""

    def __init__(self) -> None:
        self.ended: str | None = None
        """Why, once it has."""

        self._content = list[str]()
        self._reasoning = list[str]()
        self._calls: dict[int, _ToolCall] = {}

    def add(self, new: _Message) -> tuple[str, str]:
        """The new content and reasoning."""
        content, reasoning = new.content or new.refusal or "", new.reasoning_content or new.reasoning or ""
        self._content.append(content)
        self._reasoning.append(reasoning)
        numbered = len({call.index for call in new.tool_calls or ()}) == len(new.tool_calls or ())
        for position, call in enumerate(new.tool_calls or ()):
            known = self._calls.setdefault(call.index if numbered else position, _ToolCall())
            known.id = known.id or call.id
            known.function.name = known.function.name or call.function.name
            known.function.arguments = (known.function.arguments or "") + (call.function.arguments or "")
        return content, reasoning

    def choice(self) -> OutsideChoice:
        """Raises ValueError for a tool call without a name."""
        message: ChatMessage = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [_tool_call(at, call) for at, call in sorted(self._calls.items())]
        finish = _FINISH.get(self.ended, "stop")
        return OutsideChoice(message=message, finish_reason="tool_calls" if self._calls else finish)


def _tool_call(position: int, call: _ToolCall) -> dict[str, Any]:
    name, arguments = call.function.name, call.function.arguments or "{}"
    if not name:
        raise ValueError("a tool call without a name")
    json.loads(arguments)
    return {
        "id": call.id or f"call_{position}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


async def _body_of(response: httpx.Response) -> bytes:
    """Raises ValueError for one that is too long."""
    parts, size = list[bytes](), 0
    async for part in response.aiter_bytes():
        parts.append(part)
        size += len(part)
        _check_size(size)
    return b"".join(parts)


async def _events_of(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to `[DONE]`. Raises ValueError for an answer that is too long."""
    size = 0
    async for line in response.aiter_lines():
        size += len(line)
        _check_size(size)
        name, _, value = line.partition(":")
        data = value.strip()
        if name != "data" or not data:
            continue
        if data == "[DONE]":
            return
        yield data.encode()


def _check_size(size: int) -> None:
    if size > MAX_REPLY_BYTES:
        raise ValueError(f"an answer of more than {MAX_REPLY_BYTES} bytes")


@asynccontextmanager
async def outside_servers(
    config: RunConfig, environ: Mapping[str, str], *, processes: int = 1
) -> AsyncGenerator[dict[str, OutsideServer]]:
    """The outside servers of a run by role, not contacted yet. Leaving the context closes their connections.

    `processes`: that ask them at a time. Raises ConfigError for a key that is not set.
    """
    async with AsyncExitStack() as stack:
        servers: dict[str, OutsideServer] = {}
        for name, role in config.episode_roles.items():
            if role.kind == "outside":
                key = _key_of(name, role, environ)
                servers[name] = OutsideServer(name, role, api_key=key, processes=processes)
                stack.push_async_callback(servers[name].aclose)
        yield servers


def _key_of(name: str, role: RoleConfig, environ: Mapping[str, str]) -> str:
    key = environ.get(role.api_key_env, "").strip() if role.api_key_env else ""
    if role.api_key_env and not key:
        raise ConfigError(f"roles.{name}.api_key_env: the environment variable {role.api_key_env} is not set")
    return key

"""`OutsideServer` requests chat completions from a role's OpenAI-compatible server.

Only this server gets the key, and redirects are not followed.

Source: https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from msgspec import Struct

from tinkerscript.config import RoleConfig, RunConfig
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage
from tinkerscript.gateway.dialects.dialect import FinishReason
from tinkerscript.gateway.samplers.inference_server import Upstream, message_of_refusal


class OutsideReply(Struct, kw_only=True):
    message: ChatMessage
    finish_reason: FinishReason
    tokens: tuple[int, int]  # Prompt and reply by the server's count, or 0.


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Body(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


IN_FLIGHT = 64  # Per role, over all gateway processes.
_READ_BODY = msgspec.json.Decoder(_Body).decode


class OutsideServer:
    """Raises only GatewayError, which contains the role but not the address."""

    def __init__(
        self,
        role: str,
        config: RoleConfig,
        *,
        api_key: str = "",
        timeout_s: float,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self._model = config.model
        self._length_field = "max_tokens"
        self._upstream = Upstream(
            config.base_url,
            name=f"the server of the role {role!r}",
            api_key=api_key,
            key_setting=f"roles.{role}.api_key_env",
            max_in_flight=in_flight,
            timeout_s=timeout_s,
        )
        self.close = self._upstream.close
        self.aclose = self._upstream.aclose

    async def ask(
        self,
        request: Mapping[str, Any],
        *,
        max_tokens: int,
        report: Callable[[str, str], None] | None = None,
    ) -> OutsideReply:
        """Raises 400 if the server refuses, 503 if a retry may help, 504 after the timeout, and 502 for a
        malformed reply.
        """
        body: dict[str, Any] = {"model": self._model, **request}
        if report:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._upstream.slot():
            try:
                return await self._post({**body, self._length_field: max_tokens}, report)
            except GatewayError as error:
                if self._length_field != "max_tokens" or "max_completion_tokens" not in error.message:
                    raise
            self._length_field = "max_completion_tokens"
            return await self._post({**body, self._length_field: max_tokens}, report)

    async def _post(self, body: Mapping[str, Any], report: Callable[[str, str], None] | None) -> OutsideReply:
        reply = _Reading(report)
        try:
            async with self._upstream.open("POST", "/v1/chat/completions", body) as response:
                await self._upstream.check(response)
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    reply.add(_READ_BODY(await response.aread()))
                    return reply.result()
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        break
                    if data and line.startswith("data:"):
                        reply.add(_READ_BODY(data))
                return reply.result()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            said = self._upstream.without_key(str(error))
            message = f"{self._upstream.name} sent no chat completion: {said}"
            raise GatewayError(502, "engine_error", message) from None


class _Reading:
    def __init__(self, report: Callable[[str, str], None] | None) -> None:
        self._report = report
        self._content = ""
        self._reasoning = ""
        self._calls: dict[int, _ToolCall] = {}
        self._finish: str | None = None
        self._tokens = (0, 0)

    def add(self, body: _Body) -> None:
        if body.error is not None:
            raise ValueError(f"an error instead: {message_of_refusal(msgspec.json.encode(body))}")
        if body.usage is not None:
            self._tokens = (body.usage.prompt_tokens or 0, body.usage.completion_tokens or 0)
        for choice in body.choices:
            self._finish = self._finish or choice.finish_reason
            if new := choice.message or choice.delta:
                self._take(new)

    def result(self) -> OutsideReply:
        if not self._finish:
            raise ValueError("its choice is missing or cut off")
        message: ChatMessage = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [_tool_call(at, call) for at, call in sorted(self._calls.items())]
        finish: FinishReason = "length" if self._finish == "length" else "stop"
        return OutsideReply(
            message=message, finish_reason="tool_calls" if self._calls else finish, tokens=self._tokens
        )

    def _take(self, new: _Message) -> None:
        content, reasoning = new.content or new.refusal or "", new.reasoning_content or new.reasoning or ""
        self._content += content
        self._reasoning += reasoning
        if self._report and (content or reasoning):
            self._report(reasoning, content)
        for position, call in enumerate(new.tool_calls or ()):
            known = self._calls.setdefault(position if call.index is None else call.index, _ToolCall())
            known.id = known.id or call.id
            known.function.name = known.function.name or call.function.name
            known.function.arguments = (known.function.arguments or "") + (call.function.arguments or "")


def _tool_call(position: int, call: _ToolCall) -> dict[str, Any]:
    name, arguments = call.function.name, call.function.arguments or "{}"
    if not name:
        raise ValueError("a tool call without a name")
    json.loads(arguments)
    function = {"name": name, "arguments": arguments}
    return {"id": call.id or f"call_{position}", "type": "function", "function": function}


@asynccontextmanager
async def outside_servers(
    config: RunConfig, environ: Mapping[str, str], *, processes: int = 1
) -> AsyncGenerator[dict[str, OutsideServer]]:
    """`processes` share the limit of open requests."""
    async with AsyncExitStack() as stack:
        servers: dict[str, OutsideServer] = {}
        for name, role in config.episode_roles.items():
            if role.kind == "outside":
                key = _key_of(name, role, environ)
                servers[name] = OutsideServer(
                    name,
                    role,
                    api_key=key,
                    timeout_s=config.interchange_server.call_timeout_s,
                    in_flight=IN_FLIGHT // max(1, processes),
                )
                stack.push_async_callback(servers[name].aclose)
        yield servers


def _key_of(name: str, role: RoleConfig, environ: Mapping[str, str]) -> str:
    key = environ.get(role.api_key_env, "").strip() if role.api_key_env else ""
    if role.api_key_env and not key:
        raise ConfigError(f"roles.{name}.api_key_env: the environment variable {role.api_key_env} is not set")
    return key

"""`OutsideModel` answers the calls of a role from an outside server.

Only text is known, so calls never train. Answers count toward the claim's limits, even after a disconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tinkerscript.asgi import Caller
from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool
from tinkerscript.gateway.claim_book import ClaimBook
from tinkerscript.gateway.dialects.dialect import (
    Choice,
    Completion,
    Dialect,
    ModelCall,
    ReplyHeader,
    TokenCounter,
)
from tinkerscript.gateway.idempotency import choice_id
from tinkerscript.gateway.named_model import ClaimState, NamedModel, PreparedRequest
from tinkerscript.gateway.outside_server import OutsideReply, OutsideServer
from tinkerscript.gateway.sampled_model import unknown_model
from tinkerscript.gateway.streamed_reply import StreamedReply
from tinkerscript.rollouts.call import FOREIGN_POLICY, Call
from tinkerscript.tokenizer import LightTokenizer

REPLY_TOKENS = 4096
MAX_TIMEOUTS = 16  # A server may charge for timed-out requests.


logger = logging.getLogger(__name__)


class TextOnly:
    images = None
    uses_template = False
    max_context = 2**31

    def __init__(self, tokenizer: LightTokenizer) -> None:
        self.tokenizer = tokenizer

    def render(self, messages: list[ChatMessage], tools: list[Tool]) -> list[int]:
        return []

    def extend(
        self,
        tail: list[int],
        sampled: list[int],
        messages: list[ChatMessage],
        tools: list[Tool],
        history: Callable[[], list[ChatMessage]],
    ) -> list[int]:
        return []


class OutsideModel(NamedModel):
    def __init__(
        self, role: str, *, claims: ClaimBook, tokenizer: LightTokenizer, server: OutsideServer
    ) -> None:
        super().__init__(role, claims, TextOnly(tokenizer), role=role)
        self._server = server
        self._timeouts: dict[tuple[str, int], int] = {}

    def forget(self, episode_uuid: str, attempt: int) -> None:
        super().forget(episode_uuid, attempt)
        self._timeouts.pop((episode_uuid, attempt), None)

    def _check(self, call: ModelCall) -> None:
        if call.model != self.name:
            raise unknown_model(call.model, [self.name])
        refused = {
            "prompt": (bool(call.prompts), "use messages"),
            "n": (call.n > 1, "ask once for each choice"),
            "return_token_ids": (call.return_token_ids, "leave it out"),
            "stop_token_ids": (bool(call.stop_token_ids), "leave it out"),
            "logprobs": (call.logprobs or bool(call.top_logprobs), "leave it out"),
        }
        for field, (is_set, remedy) in refused.items():
            if is_set:
                message = f"{field}: the role {self.name!r} is an outside server without token ids; {remedy}"
                raise GatewayError(400, "unsupported_parameter", message, param=field)

    async def _count(self, dialect: TokenCounter[Any], caller: Caller, body: bytes) -> None:
        await self._claims.open(caller.key)
        message = f"the role {self.name!r} is an outside server: its tokens cannot be counted here"
        raise GatewayError(400, "unsupported_parameter", message, param="model")

    def _streamed(self, dialect: Dialect[Any], call: ModelCall, header: ReplyHeader) -> StreamedReply:
        return StreamedReply(dialect.events(call, header), [None])

    async def _completed(
        self, prepared: PreparedRequest, caller: Caller, live: StreamedReply | None
    ) -> Completion:
        if live is None:
            return await self._asked(prepared, None)
        asking = asyncio.create_task(self._asked(prepared, live.add_text))
        try:
            await live.follow(asking, caller)
        finally:
            await asyncio.wait((asking,))  # Even if the caller disconnects.
        return asking.result()

    async def _asked(
        self, prepared: PreparedRequest, report: Callable[[str, str], None] | None
    ) -> Completion:
        call, claim = prepared.call, prepared.claim
        key = (claim.episode_uuid, claim.attempt)
        if self._timeouts.get(key, 0) >= MAX_TIMEOUTS:
            message = f"{MAX_TIMEOUTS} calls of this claim to the role {self.name!r} have timed out"
            raise GatewayError(403, "claim_limit_exceeded", message)
        wanted = REPLY_TOKENS if call.max_tokens is None else call.max_tokens
        num_bytes = prepared.recorded_bytes()
        granted = await self._claims.begin(claim, 1, wanted, num_bytes)
        try:
            prepared.attempt.is_recording = True  # A retry should not pay twice.
            reply = await self._server.ask(request_of(call), max_tokens=granted, report=report)
            return await self._record(prepared, reply)
        except GatewayError as error:
            logger.info("role.failed role=%s status=%d message=%s", self.role, error.status, error.message)
            if error.status == 504:
                self._timeouts[key] = self._timeouts.get(key, 0) + 1
            raise
        finally:
            self._claims.end(claim, 1, granted, num_bytes)

    async def _record(self, prepared: PreparedRequest, reply: OutsideReply) -> Completion:
        (turn,), header = prepared.turns, prepared.header
        call = Call(
            call_id=choice_id(header.call_id, 0),
            **prepared.recorded_fields(turn),
            new_prompt=b"",
            sampled=b"",
            logprobs=b"",
            stop_reason="length" if reply.finish_reason == "length" else "stop",
            policy_version=FOREIGN_POLICY,
            temperature=1.0 if prepared.call.temperature is None else prepared.call.temperature,
            top_p=prepared.call.top_p,
            top_k=prepared.call.top_k,
            logprob_kind="unknown",
            messages=turn.texts[0],
            reply=msgspec.json.encode(reply.message).decode(),
            tools=turn.texts[1],
            role=self.role,
            reported_tokens=reply.tokens,
        )
        await self._claims.record(prepared.claim, [call])
        prepared.session.add(turn, call.call_id, b"", reply.message)
        prepared.attempt.call_id = header.call_id
        return self._completion(header.call_id, call, reply.message)

    async def _recorded(self, state: ClaimState, call: ModelCall, call_id: str) -> Completion | None:
        known = {each.call_id: each for each in await self._claims.calls(state.claim)}
        found = known.get(choice_id(call_id, 0))
        return found and self._completion(call_id, found, state.session.reply_of(found.call_id))

    def _completion(self, call_id: str, call: Call, message: ChatMessage) -> Completion:
        choice = Choice(
            message=message,
            finish_reason="tool_calls" if "tool_calls" in message else call.stop_reason,
            reported_tokens=call.reported_tokens[1],
        )
        return Completion(
            call_id=call_id,
            created=call.created,
            model=self.name,
            prompt=b"",
            choices=[choice],
            policy_version=FOREIGN_POLICY,
            reported_prompt_tokens=call.reported_tokens[0],
        )


def request_of(call: ModelCall) -> dict[str, Any]:
    """Raises GatewayError 400 for a choice of tools that the format lacks."""
    request: dict[str, Any] = {"messages": [_sent(message) for message in call.messages]}
    if call.tools:
        request |= {"tools": call.tools, "tool_choice": _tool_choice(call)}
        if not call.parallel_tool_calls:
            request["parallel_tool_calls"] = False
    if call.json_schema is not None:
        request["response_format"] = _response_format(call.json_schema)
    if call.template_kwargs:
        request["chat_template_kwargs"] = call.template_kwargs
    fields: Mapping[str, tuple[Any, Any]] = {  # Servers refuse unknown fields.
        "temperature": (call.temperature, None),
        "top_p": (call.top_p, 1.0),
        "top_k": (call.top_k, -1),
        "min_p": (call.min_p, 0.0),
        "repetition_penalty": (call.repetition_penalty, 1.0),
        "seed": (call.seed, None),
        "stop": (call.stop, []),
    }
    return request | {name: value for name, (value, unset) in fields.items() if value != unset}


def _tool_choice(call: ModelCall) -> Any:
    if not call.parse_tool_calls:
        return "none"
    names = [tool["function"]["name"] for tool in call.tools]
    if not call.required_tools:
        return "auto"
    if len(call.required_tools) == 1:
        return {"type": "function", "function": {"name": call.required_tools[0]}}
    if set(call.required_tools) == set(names):
        return "required"
    field = call.FIELD_NAMES["required_tools"]
    message = f"{field}: an outside server takes one tool, or all of them, not {call.required_tools}"
    raise GatewayError(400, "unsupported_parameter", message, param=field)


def _response_format(schema: dict[str, Any]) -> dict[str, Any]:
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}


def _sent(message: ChatMessage) -> dict[str, Any]:
    sent = {name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message}
    if message.get("tool_calls"):
        sent |= {"tool_calls": message["tool_calls"], "content": message["content"] or None}
    return sent

"""`Session`: the token buffers of one claim, one for each conversation that its program holds.

Owns the prompts. Invariant: a prompt that continues a call starts with that call's prompt and sampled ids,
byte for byte; every other prompt is a new root, and says why (`fork_reasons`). Nothing here awaits, so calls
of one claim may be in flight together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool, tools_key, with_ids_of
from tinkerscript.gateway.conversation.fork_reasons import (
    NEW_CONVERSATION,
    RENDERER_REFUSED,
    SAMPLED_AGAIN,
    TEMPLATE_REWRITES,
)
from tinkerscript.gateway.conversation.tree import PROMPT, MessageIndex, MessagePath, Node, PromptIndex, Turn
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import Call, pack_ids, unpack_ids


class Session:
    """The conversations of one claim."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._messages = MessageIndex()
        self._prompts = PromptIndex()
        self._recording: list[Turn] = []
        """Turns that are about to be recorded."""

    @classmethod
    def restore(cls, renderer: ChatRenderer, calls: Iterable[Call]) -> Session:
        """The session that recorded `calls`, oldest first. Raises ValueError for a missing parent."""
        session = cls(renderer)
        for call in calls:
            turn = session._recorded_turn(call)
            session.add(turn, call.call_id, call.sampled, _decoded(call.reply))
        return session

    def plan(self, messages: list[ChatMessage], tools: list[Tool]) -> Turn:
        """Find the call that `messages` continue, and make the prompt.

        The turn is in flight until `release`. Raises GatewayError 400 `context_length_exceeded` if the
        context has no room for a reply.
        """
        return self._started(self._turn(messages, tools), "messages")

    def plan_ids(self, prompt: bytes) -> Turn:
        """Like `plan`, for a prompt given as ids (int32), which is sampled from as it is."""
        node = self._prompts.find(prompt)
        text = self._renderer.tokenizer.decode(unpack_ids(prompt).tolist())
        turn = Turn(
            parent=node,
            prompt=prompt,
            new_prompt=prompt[len(node.stream()) :] if node else prompt,
            matched_by="ids" if node else None,
            fork_reason=None if node else self._prompts.fork_reason(prompt),
            new_messages=[{"role": PROMPT, "content": text}],
            tools=node.tools if node else [],
            reply_index=node.reply_index + 2 if node else 1,
        )
        return self._started(turn, "prompt")

    def _started(self, turn: Turn, param: str) -> Turn:
        length = len(turn.prompt) // 4
        if length >= self._renderer.max_context:
            raise GatewayError(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {self._renderer.max_context} tokens, "
                f"and the {param} {'are' if param == 'messages' else 'is'} {length} tokens",
                param=param,
            )
        if turn.parent:
            turn.parent.pending += 1
        return turn

    def recording(self, turns: Iterable[Turn]) -> list[Turn]:
        """The turns of a request that is about to be recorded.

        Those that had nothing to continue when they were planned say why by now: of parallel requests, one is
        the first of the claim.
        """
        labelled: list[Turn] = []
        for turn in turns:
            if turn.parent is None and turn.fork_reason is None:
                turn = msgspec.structs.replace(turn, fork_reason=self._fork_reason(turn))
            self._recording.append(turn)
            labelled.append(turn)
        return labelled

    def _fork_reason(self, turn: Turn) -> str | None:
        if any(other.prompt == turn.prompt for other in self._recording):
            return SAMPLED_AGAIN
        if turn.new_messages[0]["role"] == PROMPT:
            reason = self._prompts.fork_reason(turn.prompt)
        else:
            reason = self._messages.fork_reason(self._messages.walk(turn.new_messages, tools_key(turn.tools)))
        return reason or (NEW_CONVERSATION if self._recording else None)

    def release(self, turn: Turn) -> None:
        """The request of a planned turn ended, recorded or not."""
        self._recording = [each for each in self._recording if each.prompt is not turn.prompt]
        if turn.parent:
            turn.parent.pending -= 1

    def prompt_tokens(self, messages: list[ChatMessage], tools: list[Tool]) -> int:
        """Length of the prompt that `plan` would make, in tokens. Changes nothing."""
        return len(self._turn(messages, tools).prompt) // 4

    def messages_of(self, call_id: str) -> list[ChatMessage]:
        """The conversation up to a call: its messages and its reply, each reply with its call's id.

        Raises GatewayError 400 `previous_response_not_found` unless this claim recorded the call.
        """
        node = self._messages.call(call_id)
        if node is None:
            message = f"this claim has no response with the id 'resp_{call_id}'; send the whole conversation"
            raise GatewayError(400, "previous_response_not_found", message, param="previous_response_id")
        messages = node.messages()
        ancestor: Node | None = node
        while ancestor is not None:
            messages[ancestor.reply_index] = {**ancestor.reply, "id": ancestor.call_id}
            ancestor = ancestor.parent
        return messages

    def prompt_of(self, call_id: str) -> bytes:
        """The whole prompt of a recorded call (int32). Raises KeyError."""
        node = self._recorded(call_id)
        stream = node.stream()
        return stream[: len(stream) - len(node.sampled)]

    def reply_of(self, call_id: str) -> ChatMessage:
        """The message that a recorded call sampled. Raises KeyError."""
        return self._recorded(call_id).reply

    def add(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage) -> None:
        """Add a recorded call, so that later requests can continue it."""
        node = Node(turn, call_id, sampled, reply)
        self._messages.add(node)
        self._prompts.add(node)
        if turn.parent:
            turn.parent.extended = True

    def _turn(self, messages: list[ChatMessage], tools: list[Tool]) -> Turn:
        path = self._messages.walk(messages, tools_key(tools))
        node = self._messages.find(path) if 0 < path.history_length < len(messages) else None
        turn = self._extension(node, path) if node else None
        if turn is None:
            reason = self._refusal if node else self._messages.fork_reason(path)
            turn = self._root(messages, tools, reason)
        return turn

    @property
    def _refusal(self) -> str:
        """Why a prompt does not extend the call that it continues."""
        return TEMPLATE_REWRITES if self._renderer.uses_template else RENDERER_REFUSED

    def _extension(self, node: Node, path: MessagePath) -> Turn | None:
        repeated = path.messages[path.history_length - 1]
        new_messages = with_ids_of(node.reply, repeated, path.messages[path.history_length :])
        new_ids = self._renderer.extend(
            unpack_ids(node.new_prompt).tolist(),
            unpack_ids(node.sampled).tolist(),
            new_messages,
            node.tools,
            node.messages,
        )
        if new_ids is None:
            return None
        new_prompt = pack_ids(new_ids)
        return Turn(
            parent=node,
            prompt=node.stream() + new_prompt,
            new_prompt=new_prompt,
            matched_by="ids" if self._messages.named_in(repeated) is node else "equality",
            fork_reason=None,
            new_messages=new_messages,
            tools=node.tools,
            reply_index=len(path.messages),
        )

    def _root(self, messages: list[ChatMessage], tools: list[Tool], reason: str | None) -> Turn:
        prompt = pack_ids(self._renderer.render(messages, tools))
        return Turn(
            parent=None,
            prompt=prompt,
            new_prompt=prompt,
            fork_reason=reason,
            new_messages=messages,
            tools=tools,
            reply_index=len(messages),
        )

    def _recorded(self, call_id: str) -> Node:
        node = self._messages.call(call_id)
        if node is None:
            raise KeyError(call_id)
        return node

    def _recorded_turn(self, call: Call) -> Turn:
        messages = _decoded(call.messages)
        parent = self._messages.call(call.parent_id) if call.parent_id else None
        if call.parent_id and parent is None:
            raise ValueError(
                f"call {call.call_id}: its parent {call.parent_id} is not among the calls before it"
            )
        return Turn(
            parent=parent,
            prompt=b"",
            new_prompt=call.new_prompt,
            matched_by=call.matched_by,
            fork_reason=call.fork_reason,
            new_messages=messages,
            tools=parent.tools if parent else _decoded(call.tools),
            reply_index=(parent.reply_index + 1 if parent else 0) + len(messages),
        )


def _decoded(text: str) -> Any:
    return msgspec.json.decode(text)

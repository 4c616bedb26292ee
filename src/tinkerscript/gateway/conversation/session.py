"""`Session`: the token buffers of one claim, one for each conversation that its program holds.

Owns the prompts. The invariant: a prompt that extends a call starts with that call's prompt and sampled ids,
byte for byte; every other prompt is a new root, and says why (`breaks`). Nothing here awaits, so calls of one
claim may be in flight together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import ChatMessage, Tool, tools_key, with_ids_of
from tinkerscript.gateway.conversation import tree as breaks
from tinkerscript.gateway.conversation.matching import Conversations, Place
from tinkerscript.gateway.conversation.tree import PROMPT, IdPrompts, Node, Turn
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import Call, pack_ids, unpack_ids


class Session:
    """The conversations of one claim."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._conversations = Conversations()
        self._ids = IdPrompts()

    @classmethod
    def restore(cls, renderer: ChatRenderer, calls: Iterable[Call]) -> Session:
        """The session that recorded `calls`, oldest first. Raises KeyError for a missing parent."""
        session = cls(renderer)
        for call in calls:
            turn = session._recorded_turn(call)
            session.add(turn, call.call_id, call.sampled, _decoded(call.reply))
        return session

    def plan(self, messages: list[ChatMessage], tools: list[Tool]) -> Turn:
        """Find the call that `messages` go on from and make the prompt.

        The turn is in flight until `release`. Raises GatewayError 400 `context_length_exceeded` when no token
        is left for the reply.
        """
        return self._begun(self._turn(messages, tools), "messages")

    def plan_ids(self, prompt: bytes) -> Turn:
        """As `plan`, for a prompt that was given as ids (int32): it is sampled from as it is."""
        node = self._ids.find(prompt)
        text = self._renderer.tokenizer.decode(unpack_ids(prompt).tolist())
        turn = Turn(
            parent=node,
            prompt=prompt,
            new_prompt=prompt[len(node.stream()) :] if node else prompt,
            matched_by="ids" if node else None,
            break_cause=None if node else self._ids.cause(prompt),
            new_messages=[{"role": PROMPT, "content": text}],
            tools=node.tools if node else [],
            reply_index=node.reply_index + 2 if node else 1,
        )
        return self._begun(turn, "prompt")

    def _begun(self, turn: Turn, param: str) -> Turn:
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

    def release(self, turn: Turn) -> None:
        """The request of a planned turn is over, recorded or not."""
        if turn.parent:
            turn.parent.pending -= 1

    def prompt_tokens(self, messages: list[ChatMessage], tools: list[Tool]) -> int:
        """Tokens of the prompt that `plan` would make; nothing is remembered of it."""
        return len(self._turn(messages, tools).prompt) // 4

    def messages_of(self, call_id: str) -> list[ChatMessage]:
        """The conversation that a call ended: its messages and its reply, each reply with its call's id.

        Raises GatewayError 400 `previous_response_not_found` for a call that this claim did not record.
        """
        node = self._conversations.call(call_id)
        if node is None:
            message = f"this claim has no response with the id 'resp_{call_id}'; send the conversation itself"
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
        """The message that a recorded call answered. Raises KeyError."""
        return self._recorded(call_id).reply

    def add(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage) -> None:
        """Remember a recorded call, so that later requests may extend it."""
        node = Node(turn, call_id, sampled, reply)
        self._conversations.add(node)
        self._ids.add(node)
        if turn.parent:
            turn.parent.extended = True

    def _turn(self, messages: list[ChatMessage], tools: list[Tool]) -> Turn:
        place = self._conversations.place(messages, tools_key(tools))
        node = self._conversations.find(place) if 0 < place.split < len(messages) else None
        turn = self._extension(node, place) if node else None
        if turn is None:
            cause = breaks.RENDERER_REFUSED if node else self._conversations.cause(place)
            turn = self._root(messages, tools, cause)
        return turn

    def _extension(self, node: Node, place: Place) -> Turn | None:
        repeated = place.messages[place.split - 1]
        new_messages = with_ids_of(node.reply, repeated, place.messages[place.split :])
        new_ids = self._renderer.extend(
            unpack_ids(node.new_prompt).tolist(), unpack_ids(node.sampled).tolist(), new_messages, node.tools
        )
        if new_ids is None:
            return None
        new_prompt = pack_ids(new_ids)
        return Turn(
            parent=node,
            prompt=node.stream() + new_prompt,
            new_prompt=new_prompt,
            matched_by="ids" if self._conversations.named_in(repeated) is node else "equality",
            break_cause=None,
            new_messages=new_messages,
            tools=node.tools,
            reply_index=len(place.messages),
        )

    def _root(self, messages: list[ChatMessage], tools: list[Tool], cause: str | None) -> Turn:
        prompt = pack_ids(self._renderer.render(messages, tools))
        return Turn(
            parent=None,
            prompt=prompt,
            new_prompt=prompt,
            break_cause=cause,
            new_messages=messages,
            tools=tools,
            reply_index=len(messages),
        )

    def _recorded(self, call_id: str) -> Node:
        node = self._conversations.call(call_id)
        if node is None:
            raise KeyError(call_id)
        return node

    def _recorded_turn(self, call: Call) -> Turn:
        messages = _decoded(call.messages)
        parent = self._conversations.call(call.parent_id) if call.parent_id else None
        if call.parent_id and parent is None:
            raise ValueError(
                f"call {call.call_id}: its parent {call.parent_id} is not among the calls before it"
            )
        return Turn(
            parent=parent,
            prompt=b"",
            new_prompt=call.new_prompt,
            matched_by=call.matched_by,
            break_cause=call.break_cause,
            new_messages=messages,
            tools=parent.tools if parent else _decoded(call.tools),
            reply_index=(parent.reply_index + 1 if parent else 0) + len(messages),
        )


def _decoded(text: str) -> Any:
    return msgspec.json.decode(text)

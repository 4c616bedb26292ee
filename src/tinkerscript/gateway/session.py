"""`Session`: the token buffers of one claim, one for each conversation that its program holds.

Owns the question which earlier call a request goes on from. The invariant: a prompt that extends a
call starts with that call's prompt and sampled ids, byte for byte; every other prompt is a new root,
and says why. Nothing here awaits, so calls of one claim may be in flight together.

A conversation is a path of message keys from its tools; a call's reply ends a path:

    tools -> system -> user -> (reply of call 1) -> tool -> (reply of call 2) -> ...

A request extends the call whose path and reply are its messages up to its last assistant message.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.messages import ChatMessage, Tool, prompt_key, reply_key, tools_key
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import Call, pack_ids, unpack_ids

NEW_CONVERSATION = "new_conversation"
"""Break: the messages belong to no conversation so far (a sub-agent, an independent call)."""

SAMPLED_AGAIN = "sampled_again"
"""Break: the same messages were asked before (a retry, a parallel sample)."""

HISTORY_EDITED = "history_edited"
"""Break: the conversation is known, but an assistant message is not what was answered."""

TOOLS_CHANGED = "tools_changed"
"""Break: the conversation is known, with other tools."""

NO_NEW_MESSAGES = "no_new_messages"
"""Break: the messages end with the assistant's own reply."""

RENDERER_REFUSED = "renderer_refused"
"""Break: the chat format cannot go on from what was sampled (say, reasoning that never closed)."""


class Node:
    """One recorded call as the session remembers it."""

    __slots__ = (
        "call_id",
        "extended",
        "new_messages",
        "new_prompt",
        "parent",
        "reasoning",
        "reply",
        "reply_index",
        "sampled",
        "state",
        "tools",
    )

    def __init__(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage, state: int) -> None:
        self.call_id = call_id
        self.parent = turn.parent
        self.new_prompt = turn.new_prompt
        self.sampled = sampled
        self.tools = turn.tools
        self.new_messages = turn.new_messages
        self.reply = reply
        self.reasoning: str = reply.get("reasoning_content", "")
        self.reply_index = turn.reply_index
        """Place of the reply among the conversation's messages."""

        self.state = state
        """Where the path of this conversation stands after the reply."""

        self.extended = False

    def stream(self) -> bytes:
        """The whole prompt and what was sampled (int32)."""
        parts: list[bytes] = []
        node: Node | None = self
        while node is not None:
            parts += (node.sampled, node.new_prompt)
            node = node.parent
        return b"".join(reversed(parts))


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A request that found its place: what to sample from, and what to record about it."""

    parent: Node | None
    prompt: bytes
    """The whole prompt (int32)."""

    new_prompt: bytes
    """The part of it after the parent's prompt and sampled ids (int32)."""

    break_cause: str | None
    new_messages: list[ChatMessage]
    tools: list[Tool]
    reply_index: int
    start: int
    """State of the path before the new messages."""


class Session:
    """The conversations of one claim."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._edges: dict[tuple[int, Hashable], int] = {}
        self._replies: dict[int, list[Node]] = {}
        self._nodes: dict[str, Node] = {}
        self._asked: set[int] = set()
        self._roots: dict[bytes, int] = {}
        self._states = 0

    @classmethod
    def restore(cls, renderer: ChatRenderer, calls: Iterable[Call]) -> Session:
        """The session that recorded `calls`, oldest first."""
        session = cls(renderer)
        for call in calls:
            turn = session._recorded_turn(call, session._nodes)
            session.add(turn, call.call_id, call.sampled, _decoded(call.reply))
        return session

    def plan(self, messages: list[ChatMessage], tools: list[Tool]) -> Turn:
        """Find the call that `messages` go on from and make the prompt.

        Raises GatewayError 400 `context_length_exceeded` when no token is left for the reply.
        """
        turn = self._turn(messages, tools)
        length = len(turn.prompt) // 4
        if length >= self._renderer.max_context:
            raise GatewayError(
                400,
                "context_length_exceeded",
                f"this model's maximum context length is {self._renderer.max_context} tokens, "
                f"and the messages are {length} tokens",
                param="messages",
            )
        if turn.parent:
            turn.parent.extended = True
        return turn

    def prompt_tokens(self, messages: list[ChatMessage], tools: list[Tool]) -> int:
        """Tokens of the prompt that `plan` would make; nothing is remembered of it."""
        return len(self._turn(messages, tools).prompt) // 4

    def messages_of(self, call_id: str) -> list[ChatMessage]:
        """The conversation that a call ended: its messages and its reply, which names it.

        Raises GatewayError 400 `previous_response_not_found` for a call that this claim did not record.
        """
        if call_id not in self._nodes:
            message = f"this claim has no response with the id 'resp_{call_id}'; send the conversation itself"
            raise GatewayError(400, "previous_response_not_found", message, param="previous_response_id")
        parts: list[list[ChatMessage]] = []
        node: Node | None = self._nodes[call_id]
        while node is not None:
            parts.append([*node.new_messages, {**node.reply, "id": node.call_id}])
            node = node.parent
        return [message for part in reversed(parts) for message in part]

    def add(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage) -> Node:
        """Remember a recorded call, so that later requests may extend it."""
        asked = self._insert(turn.start, [prompt_key(message) for message in turn.new_messages])
        self._asked.add(asked)
        state = self._insert(asked, [reply_key(reply)])
        node = Node(turn, call_id, sampled, reply, state)
        self._replies.setdefault(state, []).append(node)
        self._nodes[call_id] = node
        return node

    def _turn(self, messages: list[ChatMessage], tools: list[Tool]) -> Turn:
        split = _after_last_assistant(messages)
        node = self._find(messages, split, tools) if 0 < split < len(messages) else None
        turn = self._extension(node, messages[split:]) if node else None
        if turn is None:
            cause = RENDERER_REFUSED if node else self._break_cause(messages, split, tools)
            turn = self._root(messages, tools, cause)
        return turn

    def _extension(self, node: Node, new_messages: list[ChatMessage]) -> Turn | None:
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
            break_cause=None,
            new_messages=new_messages,
            tools=node.tools,
            reply_index=node.reply_index + 1 + len(new_messages),
            start=node.state,
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
            start=self._root_state(tools),
        )

    def _find(self, messages: list[ChatMessage], split: int, tools: list[Tool]) -> Node | None:
        """The call whose messages and reply are `messages[:split]`.

        Of several equal ones that which the caller names, else the first that nobody extended yet: parallel
        conversations that look alike go on from one each.
        """
        start = self._roots.get(tools_key(tools))
        if start is None:
            return None
        candidates = [
            node
            for state in self._walk(start, messages[:split])
            for node in self._replies.get(state, ())
            if _reasoning_agrees(node, messages)
        ]
        named = [node for node in candidates if node.call_id == messages[split - 1].get("id")]
        if named:
            return named[0]
        fresh = [node for node in candidates if not node.extended]
        return (fresh or candidates[-1:] or [None])[0]

    def _walk(self, start: int, messages: Sequence[ChatMessage]) -> list[int]:
        """The states after `messages`; an assistant message may be one that the caller wrote or a reply."""
        states = [start]
        for message in messages:
            keys = [prompt_key(message)]
            if message["role"] == "assistant":
                keys.append(reply_key(message))
            states = [
                end for state in states for key in keys if (end := self._edges.get((state, key))) is not None
            ]
            if not states:
                break
        return states

    def _break_cause(self, messages: list[ChatMessage], split: int, tools: list[Tool]) -> str | None:
        if not self._replies:
            return None
        if split == len(messages) and self._find(messages, split, tools):
            return NO_NEW_MESSAGES
        if any(self._was_asked(start, messages) for start in self._roots.values()):
            known_tools = self._was_asked(self._roots.get(tools_key(tools)), messages)
            return SAMPLED_AGAIN if known_tools else TOOLS_CHANGED
        first_assistant = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), 0)
        opening = messages[:first_assistant]
        if not opening or not any(self._was_asked(start, opening) for start in self._roots.values()):
            return NEW_CONVERSATION
        history = messages[:split]
        if any(self._ends_with_reply(start, history) for start in self._roots.values()):
            return TOOLS_CHANGED
        return HISTORY_EDITED

    def _was_asked(self, start: int | None, messages: Sequence[ChatMessage]) -> bool:
        return start is not None and any(state in self._asked for state in self._walk(start, messages))

    def _ends_with_reply(self, start: int, messages: Sequence[ChatMessage]) -> bool:
        nodes = [node for state in self._walk(start, messages) for node in self._replies.get(state, ())]
        return any(_reasoning_agrees(node, messages) for node in nodes)

    def _insert(self, state: int, keys: Iterable[Hashable]) -> int:
        for key in keys:
            state = self._edges.setdefault((state, key), self._new_state())
        return state

    def _root_state(self, tools: list[Tool]) -> int:
        return self._roots.setdefault(tools_key(tools), self._new_state())

    def _new_state(self) -> int:
        self._states += 1
        return self._states

    def _recorded_turn(self, call: Call, nodes: dict[str, Node]) -> Turn:
        messages = _decoded(call.messages)
        parent = nodes[call.parent_id] if call.parent_id else None
        tools = parent.tools if parent else _decoded(call.tools)
        if parent:
            parent.extended = True
        return Turn(
            parent=parent,
            prompt=b"",
            new_prompt=call.new_prompt,
            break_cause=call.break_cause,
            new_messages=messages,
            tools=tools,
            reply_index=(parent.reply_index + 1 if parent else 0) + len(messages),
            start=parent.state if parent else self._root_state(tools),
        )


def _after_last_assistant(messages: Sequence[ChatMessage]) -> int:
    """How many messages there are up to the last assistant message, that one included; 0 for none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index + 1
    return 0


def _reasoning_agrees(node: Node, messages: Sequence[ChatMessage]) -> bool:
    """Whether the reasoning that `messages` repeat, where they do, is what these calls answered."""
    current: Node | None = node
    while current is not None:
        given = messages[current.reply_index].get("reasoning_content")
        if given and given != current.reasoning:
            return False
        current = current.parent
    return True


def _decoded(text: str) -> Any:
    return msgspec.json.decode(text)

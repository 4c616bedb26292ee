"""The calls of a claim as a tree of token buffers, and the search for a request's place in it.

`Node.stream` is exactly what the model saw and sampled, from the first prompt on.

Chat requests are matched by their messages. A conversation is a path of message keys (`chat_messages`) in a
trie, and a call's reply ends a path:

    system -> user -> reply of call 1 -> tool -> reply of call 2 -> ...

A request continues a call if that path equals its messages up to the last assistant message, with the same
tools. Ids only choose among the calls that content allows:

- An assistant message with an id that we issued must be that call's reply.
- Reasoning may be dropped, but not changed.
- Of several matching calls, the first that no call continues, recorded or in flight, is chosen, so that equal
  parallel conversations continue one call each.

Text completions are matched by ids. A prompt continues the longest stream that it starts with; among equal
streams, the first that no call continues.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import msgspec

from tinkerscript.gateway.chat_messages import (
    ChatMessage,
    Tool,
    given_ids,
    message_keys,
    reasoning_of,
    reply_key,
    tools_key,
)
from tinkerscript.rollouts.call import MatchedBy, PlacedImage, moved_images

PROMPT = "prompt"  # A role that no chat uses.


# The fork reasons, which docs/tokens.md explains.
NEW_CONVERSATION = "new_conversation"
SAMPLED_AGAIN = "sampled_again"
NO_NEW_MESSAGES = "no_new_messages"
TOOLS_CHANGED = "tools_changed"
SYSTEM_CHANGED = "system_changed"
HISTORY_SHORTENED = "history_shortened"
TOOL_RESULT_EDITED = "tool_result_edited"
TEXT_DROPPED = "text_dropped"
REASONING_EDITED = "reasoning_edited"
HISTORY_EDITED = "history_edited"
RENDERER_REFUSED = "renderer_refused"
TEMPLATE_REWRITES = "template_rewrites"

FORK_REASONS = (
    NEW_CONVERSATION,
    SAMPLED_AGAIN,
    NO_NEW_MESSAGES,
    TOOLS_CHANGED,
    SYSTEM_CHANGED,
    HISTORY_SHORTENED,
    TOOL_RESULT_EDITED,
    TEXT_DROPPED,
    REASONING_EDITED,
    HISTORY_EDITED,
    RENDERER_REFUSED,
    TEMPLATE_REWRITES,
)


ROOT_STATE = 0


class Conversation(NamedTuple):
    messages: Sequence[ChatMessage]
    keys: Sequence[Hashable]

    def until(self, end: int) -> Conversation:
        return Conversation(self.messages[:end], self.keys[:end])


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    parent: Node | None
    prompt: bytes  # int32
    new_prompt: bytes  # int32, after the parent's prompt and sampled ids.
    images: list[PlacedImage] = []  # Those in `new_prompt`.
    matched_by: MatchedBy | None = None
    fork_reason: str | None  # None if the prompt extends a call or is the claim's first.
    new_messages: list[ChatMessage]
    tools: list[Tool]
    reply_index: int
    keys: Sequence[Hashable] = ()
    texts: tuple[str, str] = ("", "")  # As recorded JSON; empty if not recorded.

    @property
    def all_images(self) -> list[PlacedImage]:
        before = self.parent.images() if self.parent and self.parent.has_images else []
        return [*before, *moved_images(self.images, (len(self.prompt) - len(self.new_prompt)) // 4)]


class Node:
    def __init__(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage) -> None:
        self.call_id = call_id
        self.parent = turn.parent
        self.new_messages = turn.new_messages
        self.new_prompt = turn.new_prompt
        self.new_images = turn.images
        self.has_images = bool(turn.images) or (turn.parent is not None and turn.parent.has_images)
        self.sampled = sampled
        self.reply = reply
        self.tools = turn.tools
        self.tools_key = turn.parent.tools_key if turn.parent else tools_key(turn.tools)
        self.reply_index = turn.reply_index
        before = turn.parent.reply if turn.parent else None
        # Computing them reads long tool arguments.
        self.keys = [*(turn.keys or message_keys(turn.new_messages, before)), reply_key(reply)]
        self.written = [
            (index, reasoning_of(message))
            for index, message in enumerate(turn.new_messages)
            if message["role"] == "assistant"
        ]

        self.state = ROOT_STATE
        self.extended = False
        self.pending = 0

    def stream(self) -> bytes:
        parts: list[bytes] = []
        node: Node | None = self
        while node is not None:
            parts += (node.sampled, node.new_prompt)
            node = node.parent
        return b"".join(reversed(parts))

    def images(self) -> list[PlacedImage]:
        found: list[PlacedImage] = []
        length = 0
        for node in self._line():
            found += moved_images(node.new_images, length)
            length += (len(node.new_prompt) + len(node.sampled)) // 4
        return found

    def messages(self) -> list[ChatMessage]:
        return [message for node in self._line() for message in (*node.new_messages, node.reply)]

    def conversation(self) -> Conversation:
        return Conversation(self.messages(), [key for node in self._line() for key in node.keys])

    def _line(self) -> list[Node]:
        line: list[Node] = []
        node: Node | None = self
        while node is not None:
            line.append(node)
            node = node.parent
        return line[::-1]


_TAIL = 32


class MessagePath(NamedTuple):
    messages: list[ChatMessage]
    keys: list[Hashable]
    tools_key: bytes
    history_length: int
    states: list[int]

    @property
    def history_state(self) -> int | None:
        return self.states[self.history_length] if self.history_length < len(self.states) else None

    @property
    def end_state(self) -> int | None:
        return self.states[-1] if len(self.states) > len(self.messages) else None


class MessageIndex:
    def __init__(self) -> None:
        self._edges: dict[tuple[int, Hashable], int] = {}
        self._replies: dict[int, list[Node]] = {}
        self._prompted: dict[int, set[bytes]] = {}
        self._through: dict[int, Node] = {}
        self._named: dict[str, Node] = {}
        # By the keys of the message before (None: any) and the reply.
        self._by_reply: dict[tuple[Hashable, Hashable], Node] = {}

    def add(self, node: Node) -> None:
        keys = node.keys
        path = [node.parent.state if node.parent else ROOT_STATE]
        for key in keys:
            path.append(self._edges.setdefault((path[-1], key), len(self._edges) + 1))
        node.state = path[-1]
        self._prompted.setdefault(path[-2], set()).add(node.tools_key)
        self._replies.setdefault(node.state, []).append(node)
        for state in path:
            self._through[state] = node
        for name in (node.call_id, *given_ids(node.reply)):
            self._named[name] = node
        for before in (None, *keys[-2:-1]):
            self._by_reply[before, keys[-1]] = node

    def call(self, call_id: str) -> Node | None:
        node = self._named.get(call_id)
        return node if node and node.call_id == call_id else None

    def walk(
        self, messages: list[ChatMessage], tools_key: bytes, keys: list[Hashable] | None = None
    ) -> MessagePath:
        keys = list(message_keys(messages)) if keys is None else keys
        states = [ROOT_STATE]
        for key in keys:
            state = self._edges.get((states[-1], key))
            if state is None:
                break
            states.append(state)
        return MessagePath(messages, keys, tools_key, _history_length(messages), states)

    def find(self, path: MessagePath) -> Node | None:
        last: Node | None = None
        for node in self._ending_at(path.history_state):
            if node.tools_key == path.tools_key and self._agrees(node, path.messages):
                last = node
                if not node.extended and not node.pending:
                    break
        return last

    def named_in(self, message: ChatMessage) -> Node | None:
        for name in given_ids(message):
            if name in self._named:
                return self._named[name]
        return None

    def fork_reason(self, path: MessagePath) -> str | None:
        if not self._edges:
            return None
        if path.history_length == len(path.messages) and self.find(path):
            return NO_NEW_MESSAGES
        repeated = self._ending_at(path.history_state)
        agreeing = [node for node in repeated if self._agrees(node, path.messages)]
        if repeated and not agreeing:
            return self._edit(path)
        if path.end_state in self._prompted:
            again = path.tools_key in self._prompted[path.end_state]
            return SAMPLED_AGAIN if again else TOOLS_CHANGED
        if agreeing:
            return TOOLS_CHANGED
        return self._edit(path)

    def _agrees(self, node: Node, messages: Sequence[ChatMessage]) -> bool:
        current: Node | None = node
        while current is not None:
            given = messages[current.reply_index]
            if "reasoning_content" in given and reasoning_of(given) not in ("", reasoning_of(current.reply)):
                return False
            if ("tool_calls" in given or "id" in given) and self.named_in(given) not in (None, current):
                return False
            for index, known in current.written:
                if reasoning_of(messages[index]) not in ("", known):
                    return False
            current = current.parent
        return True

    def _ending_at(self, state: int | None) -> list[Node]:
        return [] if state is None else self._replies.get(state, [])

    def _edit(self, path: MessagePath) -> str:
        messages, states = path.messages, path.states
        given = Conversation(messages, path.keys)
        for end in range(path.history_length, 0, -1):
            if known := self.named_in(messages[end - 1]):
                if reason := edit_reason(known.conversation(), given.until(end)):
                    return reason
                break
        else:
            if reason := self._edit_of_equal_reply(given.until(path.history_length)):
                return reason
        opening = next((i for i, each in enumerate(messages) if each["role"] == "assistant"), 0)
        if not 0 < opening < len(states):
            return NEW_CONVERSATION
        known = self._through[states[-1]].conversation().until(path.history_length)
        reason = edit_reason(known, given.until(len(known.messages)))
        return reason or HISTORY_EDITED

    def _edit_of_equal_reply(self, history: Conversation) -> str | None:
        # Equal replies may be a coincidence.
        *_, before, reply = (None, None, *history.keys)
        if known := self._by_reply.get((before, reply)):
            return edit_reason(known.conversation(), history)
        if known := self._by_reply.get((None, reply)):
            reason = edit_reason(known.conversation(), history)
            return reason if reason == HISTORY_SHORTENED else None
        return None


class PromptIndex:
    def __init__(self) -> None:
        self._unindexed: list[Node] = []
        # By a stream's length in bytes and its last `_TAIL` bytes.
        self._by_end: dict[int, dict[bytes, list[Node]]] = {}
        self._prompts: set[int] = set()

    def add(self, node: Node) -> None:
        # Ids do not say which image they stand for.
        if not node.has_images:
            self._unindexed.append(node)

    def find(self, prompt: bytes) -> Node | None:
        self._index()
        for length in sorted(self._by_end, reverse=True):
            if length > len(prompt):
                continue
            nodes = self._by_end[length].get(prompt[:length][-_TAIL:], [])
            equal = [node for node in nodes if prompt.startswith(node.stream())]
            if equal:
                free = [node for node in equal if not node.extended and not node.pending]
                return (free or equal[-1:])[0]
        return None

    def fork_reason(self, prompt: bytes) -> str | None:
        self._index()
        if not self._by_end:
            return None
        return SAMPLED_AGAIN if hash(prompt) in self._prompts else NEW_CONVERSATION

    def _index(self) -> None:
        for node in self._unindexed:
            stream = node.stream()
            self._by_end.setdefault(len(stream), {}).setdefault(stream[-_TAIL:], []).append(node)
            if node.new_messages and node.new_messages[0]["role"] == PROMPT:
                self._prompts.add(hash(stream[: len(stream) - len(node.sampled)]))
        self._unindexed.clear()


def _history_length(messages: Sequence[ChatMessage]) -> int:
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index + 1
    return 0


def edit_reason(known: Conversation, given: Conversation) -> str | None:
    if _only_system_differs(known, given):
        return SYSTEM_CHANGED
    pairs = zip(known.messages, given.messages, known.keys, given.keys, strict=False)
    for was, now, was_key, now_key in pairs:
        if was_key != now_key:
            is_shorter = len(given.messages) < len(known.messages)
            return HISTORY_SHORTENED if is_shorter else _edit_of_message(was, now, was_key, now_key)
        if now["role"] == "assistant" and reasoning_of(now) not in ("", reasoning_of(was)):
            return REASONING_EDITED
    return None


def _only_system_differs(known: Conversation, given: Conversation) -> bool:
    known_start, given_start = _system_length(known.messages), _system_length(given.messages)
    known_rest, given_rest = known.keys[known_start:], given.keys[given_start:]
    common = min(len(known_rest), len(given_rest))
    same_start = known.keys[:known_start] == given.keys[:given_start]
    return not same_start and known_rest[:common] == given_rest[:common]


def _edit_of_message(was: ChatMessage, now: ChatMessage, was_key: Hashable, now_key: Hashable) -> str:
    if was["role"] != now["role"]:
        return HISTORY_EDITED
    if now["role"] == "tool":
        return TOOL_RESULT_EDITED
    if now["role"] == "assistant" and now.get("tool_calls") and not now["content"].strip():
        return TEXT_DROPPED if _calls_in(was_key) == _calls_in(now_key) else HISTORY_EDITED
    return HISTORY_EDITED


def _calls_in(key: Hashable) -> Hashable:
    return key[1] if isinstance(key, tuple) else None


def _system_length(messages: Sequence[ChatMessage]) -> int:
    return next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))

"""`Conversations`: which recorded call a request goes on from, and if none, why not.

A conversation is a path of message keys (`messages`), and a call's reply ends a path:

    system -> user -> reply of call 1 -> tool -> reply of call 2 -> ...

A request goes on from a call whose path is its messages up to its last assistant message, with the same
tools. Content decides which calls those are; ids only choose among them:

- Where an assistant message carries an id of ours (the message's or a tool call's), it is the reply of the
  call that the id names, or the history is edited. An id never makes up for content that differs.
- Reasoning may be left out; where it came back it must be what was answered.
- Of calls that are equal in all that the caller said: the first that no call goes on from, recorded or in
  flight. So parallel conversations that look alike go on from one each.

Invariant: `find` gives a call whose whole conversation the request repeats. Its cost is one look-up for each
message of the request and, for each call found, one step for each turn; memory is linear in what was said.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tinkerscript.gateway.chat_messages import ChatMessage, given_ids, message_keys, reasoning_of
from tinkerscript.gateway.conversation import tree as breaks
from tinkerscript.gateway.conversation.tree import ROOT, Node


class Place:
    """Where the messages of one request stand among the conversations."""

    __slots__ = ("messages", "split", "states", "tools_key")

    def __init__(self, messages: list[ChatMessage], tools_key: bytes, states: list[int]) -> None:
        self.messages = messages
        self.tools_key = tools_key
        self.split = after_last_assistant(messages)
        self.states = states
        """The states before, between and after the messages, as far as they are known."""

    @property
    def history_state(self) -> int | None:
        """The state after the last assistant message; None if no conversation has come there."""
        return self.states[self.split] if self.split < len(self.states) else None

    @property
    def end_state(self) -> int | None:
        """The state after all messages; None if no conversation has come there."""
        return self.states[-1] if len(self.states) > len(self.messages) else None


class Conversations:
    """The recorded calls of one claim, by what was said."""

    def __init__(self) -> None:
        self._edges: dict[tuple[int, Hashable], int] = {}
        self._replies: dict[int, list[Node]] = {}
        """The calls whose reply ends the path to a state."""

        self._asked: dict[int, set[bytes]] = {}
        """The states that were answered, with the keys of the tools."""

        self._through: dict[int, Node] = {}
        """The last call whose path goes on from a state, or ends there."""

        self._named: dict[str, Node] = {}
        """Calls by their own id and by those of their reply's tool calls."""

        self._answers: dict[tuple[Hashable, Hashable], Node] = {}
        """The last call with this reply after this message, or after any (None)."""

    def add(self, node: Node) -> None:
        """Take in a recorded call. Its parent must be here."""
        said = [*node.new_messages, node.reply]
        keys = list(message_keys(said, node.parent.reply if node.parent else None))
        path = [node.parent.state if node.parent else ROOT]
        for key in keys:
            path.append(self._edges.setdefault((path[-1], key), len(self._edges) + 1))
        node.state = path[-1]
        self._asked.setdefault(path[-2], set()).add(node.tools_key)
        self._replies.setdefault(node.state, []).append(node)
        for state in path:
            self._through[state] = node
        for name in (node.call_id, *given_ids(node.reply)):
            self._named[name] = node
        for before in (None, *keys[-2:-1]):
            self._answers[before, keys[-1]] = node

    def call(self, call_id: str) -> Node | None:
        """The call with this id."""
        node = self._named.get(call_id)
        return node if node and node.call_id == call_id else None

    def place(self, messages: list[ChatMessage], tools_key: bytes) -> Place:
        """Walk along the conversations as far as `messages` go."""
        states = [ROOT]
        for key in message_keys(messages):
            state = self._edges.get((states[-1], key))
            if state is None:
                break
            states.append(state)
        return Place(messages, tools_key, states)

    def find(self, place: Place) -> Node | None:
        """The call whose conversation is that up to the last assistant message, by the rules above."""
        last: Node | None = None
        for node in self._ending_at(place.history_state):
            if node.tools_key == place.tools_key and self._agrees(node, place.messages):
                last = node
                if not node.extended and not node.pending:
                    break
        return last

    def named_in(self, message: ChatMessage) -> Node | None:
        """The call that a message names by an id of ours; of several the first."""
        for name in given_ids(message):
            if name in self._named:
                return self._named[name]
        return None

    def cause(self, place: Place) -> str | None:
        """Why a request goes on from no call; None for the first one of a claim."""
        if not self._edges:
            return None
        if place.split == len(place.messages) and self.find(place):
            return breaks.NO_NEW_MESSAGES
        repeated = self._ending_at(place.history_state)
        agreeing = [node for node in repeated if self._agrees(node, place.messages)]
        if repeated and not agreeing:
            return self._edit(place)
        if place.end_state in self._asked:
            again = place.tools_key in self._asked[place.end_state]
            return breaks.SAMPLED_AGAIN if again else breaks.TOOLS_CHANGED
        if agreeing:
            return breaks.TOOLS_CHANGED
        return self._edit(place)

    def _agrees(self, node: Node, messages: Sequence[ChatMessage]) -> bool:
        """Whether ids and reasoning that `messages` repeat are those of the calls up to `node`."""
        current: Node | None = node
        while current is not None:
            given = messages[current.reply_index]
            if "reasoning_content" in given and reasoning_of(given) not in ("", reasoning_of(current.reply)):
                return False
            if ("tool_calls" in given or "id" in given) and self.named_in(given) not in (None, current):
                return False
            for place, known in current.written:
                if reasoning_of(messages[place]) not in ("", known):
                    return False
            current = current.parent
        return True

    def _ending_at(self, state: int | None) -> list[Node]:
        return [] if state is None else self._replies.get(state, [])

    def _edit(self, place: Place) -> str:
        """How the messages differ from the conversation that they go back to."""
        messages, history, states = place.messages, place.messages[: place.split], place.states
        for end in range(len(history), 0, -1):
            if known := self.named_in(history[end - 1]):
                if cause := breaks.edit(known.messages(), history[:end]):
                    return cause
                break
        else:
            if cause := self._edit_of_equal_reply(history):
                return cause
        opening = next((i for i, each in enumerate(messages) if each["role"] == "assistant"), 0)
        if not 0 < opening < len(states):
            return breaks.NEW_CONVERSATION
        known = self._through[states[-1]].messages()[: place.split]
        return breaks.edit(known, messages[: len(known)]) or breaks.HISTORY_EDITED

    def _edit_of_equal_reply(self, history: list[ChatMessage]) -> str | None:
        """How `history` differs from a conversation that ended with the same reply.

        A reply alone may be equal by chance: then nothing else may differ but that messages are missing.
        """
        *_, before, reply = (None, None, *message_keys(history))
        if known := self._answers.get((before, reply)):
            return breaks.edit(known.messages(), history)
        if known := self._answers.get((None, reply)):
            cause = breaks.edit(known.messages(), history)
            return cause if cause == breaks.HISTORY_SHORTENED else None
        return None


def after_last_assistant(messages: Sequence[ChatMessage]) -> int:
    """How many messages there are up to the last assistant message, that one included; 0 for none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "assistant":
            return index + 1
    return 0

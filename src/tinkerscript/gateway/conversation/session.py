"""`Session` holds the conversations of one claim and makes their prompts.

A prompt that continues a call starts with its prompt and sampled ids, byte for byte. Every other prompt is a
new root with a reason (`FORK_REASONS`). Threads only read immutable data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec

from tinkerscript.errors import GatewayError
from tinkerscript.gateway.chat_messages import (
    ChatMessage,
    Tool,
    images_of,
    message_keys,
    text_size,
    tools_key,
    with_ids_of,
)
from tinkerscript.gateway.conversation.tree import (
    NEW_CONVERSATION,
    PROMPT,
    RENDERER_REFUSED,
    SAMPLED_AGAIN,
    TEMPLATE_REWRITES,
    MessageIndex,
    MessagePath,
    Node,
    PromptIndex,
    Turn,
)
from tinkerscript.gateway.images import ImageFormat, files_in
from tinkerscript.rollouts.call import Call, PlacedImage, pack_ids, unpack_ids, with_messages
from tinkerscript.tokenizer import LightTokenizer

_encode = msgspec.json.Encoder().encode

P = ParamSpec("P")
T = TypeVar("T")

LONG_PROMPT = 8_192  # Bytes; the work takes a millisecond, so a thread does it.
LONG_HISTORY = 2**18

# Encoding releases the GIL; more threads would delay the event loop.
_THREADS = ThreadPoolExecutor(2, "long prompts")


class ConversationRenderer(Protocol):
    tokenizer: LightTokenizer
    max_context: int  # Tokens of prompt and reply together.

    @property
    def images(self) -> ImageFormat | None: ...

    @property
    def uses_template(self) -> bool: ...

    def render(self, messages: list[ChatMessage], tools: list[Tool]) -> list[int]: ...

    def extend(
        self,
        tail: list[int],
        sampled: list[int],
        messages: list[ChatMessage],
        tools: list[Tool],
        history: Callable[[], list[ChatMessage]],
    ) -> list[int] | None: ...


class Session:
    def __init__(self, renderer: ConversationRenderer) -> None:
        self._renderer = renderer
        self._messages = MessageIndex()
        self._prompts = PromptIndex()
        self._recording: list[Turn] = []
        self._files: dict[str, bytes] = {}

    @classmethod
    def restore(cls, renderer: ConversationRenderer, calls: Iterable[Call]) -> Session:
        """Raises ValueError for a missing parent."""
        session = cls(renderer)
        for call in with_messages(calls):
            turn = session._recorded_turn(call)
            session.add(turn, call.call_id, call.sampled, _decoded(call.reply))
        return session

    def plan(
        self, messages: list[ChatMessage], tools: list[Tool], files: Mapping[str, bytes] | None = None
    ) -> Turn:
        """Make the prompt, in flight until `release`. `files`: the request's images by digest.

        Raises GatewayError 400 `context_length_exceeded` if there is no room for a reply.
        """
        with self._placed(messages, tools, _keys_of(messages, tools), files) as place:
            return self._started(self._turn(place, place.prompt(self._renderer)), "messages")

    async def plan_async(
        self,
        messages: list[ChatMessage],
        tools: list[Tool],
        files: Mapping[str, bytes] | None = None,
        *,
        starts: bool = True,
    ) -> Turn:
        """Without `starts`, the turn may be too long."""
        is_long = text_size(messages) >= LONG_HISTORY or bool(files)
        keys = await in_thread_if(is_long, _keys_of, messages, tools)
        with self._placed(messages, tools, keys, files) as place:
            prompt = await in_thread_if(
                is_long or place.size(self._renderer) >= LONG_PROMPT, place.prompt, self._renderer
            )
            turn = self._turn(place, prompt)
            return self._started(turn, "messages") if starts else turn

    async def plan_ids(self, prompt: bytes) -> Turn:
        """Like `plan`, for a prompt of int32 ids."""
        messages, texts = await in_thread_if(len(prompt) >= LONG_PROMPT, self._message_of, prompt)
        node = self._prompts.find(prompt)
        turn = Turn(
            parent=node,
            prompt=prompt,
            new_prompt=prompt[len(node.stream()) :] if node else prompt,
            matched_by="ids" if node else None,
            fork_reason=None if node else self._prompts.fork_reason(prompt),
            new_messages=messages,
            tools=node.tools if node else [],
            reply_index=node.reply_index + 2 if node else 1,
            texts=texts,
        )
        return self._started(turn, "prompt")

    def _message_of(self, prompt: bytes) -> tuple[list[ChatMessage], tuple[str, str]]:
        text = self._renderer.tokenizer.decode(unpack_ids(prompt).tolist())
        messages = [{"role": PROMPT, "content": text}]
        return messages, _texts_of(messages, [])

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
        """Return the turns with fork reasons, now that the claim's first request is known."""
        labelled: list[Turn] = []
        for turn in turns:
            if turn.parent is None and turn.fork_reason is None:
                turn = msgspec.structs.replace(turn, fork_reason=self._fork_reason(turn))
            self._recording.append(turn)
            labelled.append(turn)
        return labelled

    def _fork_reason(self, turn: Turn) -> str | None:
        if any((other.prompt, other.images) == (turn.prompt, turn.images) for other in self._recording):
            return SAMPLED_AGAIN
        if turn.new_messages[0]["role"] == PROMPT:
            reason = self._prompts.fork_reason(turn.prompt)
        else:
            reason = self._messages.fork_reason(self._messages.walk(turn.new_messages, tools_key(turn.tools)))
        return reason or (NEW_CONVERSATION if self._recording else None)

    def release(self, turn: Turn) -> None:
        self._recording = [each for each in self._recording if each.prompt is not turn.prompt]
        if turn.parent:
            turn.parent.pending -= 1

    async def prompt_tokens(self, messages: list[ChatMessage], tools: list[Tool]) -> int:
        return len((await self.plan_async(messages, tools, starts=False)).prompt) // 4

    def messages_of(self, call_id: str) -> list[ChatMessage]:
        """Return the conversation through a call, with call ids in the replies.

        Raises GatewayError 400 `previous_response_not_found`.
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
        node = self._recorded(call_id)
        stream = node.stream()
        return stream[: len(stream) - len(node.sampled)]

    def reply_of(self, call_id: str) -> ChatMessage:
        return self._recorded(call_id).reply

    def add(self, turn: Turn, call_id: str, sampled: bytes, reply: ChatMessage) -> None:
        node = Node(turn, call_id, sampled, reply)
        self._files |= files_in(turn.new_messages, turn.images)
        self._messages.add(node)
        self._prompts.add(node)
        if turn.parent:
            turn.parent.extended = True

    @contextmanager
    def _placed(
        self,
        messages: list[ChatMessage],
        tools: list[Tool],
        keys: _Keys,
        files: Mapping[str, bytes] | None,
    ) -> Generator[_Place]:
        # In this context, no equal request takes the same place.
        path = self._messages.walk(messages, keys.tools, keys.messages)
        node = self._messages.find(path) if 0 < path.history_length < len(messages) else None
        place = _Place(path, tools, node, {**self._files, **(files or {})})
        if node:
            node.pending += 1
        try:
            yield place
        finally:
            if node:
                node.pending -= 1

    def _turn(self, place: _Place, prompt: _Prompt) -> Turn:
        path, node = place.path, place.node
        if node is None or not prompt.extends:
            reason = self._refusal if node else self._messages.fork_reason(path)
            return Turn(
                parent=None,
                prompt=prompt.ids,
                new_prompt=prompt.ids,
                images=prompt.images,
                fork_reason=reason,
                new_messages=path.messages,
                tools=place.tools,
                reply_index=len(path.messages),
                keys=path.keys,
                texts=prompt.texts,
            )
        repeated = path.messages[path.history_length - 1]
        return Turn(
            parent=node,
            prompt=node.stream() + prompt.ids,
            new_prompt=prompt.ids,
            images=prompt.images,
            matched_by="ids" if self._messages.named_in(repeated) is node else "equality",
            fork_reason=None,
            new_messages=place.new_messages,
            tools=node.tools,
            reply_index=len(path.messages),
            keys=path.keys[path.history_length :],
            texts=prompt.texts,
        )

    @property
    def _refusal(self) -> str:
        return TEMPLATE_REWRITES if self._renderer.uses_template else RENDERER_REFUSED

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
            images=call.images,
            matched_by=call.matched_by,
            fork_reason=call.fork_reason,
            new_messages=messages,
            tools=parent.tools if parent else _decoded(call.tools),
            reply_index=(parent.reply_index + 1 if parent else 0) + len(messages),
        )


class _Prompt(NamedTuple):
    # int32; with `extends`, without the continued call.
    ids: bytes
    images: list[PlacedImage]
    extends: bool
    texts: tuple[str, str]


class _Keys(NamedTuple):
    messages: list[Hashable]
    tools: bytes


class _Place:
    def __init__(
        self, path: MessagePath, tools: list[Tool], node: Node | None, files: Mapping[str, bytes]
    ) -> None:
        self.path = path
        self._files = files
        self.tools = tools
        self.node = node
        self.new_messages = path.messages
        if node:
            repeated, rest = path.messages[path.history_length - 1], path.messages[path.history_length :]
            self.new_messages = with_ids_of(node.reply, repeated, rest)

    def size(self, renderer: ConversationRenderer) -> int:
        if self.node is None or renderer.uses_template:
            return text_size(self.path.messages) + len(self.path.tools_key)
        return len(self.node.new_prompt) + len(self.node.sampled) + text_size(self.new_messages)

    def prompt(self, renderer: ConversationRenderer) -> _Prompt:
        if self.node:
            tail, sampled = unpack_ids(self.node.new_prompt).tolist(), unpack_ids(self.node.sampled).tolist()
            new_ids = renderer.extend(tail, sampled, self.new_messages, self.node.tools, self.node.messages)
            if new_ids is not None:
                images = self._images(renderer, new_ids, self.new_messages)
                return _Prompt(pack_ids(new_ids), images, True, _texts_of(self.new_messages, []))
        ids = renderer.render(self.path.messages, self.tools)
        images = self._images(renderer, ids, self.path.messages)
        return _Prompt(pack_ids(ids), images, False, _texts_of(self.path.messages, self.tools))

    def _images(
        self, renderer: ConversationRenderer, ids: list[int], messages: list[ChatMessage]
    ) -> list[PlacedImage]:
        if renderer.images is None:
            return []
        images = [image for message in messages for image in images_of(message)]
        return renderer.images.placed(ids, images, self._files)


def _keys_of(messages: list[ChatMessage], tools: list[Tool]) -> _Keys:
    return _Keys(list(message_keys(messages)), tools_key(tools))


def _texts_of(messages: list[ChatMessage], tools: list[Tool]) -> tuple[str, str]:
    return _encode(messages).decode(), _encode(tools).decode() if tools else "[]"


async def in_thread_if(is_long: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    if not is_long:
        return work(*args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **kwargs))


def _decoded(text: str) -> Any:
    return msgspec.json.decode(text)

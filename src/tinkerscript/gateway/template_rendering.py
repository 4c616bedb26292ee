"""`TemplateRendering` makes prompts, continuations and replies with a model's chat template.

A continuation renders the conversation twice: up to the header of the last reply, and with the reply and the
new messages. If the first text is a prefix of the second, and what follows reads as the sampled reply, the
text after the reply is encoded and appended to the sampled ids. Otherwise the template rewrites history.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_messages import (
    ChatMessage,
    Tool,
    canonical_json,
    images_of,
    joined_parts,
    reasoning_of,
)
from tinkerscript.gateway.chat_template import PROBE_CALL, PROBE_TOOL, ChatTemplate, parsed_arguments
from tinkerscript.gateway.images import ImageFormat
from tinkerscript.gateway.reply_format import ReplyFormat, reply_format
from tinkerscript.model_folder import stop_ids_of
from tinkerscript.tokenizer import LightTokenizer, unmarked

_ANSWERED: list[ChatMessage] = [
    {"role": "user", "content": "probe_question"},
    {"role": "assistant", "content": "probe_answer"},
    {"role": "user", "content": "probe_question"},
]

_HEADERS = 8
_TWO_CALLS: list[ChatMessage] = [
    PROBE_CALL[0],
    {**PROBE_CALL[1], "tool_calls": PROBE_CALL[1]["tool_calls"] * 2},
]


class TemplateRendering:
    """Messages and tools have marks already."""

    def __init__(self, template: ChatTemplate, tokenizer: LightTokenizer, folder: Path) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self.images = ImageFormat.of(folder, tokenizer)
        try:
            self.stop_ids: list[int] = self._find_stop_ids(folder)
        except GatewayError as error:
            raise ConfigError(f"the chat template of {folder} cannot be used: {error.message}") from error
        if not self.stop_ids:
            raise ConfigError(
                f"{folder}: nothing says which token ends a reply; name it as eos_token in "
                "tokenizer_config.json, or as eos_token_id in generation_config.json"
            )
        self._stops = {
            text: token for text, token in tokenizer.added_tokens.items() if token in self.stop_ids
        }
        prompt = template.text(_ANSWERED[:1], [], generation=True)
        written = self._written(PROBE_CALL[:2])
        self.format: ReplyFormat = reply_format(
            written, prompt, source=template.source, one_call=not self._written(_TWO_CALLS)
        )

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
        """Raises GatewayError 400 for refused messages and ignored tools."""
        now = self._template.now()
        text = self._template.text(messages, tools, generation=True, now=now)
        if tools and text == self._template.text(messages, [], generation=True, now=now):
            message = (
                "this model's chat template writes nothing about the tools of this request; leave them out "
                "(some templates need a system message to write them into)"
            )
            raise GatewayError(400, "tools_not_supported", message, param="tools")
        return self._tokenizer.encode(self._expanded(text, messages))

    def _expanded(self, text: str, messages: Sequence[ChatMessage]) -> str:
        if self.images is None:
            return text
        return self.images.expanded(text, [image for message in messages for image in images_of(message)])

    def continuation(
        self,
        history: Sequence[ChatMessage],
        sampled: Sequence[int],
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> list[int] | None:
        """Return the ids to append after `sampled`, the last message of `history`.

        None if the template rewrites the history or ends the reply differently. Raises GatewayError 400.
        """
        now = self._template.now()
        whole = self._template.text([*history, *messages], tools, generation=True, now=now)
        try:
            prompt = self._template.text(history[:-1], tools, generation=True, now=now)
        except GatewayError:
            return None
        end = self._end_of_turn(whole, len(prompt))
        if end is None or not whole.startswith(prompt):
            return None
        written = unmarked(whole[len(prompt) : end])
        if not self._is_written(history[-1], written, tools):
            return None
        if sampled and sampled[-1] in self.stop_ids:
            ids = self._tokenizer.encode(self._expanded(whole[end:], messages))
            # GLM's template does not end a reply; the next token does.
            return ids[1:] if self._ends_turns or ids[:1] == [sampled[-1]] else None
        if not self.format.split_reasoning(self._tokenizer.decode(sampled))[2]:
            start = whole.rfind(self.format.thinking[1], len(prompt), end)
            end = start if start >= 0 else end
        rest = self._expanded(whole[end:], messages)
        return self._tokenizer.encode_after(next(iter(self._stops), ""), rest)

    def _is_written(self, reply: ChatMessage, text: str, tools: Sequence[Tool]) -> bool:
        read = self.format.read(text, tool_calls="tool_calls" in reply, tools=tools)
        return (
            joined_parts(read.content).strip() == unmarked(reply["content"]).strip()
            and read.reasoning.strip() == unmarked(reasoning_of(reply))
            and [_call_key(*call) for call in read.calls] == [_call_key(*call) for call in _calls(reply)]
        )

    def reply(self, messages: Sequence[ChatMessage], reply: ChatMessage, tools: Sequence[Tool]) -> list[int]:
        """Return the ids of `reply` after the prompt for `messages`, with the end of the turn.

        Raises GatewayError 400 if the template writes it differently.
        """
        now = self._template.now()
        prompt = self._template.text(messages, tools, generation=True, now=now)
        past = self._template.text([*messages, reply], tools, generation=False, now=now)
        reply = self._with_reasoning(reply)
        if self._end_of_turn(past, min(self._starts_of_reply(prompt, past), default=0)) is None:
            # GLM ends a reply only if something follows.
            following = [_ANSWERED[2]]
            if calls := reply.get("tool_calls"):
                following = [{**PROBE_CALL[2], "tool_call_id": call.get("id")} for call in calls]
            past = self._template.text([*messages, reply, *following], tools, generation=True, now=now)
        for start in self._starts_of_reply(prompt, past):
            end = self._end_of_turn(past, start)
            text = past[start:end]
            if self._is_written(reply, unmarked(text), tools):
                stop = self._tokenizer.encode(past[end:])[:1] if end is not None else []
                return self._tokenizer.encode_after(prompt, text) + (stop or self.stop_ids[:1])
        message = (
            "the model's chat template does not write this reply, or not all of it (reasoning, text beside "
            f"calls), after its prompt, which ends with {self._header(prompt)!r}"
        )
        raise GatewayError(400, "invalid_messages", message, param="messages")

    def _with_reasoning(self, reply: ChatMessage) -> ChatMessage:
        # Templates look for reasoning in its own field.
        if reply.get("reasoning_content") or self.format.harmony:
            return reply
        reasoning, content, _ = self.format.split_reasoning(reply["content"])
        opened = reply["content"].lstrip().startswith(self.format.thinking[0])
        return {**reply, "content": content, "reasoning_content": reasoning} if opened else reply

    def _starts_of_reply(self, prompt: str, past: str) -> list[int]:
        """Return where in `past` the last reply may begin, most likely first.

        Once there is a reply, templates may rewrite earlier messages (Mistral's system message, DeepSeek's
        tool results, gpt-oss's reasoning); then the headers are searched.
        """
        if past.startswith(prompt):
            return [len(prompt)]
        plain = self._header(self._template.text(_ANSWERED[:1], [], generation=True))
        headers = "|".join(re.escape(header) for header in {self._header(prompt), plain})
        return [found.end() for found in re.finditer(headers, past)][: -_HEADERS - 1 : -1]

    def _header(self, prompt: str) -> str:
        return prompt[max((prompt.rfind(token) for token in self._tokenizer.added_tokens), default=0) :]

    def _end_of_turn(self, text: str, start: int) -> int | None:
        return min((at for stop in self._stops if (at := text.find(stop, start)) >= 0), default=None)

    def _find_stop_ids(self, folder: Path) -> list[int]:
        tokens = self._tokenizer.added_tokens
        last, other = (self._after_answer(_ANSWERED[:count]) for count in (2, 3))
        # gpt-oss ends earlier replies with a token that also occurs within replies.
        self._ends_turns = bool(last)
        written = last or other
        declared = [*sorted(stop_ids_of(folder)), self._tokenizer.eos_token_id]
        ids = [tokens.get(written), *declared]
        return list(dict.fromkeys(token for token in ids if token is not None))

    def _after_answer(self, messages: Sequence[ChatMessage]) -> str:
        after = self._template.text(messages, [], generation=False).partition("probe_answer")[2].lstrip()
        return max(
            (text for text in self._tokenizer.added_tokens if after.startswith(text)), key=len, default=""
        )

    def _written(self, messages: Sequence[ChatMessage]) -> str:
        try:
            prompt = self._template.text(messages[:1], [PROBE_TOOL], generation=True)
            past = self._template.text(messages, [PROBE_TOOL], generation=False)
        except GatewayError:
            return ""
        start = _common(prompt, past)
        return past[start : self._end_of_turn(past, start)]


def _calls(reply: ChatMessage) -> Iterator[tuple[str, Any]]:
    for call in reply.get("tool_calls") or ():
        name, arguments = (unmarked(call["function"][key]) for key in ("name", "arguments"))
        yield name, parsed_arguments(arguments)


def _call_key(name: str, arguments: Any) -> tuple[str, str]:
    # Some formats write `7` and `"7"` the same way.
    if isinstance(arguments, dict):
        values = cast("dict[str, Any]", arguments).items()
        arguments = {key: text if isinstance(text, str) else json.dumps(text) for key, text in values}
    return name, canonical_json(json.dumps(arguments))


def _common(one: str, other: str) -> int:
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

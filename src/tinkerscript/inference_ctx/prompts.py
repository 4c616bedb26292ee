"""`PromptRenderer`: a prompt's ids by the served model's chat template, as far as a client can know them.

Invariant: there is one way to render and no silent fallback. A tokenizer without a chat template is an error
unless the plain format was requested, and a template must return ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx.choices import read_ids
from tinkerscript.rollouts.call import IntArray

PromptMessage = Mapping[str, Any]
"""A message in OpenAI's format."""

PromptLike = str | Sequence[PromptMessage] | Sequence[int] | IntArray
"""A user message's text, a conversation in OpenAI's format, or the exact ids sent to the server."""

Tools = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's format."""

PromptFormat = Literal["chat_template", "plain"]
"""`plain`: `role: content` lines, for a model without a chat template; no chat model was trained on them."""


class PromptRenderer:
    """Renders prompts with one tokenizer's chat template."""

    def __init__(
        self, tokenizer: Any, prompt_format: PromptFormat, template_args: Mapping[str, Any] | None
    ) -> None:
        self._tokenizer: Any = tokenizer
        self._format = prompt_format
        self._template_args = dict(template_args or {})

    @property
    def can_render(self) -> bool:
        return self._format == "plain" or bool(getattr(self._tokenizer, "chat_template", None))

    def ids(
        self,
        prompt: PromptLike,
        system_prompt: str | None,
        tools: Tools | None,
        template_args: Mapping[str, Any],
    ) -> IntArray:
        """Render a prompt with its generation prompt: int32 [P]. Ids pass through unchanged.

        Raises AlignmentError for an empty prompt, a tokenizer without a chat template, or an empty result.
        """
        if not isinstance(prompt, str) and not len(prompt):
            raise AlignmentError("the prompt is empty: the first sampled token needs a token before it")
        if is_ids(prompt):
            return read_ids(cast("Any", prompt), "the prompt")
        messages = as_messages(cast("str | Sequence[PromptMessage]", prompt), system_prompt)
        if self._format == "plain":
            ids = self._plain(messages, tools)
        else:
            ids = self._apply_template(messages, tools, template_args)
        if not len(ids):
            raise AlignmentError(f"the prompt {str(prompt)[:100]!r} rendered to no tokens")
        return read_ids(ids, "the rendered prompt")

    def _plain(self, messages: list[dict[str, Any]], tools: Tools | None) -> Any:
        if tools:
            raise AlignmentError("the plain prompt format does not support tools")
        text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
        return self._tokenizer.encode(text, add_special_tokens=True)

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: Tools | None, template_args: Mapping[str, Any]
    ) -> Any:
        if not self.can_render:
            raise AlignmentError(
                "the tokenizer has no chat template, so the prompt is unknown: set the template, let "
                "the server report prompt ids, or pass prompt_format='plain'"
            )
        return self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,  # transformers 5 returns a BatchEncoding otherwise.
            **self._template_args | dict(template_args),
        )


def is_ids(prompt: PromptLike) -> bool:
    """Whether a prompt is ids, not text or messages."""
    if isinstance(prompt, np.ndarray):
        return True
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def as_messages(
    prompt: str | Sequence[PromptMessage], system_prompt: str | None = None
) -> list[dict[str, Any]]:
    """Convert a prompt to OpenAI messages; a string becomes a user message."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system_prompt is None:
        return messages
    if messages and messages[0]["role"] == "system":
        raise AlignmentError("system_prompt was passed, but the messages already begin with a system message")
    return [{"role": "system", "content": system_prompt}, *messages]

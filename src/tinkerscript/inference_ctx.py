"""`InferenceContext`: from prompts and OpenAI choices to rollouts, with nothing guessed.

    context = InferenceContext(tokenizer)
    completion = client.chat.completions.create(..., logprobs=True, extra_body={"return_token_ids": True})
    rollout = context.create_rollout_from_choice(
        prompt="What is 2+2?", choice=completion.choices[0], response=completion,
        env_name="gsm8k", env_example_id="ex_123", reward=1.0,
    )

Owns the chat template, so that no environment can go past it. The invariants: the prompt's ids that a server
reports win over a local rendering, and a difference is counted; sampled ids are read (see `rollouts.choices`)
or the choice is refused. After Marin's `InferenceContext` (github.com/marin-community/marin, issue 1744).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from uuid import uuid4

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.call import Call, FloatArray, IntArray, LogprobKind, pack_ids, pack_logprobs
from tinkerscript.rollouts.choices import ChoiceTokens, as_plain, read_choice
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.types import Rollout

SHORT_RESPONSE = 5
"""A response of fewer tokens is counted as `short_response`."""

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]
"""A user's text, or a conversation in OpenAI's form."""

PromptFormat = Literal["chat_template", "plain"]


class ContextTokenizer(Protocol):
    """What an `InferenceContext` needs of a tokenizer: Hugging Face's have it."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> Any: ...
    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...
    def convert_tokens_to_ids(self, tokens: list[str]) -> Any: ...


@dataclass(frozen=True, slots=True)
class InferenceChoice:
    """One answer of a model."""

    response_text: str
    response_tokens: IntArray
    """int32 [R]"""

    logprobs: FloatArray
    """float32 [R]"""


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """A prompt and its answers."""

    prompt: str
    prompt_tokens: IntArray
    """int32 [P]"""

    choices: list[InferenceChoice]


class Turn(NamedTuple):
    """One model call of a conversation."""

    prompt: Prompt
    """Everything that the model saw: the whole conversation so far."""

    choice: Any
    """The choice that was taken, as an `openai` object or a dictionary."""

    response: Any = None
    """The reply around it, where some servers report the prompt's ids."""


class InferenceContext:
    """Turns what an OpenAI-compatible server answered into rollouts.

    `warnings` counts what was suspicious and let through, by name; the alignment report shows it.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        prompt_format: PromptFormat = "chat_template",
        logprob_kind: LogprobKind = "unknown",
        temperature: float = 1.0,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` is the served model's. `template_args` go to every rendering of its chat template.

        `prompt_format="plain"` asks for `role: content` lines, for a model without a chat template; no chat
        model was trained on them. `logprob_kind` and `temperature` say what the reported numbers are of.
        """
        self.tokenizer: Any = tokenizer
        self.warnings: Counter[str] = Counter()
        self._prompt_format: PromptFormat = prompt_format
        self._logprob_kind: LogprobKind = logprob_kind
        self._temperature = temperature
        self._template_args = dict(template_args or {})

    # Prompts

    def tokenize_prompt(
        self,
        prompt: Prompt,
        *,
        system_prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_args: Any,
    ) -> IntArray:
        """The ids of a prompt by the chat template, generation prompt included: int32 [P].

        Raises AlignmentError for a tokenizer without a chat template, or an empty result.
        """
        messages = as_messages(prompt, system_prompt)
        if self._prompt_format == "plain":
            if tools:
                raise AlignmentError("the plain prompt format has no place for tools")
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            ids = self.tokenizer.encode(text, add_special_tokens=True)
        else:
            ids = self._apply_template(messages, tools, self._template_args | template_args)
        if not len(ids):
            raise AlignmentError(f"the prompt {str(prompt)[:100]!r} has no tokens")
        return np.array(ids, dtype=np.int32)

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, args: dict[str, Any]
    ) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise AlignmentError(
                "the tokenizer has no chat template, so the server's prompt cannot be known: give it the "
                "model's template, let the server report prompt ids, or ask for prompt_format='plain' by name"
            )
        return self.tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            **args,
        )

    # Choices

    def response_tokens_from_choice(self, choice: Any) -> IntArray:
        """The sampled ids, int32 [R].

        Raises AlignmentError for a choice without ids whose token texts are not proven to be pieces.
        """
        return self.tokens_from_choice(choice).ids

    def logprobs_from_choice(self, choice: Any) -> FloatArray:
        """The sampled tokens' log probabilities, float32 [R]. Raises AlignmentError if there are none."""
        return _needed(self.tokens_from_choice(choice).logprobs)

    def tokens_from_choice(self, choice: Any, response: Any = None) -> ChoiceTokens:
        """Ids, where they came from, log probabilities, and the prompt's ids. Raises AlignmentError."""
        return read_choice(choice, response=response, tokenizer=self.tokenizer)

    def to_inference_response(self, prompt: Prompt, response: Any) -> InferenceResponse:
        """A whole reply with its n choices. Raises AlignmentError."""
        choices = as_plain(response)["choices"]
        tokens = [self.tokens_from_choice(choice, response) for choice in choices]
        return InferenceResponse(
            prompt=prompt if isinstance(prompt, str) else str(list(prompt)),
            prompt_tokens=self._prompt_ids(prompt, tokens[0]),
            choices=[
                InferenceChoice(_text(choice), each.ids, _needed(each.logprobs))
                for choice, each in zip(choices, tokens, strict=True)
            ],
        )

    # Rollouts

    def create_rollout_from_choice(
        self,
        prompt: Prompt,
        choice: Any,
        env_name: str,
        env_example_id: str,
        reward: float | Sequence[float] | FloatArray,
        *,
        response: Any = None,
    ) -> Rollout:
        """One prompt and one choice as a rollout. `reward`: the episode's, or one a response token [R].

        Raises AlignmentError for a choice whose ids or log probabilities are missing or disagree.
        """
        (rollout,) = self.create_rollouts_from_turns(
            [Turn(prompt, choice, response)], env_name, env_example_id, reward
        )
        return rollout

    def create_rollouts_from_response(
        self, prompt: Prompt, response: Any, env_name: str, env_example_id: str, rewards: Sequence[float]
    ) -> list[Rollout]:
        """Each of the n choices of a reply as a rollout of its own, equal ones too, with a reward each."""
        choices = as_plain(response)["choices"]
        return [
            self.create_rollout_from_choice(
                prompt, choice, env_name, env_example_id, reward, response=response
            )
            for choice, reward in zip(choices, rewards, strict=True)
        ]

    def create_rollouts_from_turns(
        self,
        turns: Sequence[Turn],
        env_name: str,
        env_example_id: str,
        reward: float | Sequence[float] | FloatArray,
    ) -> tuple[Rollout, ...]:
        """A conversation as training sequences: one, if each prompt begins with all that came before it.

        Where a prompt does not (an edited history, thinking that the template strips), a new sequence begins;
        every sampled token is in one sequence, under the prefix it was sampled after. Raises AlignmentError.
        """
        calls = [self._call(turn, env_example_id) for turn in turns]
        rollouts = merge_calls(calls, episode_uuid=env_example_id)
        if len(rollouts) > 1:
            self.warnings["prefix_broken"] += len(rollouts) - 1
        return tuple(rollout.rewarded(reward, env_name, env_example_id) for rollout in rollouts)

    def _call(self, turn: Turn, env_example_id: str) -> Call:
        tokens = self.tokens_from_choice(turn.choice, turn.response)
        logprobs = _needed(tokens.logprobs)
        self._warn(tokens.ids, logprobs)
        return Call(
            call_id=f"{env_example_id}/{uuid4().hex}",
            parent_id=None,
            new_prompt=pack_ids(self._prompt_ids(turn.prompt, tokens)),
            sampled=pack_ids(tokens.ids),
            logprobs=pack_logprobs(logprobs),
            stop_reason="length" if as_plain(turn.choice).get("finish_reason") == "length" else "stop",
            policy_version=0,
            temperature=self._temperature,
            logprob_kind=self._logprob_kind,
            ids_from=tokens.ids_from,
            prompt_from="server" if tokens.prompt_ids is not None else "client",
        )

    def _prompt_ids(self, prompt: Prompt, tokens: ChoiceTokens) -> IntArray:
        """The server's ids of the prompt, or a local rendering where it reports none."""
        if tokens.prompt_ids is None:
            self.warnings["prompt_rendered_by_the_client"] += 1
            return self.tokenize_prompt(prompt)
        can_render = self._prompt_format == "plain" or getattr(self.tokenizer, "chat_template", None)
        if can_render and not np.array_equal(self.tokenize_prompt(prompt), tokens.prompt_ids):
            self.warnings["prompt_differs_from_local_rendering"] += 1
        return tokens.prompt_ids

    def _warn(self, ids: IntArray, logprobs: FloatArray) -> None:
        if len(ids) < SHORT_RESPONSE:
            self.warnings["short_response"] += 1
        if (logprobs == 0).all():
            self.warnings["logprobs_all_zero"] += 1


def as_messages(prompt: Prompt, system_prompt: str | None = None) -> list[dict[str, Any]]:
    """A prompt as OpenAI messages: a string is what the user says."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    if system_prompt is None:
        return messages
    if messages and messages[0]["role"] == "system":
        raise AlignmentError("system_prompt is given, and the messages begin with a system message already")
    return [{"role": "system", "content": system_prompt}, *messages]


def _needed(logprobs: FloatArray | None) -> FloatArray:
    if logprobs is None:
        raise AlignmentError("the choice has no log probabilities: ask for logprobs=True")
    return logprobs


def _text(choice: Any) -> str:
    plain = as_plain(choice)
    message = plain.get("message")
    return str((as_plain(message).get("content") if message is not None else plain.get("text")) or "")

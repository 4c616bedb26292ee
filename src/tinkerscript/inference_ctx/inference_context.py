"""`InferenceContext`: prompts and OpenAI choices -> rollouts, without guessing.

    context = InferenceContext(tokenizer)
    completion = client.chat.completions.create(..., logprobs=True, extra_body={"return_token_ids": True})
    rollout = context.create_rollout_from_choice(
        prompt="What is 2+2?", choice=completion.choices[0], response=completion,
        env_name="gsm8k", env_example_id="ex_123", reward=1.0,
    )

It owns the chat template, so that no environment can bypass it. Modeled on Marin's `InferenceContext`
(github.com/marin-community/marin, issue 1744).

Invariants: prompt ids reported by the server take precedence over a local rendering, and a difference is
counted; sampled ids are read from the reply (`choices`) or the choice is refused; whatever is suspicious but
accepted is counted in `warnings`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx.choices import (
    ChoiceTokens,
    as_plain,
    choices_of,
    plain_or_empty,
    read_choice,
    read_stop_reason,
)
from tinkerscript.inference_ctx.prompts import PromptFormat, PromptLike, PromptRenderer, Tools, is_ids
from tinkerscript.rollouts.call import Call, FloatArray, IntArray, LogprobKind, pack_ids, pack_logprobs
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout

SHORT_RESPONSE = 5
"""Responses with fewer tokens are counted as `short_response`."""

Reward = float | Sequence[float] | FloatArray | Callable[[Rollout], FloatArray]
"""The episode's reward; or shares of it, one per response token [R]; or a function that returns them
(`rollouts.advantages`)."""


@dataclass(frozen=True, slots=True)
class InferenceChoice:
    """One reply of a model."""

    response_text: str
    response_tokens: IntArray
    """int32 [R]"""

    logprobs: FloatArray
    """float32 [R]"""


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    """A prompt and its replies."""

    prompt: str
    prompt_tokens: IntArray
    """int32 [P]"""

    choices: list[InferenceChoice]


class InferenceTurn(NamedTuple):
    """One model call of a conversation."""

    prompt: PromptLike
    """Everything the model saw: the whole conversation so far."""

    choice: Any
    """The selected choice, as an `openai` object or a dictionary."""

    response: Any = None
    """The reply that contains it, where some servers report the prompt's ids."""

    tools: Tools | None = None
    """The tools of the request, which are part of the prompt."""


class InferenceContext:
    """Converts replies of an OpenAI-compatible server to rollouts.

    `warnings` counts by name what was suspicious but accepted; pass it to `AlignmentReport.add_warnings`.
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
        """`tokenizer` is the served model's, with Hugging Face's methods.

        `template_args` are passed to every rendering of its chat template. `prompt_format="plain"` renders
        `role: content` lines, for a model without a chat template; no chat model was trained on them.
        `logprob_kind` and `temperature` say which distribution the reported logprobs are of.
        """
        self.tokenizer: Any = tokenizer
        self.warnings: Counter[str] = Counter()
        self._prompts = PromptRenderer(tokenizer, prompt_format, template_args)
        self._logprob_kind: LogprobKind = logprob_kind
        self._temperature = temperature

    def tokenize_prompt(
        self,
        prompt: PromptLike,
        *,
        system_prompt: str | None = None,
        tools: Tools | None = None,
        **template_args: Any,
    ) -> IntArray:
        """Render a prompt by the chat template, with the generation prompt: int32 [P].

        Ids pass through unchanged. Raises AlignmentError for a tokenizer without a chat template, or an empty
        result.
        """
        return self._prompts.ids(prompt, system_prompt, tools, template_args)

    def response_tokens_from_choice(self, choice: Any) -> IntArray:
        """Read the sampled ids, int32 [R].

        Raises AlignmentError for a choice without ids, unless its token texts are proven to be vocabulary
        pieces.
        """
        return self.tokens_from_choice(choice).ids

    def logprobs_from_choice(self, choice: Any) -> FloatArray:
        """Read the sampled tokens' logprobs, float32 [R]. Raises AlignmentError if there are none."""
        return _needed(self.tokens_from_choice(choice).logprobs)

    def tokens_from_choice(self, choice: Any, response: Any = None) -> ChoiceTokens:
        """Read ids and their source, logprobs, and the prompt's ids. Raises AlignmentError."""
        return read_choice(choice, response=response, tokenizer=self.tokenizer)

    def to_inference_response(
        self, prompt: PromptLike, response: Any, *, tools: Tools | None = None
    ) -> InferenceResponse:
        """Convert a whole reply with its n choices. Raises AlignmentError."""
        choices = choices_of(response)
        tokens = [self.tokens_from_choice(choice, response) for choice in choices]
        return InferenceResponse(
            prompt=prompt if isinstance(prompt, str) else str(list(prompt)),
            prompt_tokens=self._prompt_ids(prompt, tools, tokens[0]),
            choices=[
                InferenceChoice(_text(choice), each.ids, _needed(each.logprobs))
                for choice, each in zip(choices, tokens, strict=True)
            ],
        )

    def create_rollout_from_choice(
        self,
        prompt: PromptLike,
        choice: Any,
        env_name: str,
        env_example_id: str,
        reward: Reward,
        *,
        response: Any = None,
        tools: Tools | None = None,
    ) -> Rollout:
        """Make a rollout of one prompt and one choice.

        Raises AlignmentError for a choice whose ids or logprobs are missing or disagree.
        """
        (rollout,) = self.create_rollouts_from_turns(
            [InferenceTurn(prompt, choice, response, tools)], env_name, env_example_id, reward
        )
        return rollout

    def create_rollouts_from_response(
        self,
        prompt: PromptLike,
        response: Any,
        env_name: str,
        env_example_id: str,
        rewards: Sequence[Reward],
        *,
        tools: Tools | None = None,
    ) -> list[Rollout]:
        """Make one rollout per choice of a reply, even for equal choices, with a reward each.

        Raises AlignmentError, and ValueError if the numbers of rewards and choices differ.
        """
        choices = choices_of(response)
        if len(choices) != len(rewards):
            raise ValueError(f"{len(rewards)} rewards for {len(choices)} choices")
        return [
            self.create_rollout_from_choice(
                prompt, choice, env_name, env_example_id, reward, response=response, tools=tools
            )
            for choice, reward in zip(choices, rewards, strict=True)
        ]

    def create_rollouts_from_turns(
        self,
        turns: Sequence[InferenceTurn],
        env_name: str,
        env_example_id: str,
        reward: Reward,
    ) -> tuple[Rollout, ...]:
        """Make the training sequences of a conversation: one, if each prompt extends everything before it.

        A prompt that does not (edited history, thinking stripped by the template) starts a new sequence.
        Every sampled token is in exactly one sequence, after the prefix it was sampled under. Raises
        AlignmentError.
        """
        calls = [self._call(turn, env_example_id) for turn in turns]
        rollouts = merge_calls(calls, episode_uuid=env_example_id)
        if len(rollouts) > 1:
            self.warnings["prefix_broken"] += len(rollouts) - 1
        return tuple(
            rollout.rewarded(reward(rollout) if callable(reward) else reward, env_name, env_example_id)
            for rollout in rollouts
        )

    def _call(self, turn: InferenceTurn, env_example_id: str) -> Call:
        tokens = self.tokens_from_choice(turn.choice, turn.response)
        logprobs = _needed(tokens.logprobs)
        self._warn(tokens.ids, logprobs)
        self._check_usage(turn.response, len(tokens.ids))
        return Call(
            call_id=f"{env_example_id}/{uuid4().hex}",
            parent_id=None,
            new_prompt=pack_ids(self._prompt_ids(turn.prompt, turn.tools, tokens)),
            sampled=pack_ids(tokens.ids),
            logprobs=pack_logprobs(logprobs),
            stop_reason=read_stop_reason(turn.choice),
            policy_version=0,
            temperature=self._temperature,
            logprob_kind=self._logprob_kind,
            ids_from=tokens.ids_from,
            prompt_from="client" if tokens.prompt_ids is None and not is_ids(turn.prompt) else "server",
        )

    def _prompt_ids(self, prompt: PromptLike, tools: Tools | None, tokens: ChoiceTokens) -> IntArray:
        """The server's prompt ids, or a local rendering if it reports none."""
        if is_ids(prompt):
            return self._ids_sent(prompt, tokens)
        if tokens.prompt_ids is None:
            self.warnings["prompt_rendered_by_the_client"] += 1
            return self.tokenize_prompt(prompt, tools=tools)
        if self._prompts.can_render and not np.array_equal(
            self.tokenize_prompt(prompt, tools=tools), tokens.prompt_ids
        ):
            self.warnings["prompt_differs_from_local_rendering"] += 1
        return tokens.prompt_ids

    def _ids_sent(self, prompt: PromptLike, tokens: ChoiceTokens) -> IntArray:
        """The ids the caller sent. Raises AlignmentError if the server reports different ones."""
        ids = self.tokenize_prompt(prompt)
        if tokens.prompt_ids is not None and not np.array_equal(ids, tokens.prompt_ids):
            raise AlignmentError(
                f"the server reports {len(tokens.prompt_ids)} prompt ids, which are not the {len(ids)} given"
            )
        return ids

    def _check_usage(self, response: Any, sampled: int) -> None:
        """Count a one-choice reply whose usage and token count differ."""
        plain = plain_or_empty(response)
        counted = plain_or_empty(plain.get("usage")).get("completion_tokens")
        if counted is not None and len(plain.get("choices") or ()) == 1 and counted != sampled:
            self.warnings["usage_differs"] += 1

    def _warn(self, ids: IntArray, logprobs: FloatArray) -> None:
        if len(ids) < SHORT_RESPONSE:
            self.warnings["short_response"] += 1
        if (logprobs == 0).all():
            self.warnings["logprobs_all_zero"] += 1


def _needed(logprobs: FloatArray | None) -> FloatArray:
    if logprobs is None:
        raise AlignmentError("the choice has no log probabilities: ask for logprobs=True")
    return logprobs


def _text(choice: Any) -> str:
    plain = as_plain(choice)
    message = plain.get("message")
    return str((plain.get("text") if message is None else as_plain(message).get("content")) or "")

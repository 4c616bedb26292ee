"""`InferenceContext`: prompts and OpenAI choices -> rollouts, without guessing.

    request = {"temperature": 1.0, "logprobs": True, "extra_body": {"return_token_ids": True}}
    completion = client.chat.completions.create(model="served", messages=[...], **request)
    rollout = InferenceContext(tokenizer).create_rollout_from_choice(
        prompt="What is 2+2?", choice=completion.choices[0], response=completion, request=request,
        env_name="gsm8k", env_example_id="ex_123", reward=1.0,
    )

Modeled on Marin's `InferenceContext` (github.com/marin-community/marin, issue 1744).

The server's prompt ids take precedence over a local rendering. Sampled ids are read from the reply, or the
choice is refused. Everything in a request that changes the sampled distribution is on the call, or makes its
tokens constrained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast
from uuid import uuid4

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx.choices import (
    ChoiceTokens,
    as_plain,
    plain_or_empty,
    read_choice,
    read_ids,
    read_stop_reason,
)
from tinkerscript.rollouts.call import (
    Call,
    FloatArray,
    IntArray,
    LogprobKind,
    TokenConstraint,
    pack_ids,
    pack_logprobs,
)
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import Rollout

SHORT_RESPONSE = 5  # Shorter replies are counted.

Reward = float | Sequence[float] | FloatArray | Callable[[Rollout], FloatArray]
"""The episode's reward; its shares per response token [R]; or a function that returns them
(`rollouts.advantages`).
"""

PromptLike = str | Sequence[Mapping[str, Any]] | Sequence[int] | IntArray
"""A user message's text, a conversation in OpenAI's format, or the exact ids sent to the server."""

Tools = Sequence[Mapping[str, Any]]  # In OpenAI's format.

PromptFormat = Literal["chat_template", "plain"]
"""`plain`: `role: content` lines, for a base model without a chat template."""

RequestParameters = Mapping[str, Any]
"""By their names on the wire, also in `extra_body`."""

# They force or forbid tokens, or change their probabilities.
_GRAMMARS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("allowed_token_ids", "bad_words", "logit_bias", "json_schema", "regex", "ebnf", "structural_tag"),
)


@dataclass(frozen=True, slots=True)
class InferenceChoice:
    response_text: str
    response_tokens: IntArray
    """int32 [R]"""

    logprobs: FloatArray
    """float32 [R]"""


@dataclass(frozen=True, slots=True)
class InferenceResponse:
    prompt: str
    prompt_tokens: IntArray
    """int32 [P]"""

    choices: list[InferenceChoice]


class InferenceTurn(NamedTuple):
    prompt: PromptLike
    """The whole conversation so far."""

    choice: Any
    """An `openai` object or a dictionary."""

    response: Any = None
    """The reply around it, which may have the prompt's ids."""

    tools: Tools | None = None
    request: RequestParameters | None = None
    """The request's parameters: temperature, top-p, top-k, a grammar."""


class InferenceContext:
    """Converts replies of an OpenAI-compatible server to rollouts.

    `warnings` counts suspicious choices that were accepted, for `AlignmentReport.add_warnings`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        raw_pieces: bool = False,
        vocabulary: int | None = None,
        prompt_format: PromptFormat = "chat_template",
        logprob_kind: LogprobKind = "unknown",
        temperature: float = 1.0,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` is the served model's, with Hugging Face's methods.

        `raw_pieces`: the server sends vocabulary pieces (`Ġhello`), as Levanter does. `vocabulary`: the
        number of the model's ids, if it exceeds the tokenizer's. `template_args`: for the chat template.
        `logprob_kind` and `temperature` describe the logprobs of requests that do not say.
        """
        self.tokenizer: Any = tokenizer
        self.warnings: Counter[str] = Counter()
        self._raw_pieces = raw_pieces
        sized = hasattr(tokenizer, "__len__")
        self._vocabulary = len(tokenizer) if vocabulary is None and sized else vocabulary
        self._is_plain = prompt_format == "plain"
        self._logprob_kind: LogprobKind = logprob_kind
        self._temperature = temperature
        self._template_args = dict(template_args or {})

    def tokenize_prompt(
        self, prompt: PromptLike, *, tools: Tools | None = None, **template_args: Any
    ) -> IntArray:
        """Render a prompt with the chat template and generation prompt: int32 [P]. Ids pass through
        unchanged.

        Raises AlignmentError for an empty prompt or result, or a tokenizer without a chat template.
        """
        if not isinstance(prompt, str) and not len(prompt):
            raise AlignmentError("the prompt is empty: the first sampled token needs a token before it")
        if _is_ids(prompt):
            return read_ids(prompt, "the prompt")
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if self._is_plain:
            if tools:
                raise AlignmentError("the plain prompt format does not support tools")
            text = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            ids = self.tokenizer.encode(text, add_special_tokens=True)
        elif not self._can_render:
            raise AlignmentError(
                "the tokenizer has no chat template, so the prompt is unknown: set the template, let "
                "the server report prompt ids, or pass prompt_format='plain'"
            )
        else:
            ids = self.tokenizer.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,  # transformers 5 returns a BatchEncoding otherwise.
                **self._template_args | template_args,
            )
        if not len(ids):
            raise AlignmentError(f"the prompt {str(prompt)[:100]!r} rendered to no tokens")
        return read_ids(ids, "the rendered prompt")

    def response_tokens_from_choice(self, choice: Any) -> IntArray:
        """Read the sampled ids, int32 [R]. Raises AlignmentError without ids."""
        return self.tokens_from_choice(choice).ids

    def logprobs_from_choice(self, choice: Any) -> FloatArray:
        """Read the logprobs, float32 [R]. Raises AlignmentError without any."""
        return _needed(self.tokens_from_choice(choice).logprobs)

    def tokens_from_choice(self, choice: Any, response: Any = None) -> ChoiceTokens:
        """Read ids, logprobs, and the prompt's ids. Raises AlignmentError."""
        return read_choice(
            choice,
            response=response,
            tokenizer=self.tokenizer,
            raw_pieces=self._raw_pieces,
            vocabulary=self._vocabulary,
        )

    def to_inference_response(
        self, prompt: PromptLike, response: Any, *, tools: Tools | None = None
    ) -> InferenceResponse:
        """Convert a whole reply with its n choices. Raises AlignmentError."""
        choices = [as_plain(choice) for choice in as_plain(response).get("choices") or ()]
        if not choices:
            raise AlignmentError("the reply holds no choices; use chat completions or completions")
        tokens = [self.tokens_from_choice(choice, response) for choice in choices]
        texts = [plain_or_empty(each.get("message")).get("content") or each.get("text") for each in choices]
        return InferenceResponse(
            prompt=prompt if isinstance(prompt, str) else str(list(prompt)),
            prompt_tokens=self._prompt_ids(InferenceTurn(prompt, None, response, tools), tokens[0]),
            choices=[
                InferenceChoice(text or "", each.ids, _needed(each.logprobs))
                for text, each in zip(texts, tokens, strict=True)
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
        request: RequestParameters | None = None,
    ) -> Rollout:
        """Make a rollout of one prompt and one choice. Keyword arguments are as in `InferenceTurn`.

        Raises AlignmentError for missing, wrong or contradictory ids or logprobs.
        """
        turn = InferenceTurn(prompt, choice, response, tools, request)
        (rollout,) = self.create_rollouts_from_turns([turn], env_name, env_example_id, reward)
        return rollout

    def create_rollouts_from_turns(
        self, turns: Sequence[InferenceTurn], env_name: str, env_example_id: str, reward: Reward
    ) -> tuple[Rollout, ...]:
        """Make the training sequences of a conversation: one, if each prompt extends everything before it.

        A prompt that does not (edited history, thinking stripped by the template) starts a new sequence.
        Raises AlignmentError.
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
        logprobs, given = _needed(tokens.logprobs), _given(turn)
        self._warn(turn.response, tokens.ids, logprobs)
        constrained, logprob_kind = tokens.constrained, self._logprob_kind
        if constrained is None and _is_constrained(given):
            # Where the grammar applied is unknown, and whether the logprobs are from before it.
            constrained, logprob_kind = bytes([TokenConstraint.UNKNOWN]) * len(tokens.ids), "unknown"
        return Call(
            call_id=f"{env_example_id}/{uuid4().hex}",
            parent_id=None,
            new_prompt=pack_ids(self._prompt_ids(turn, tokens)),
            sampled=pack_ids(tokens.ids),
            logprobs=pack_logprobs(logprobs),
            stop_reason=read_stop_reason(turn.choice),
            policy_version=0,
            temperature=given.get("temperature", self._temperature),
            top_p=given.get("top_p", 1.0),
            top_k=given.get("top_k") or -1,
            min_p=given.get("min_p", 0.0),
            repetition_penalty=given.get("repetition_penalty", 1.0),
            seed=given.get("seed"),
            logprob_kind=logprob_kind,
            constrained=constrained or b"",
            ids_from=tokens.ids_from,
            prompt_from="client" if tokens.prompt_ids is None and not _is_ids(turn.prompt) else "server",
        )

    @property
    def _can_render(self) -> bool:
        return self._is_plain or bool(getattr(self.tokenizer, "chat_template", None))

    def _prompt_ids(self, turn: InferenceTurn, tokens: ChoiceTokens) -> IntArray:
        theirs = tokens.prompt_ids
        if theirs is not None and not len(theirs):
            raise AlignmentError("the server reports an empty prompt")
        if theirs is not None and not _is_ids(turn.prompt) and not self._can_render:
            return theirs
        given = _given(turn)
        tools, template_args = turn.tools or given.get("tools"), given.get("chat_template_kwargs") or {}
        ours = self.tokenize_prompt(turn.prompt, tools=tools, **template_args)
        if theirs is None:
            self._count("prompt_rendered_by_the_client", not _is_ids(turn.prompt))
            return ours
        if not np.array_equal(ours, theirs):
            if _is_ids(turn.prompt):
                raise AlignmentError(
                    f"the server reports {len(theirs)} prompt ids, which are not the {len(ours)} given"
                )
            self._count("prompt_differs_from_local_rendering", True)
        return theirs

    def _warn(self, response: Any, ids: IntArray, logprobs: FloatArray) -> None:
        reply = plain_or_empty(response)
        counted = plain_or_empty(reply.get("usage")).get("completion_tokens")
        is_only = len(reply.get("choices") or ()) == 1
        self._count("usage_differs", counted is not None and is_only and counted != len(ids))
        self._count("short_response", len(ids) < SHORT_RESPONSE)
        self._count("logprobs_all_zero", bool((logprobs == 0).all()))

    def _count(self, warning: str, applies: bool) -> None:
        if applies:
            self.warnings[warning] += 1


def _is_ids(prompt: PromptLike) -> bool:
    if isinstance(prompt, np.ndarray):
        return True
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def _given(turn: InferenceTurn) -> dict[str, Any]:
    request = turn.request or {}
    given = {**request, **cast("Mapping[str, Any]", request.get("extra_body") or {})}
    for name in ("presence_penalty", "frequency_penalty"):
        if given.get(name):
            raise AlignmentError(f"{name}={given[name]} changes what was sampled, and no trainer knows it")
    return {name: value for name, value in given.items() if value is not None}


def _is_constrained(given: Mapping[str, Any]) -> bool:
    wanted = given.get("response_format")
    return (
        any(given.get(name) for name in _GRAMMARS)
        or bool(wanted and not (isinstance(wanted, Mapping) and wanted.get("type") == "text"))
        or given.get("tool_choice", "auto") not in ("auto", "none")
    )


def _needed(logprobs: FloatArray | None) -> FloatArray:
    if logprobs is None:
        raise AlignmentError("the choice has no log probabilities: ask for logprobs=True")
    return logprobs

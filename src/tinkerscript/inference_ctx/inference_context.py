"""`InferenceContext`: prompts and OpenAI choices -> rollouts, without guessing.

    context = InferenceContext(tokenizer, base_url="http://127.0.0.1:8000/v1", model="served")
    (completion,) = context.batch_completions(["What is 2+2?"], temperature=1.0, n=1)
    rollout = context.create_rollout_from_choice(
        prompt="What is 2+2?", choice=completion.choices[0], response=completion,
        env_name="gsm8k", env_example_id="ex_123", reward=1.0,
    )

It owns the chat template, so that no environment can bypass it. Modeled on Marin's `InferenceContext`
(github.com/marin-community/marin, issue 1744).

Invariants: prompt ids reported by the server take precedence over a local rendering, and a difference is
counted; sampled ids are read from the reply (`choices`) or the choice is refused; what the request asked of
the sampler is on the call (`sampling_requests`); whatever is suspicious but accepted is counted in
`warnings`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
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
from tinkerscript.inference_ctx.prompts import (
    PromptFormat,
    PromptLike,
    PromptMessage,
    PromptRenderer,
    Tools,
    is_ids,
)
from tinkerscript.inference_ctx.sampling_requests import RequestParameters, SamplingOptions, complete_all
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

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

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

    request: RequestParameters | None = None
    """The parameters of the request, which say what was sampled from: temperature, top-p, top-k, whether a
    grammar was in force. None: those that `batch_completions` put on the response, if it made it."""

    system_prompt: str | None = None
    """Comes before a prompt given as text."""


class InferenceContext:
    """Converts replies of an OpenAI-compatible server to rollouts.

    `warnings` counts by name what was suspicious but accepted; pass it to `AlignmentReport.add_warnings`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        base_url: str = "",
        api_key: str = "none",
        model: str = "policy",
        raw_pieces: bool = False,
        vocabulary: int | None = None,
        prompt_format: PromptFormat = "chat_template",
        logprob_kind: LogprobKind = "unknown",
        temperature: float = 1.0,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        """`tokenizer` is the served model's, with Hugging Face's methods.

        `base_url`, `api_key` and `model` are for requests of one's own (`openai_client`,
        `batch_completions`). `raw_pieces` declares that the server sends vocabulary pieces (`Ġhello`) as
        token texts, as Levanter's does. `vocabulary` is the number of the model's ids, if it has more than
        the tokenizer. `template_args` are passed to every rendering of its chat template.
        `prompt_format="plain"` renders `role: content` lines, for a model without a chat template; no chat
        model was trained on them. `logprob_kind` and `temperature` say which distribution the reported
        logprobs are of, for replies whose request does not.
        """
        self.tokenizer: Any = tokenizer
        self.warnings: Counter[str] = Counter()
        self._base_url, self._api_key, self._model = base_url, api_key, model
        self._raw_pieces = raw_pieces
        self._vocabulary = vocabulary if vocabulary is not None else _size_of(tokenizer)
        self._prompts = PromptRenderer(tokenizer, prompt_format, template_args)
        self._logprob_kind: LogprobKind = logprob_kind
        self._temperature = temperature

    def openai_client(self) -> AsyncOpenAI:
        """A new client of the server, which the caller closes. Needs the `openai` package.

        Raises ValueError without a `base_url`.
        """
        from openai import AsyncOpenAI  # noqa: PLC0415 (optional dependency)

        if not self._base_url:
            raise ValueError("a client needs a server: InferenceContext(tokenizer, base_url=...)")
        return AsyncOpenAI(base_url=self._base_url, api_key=self._api_key)

    def batch_completions(
        self,
        prompts: Sequence[str | Sequence[PromptMessage]],
        temperature: float,
        n: int,
        max_tokens: int | None = None,
        top_k: int | None = None,
        stop: Sequence[str] | None = None,
        system_prompt: str | None = None,
        **parameters: Any,
    ) -> list[ChatCompletion]:
        """Sample n replies to each prompt: one completion per prompt, in order, with logprobs and token ids.

        `parameters` are further ones of the request, by their names on the wire; what OpenAI's client does
        not know (`min_p`, `stop_token_ids`, `chat_template_kwargs`, ...) goes through `extra_body`. Each
        completion carries the request, so that its rollouts say what was sampled from. Raises what OpenAI's
        client raises, and RuntimeError inside a running event loop: use `openai_client` there.
        """
        request = {
            "model": self._model,
            "temperature": temperature,
            "n": n,
            "max_tokens": max_tokens,
            "top_k": top_k,
            "stop": list(stop) if stop else None,
            "system_prompt": system_prompt,
            **parameters,
        }
        SamplingOptions.of(request)
        if _in_event_loop():
            raise RuntimeError(
                "batch_completions waits; inside an event loop await requests of openai_client()"
            )

        async def run() -> list[ChatCompletion]:
            async with self.openai_client() as client:
                return await complete_all(client, prompts, request)

        return asyncio.run(run())

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
        return read_choice(
            choice,
            response=response,
            tokenizer=self.tokenizer,
            raw_pieces=self._raw_pieces,
            vocabulary=self._vocabulary,
        )

    def is_truncated(self, choice: Any) -> bool:
        """Whether the token limit cut the choice off. Raises AlignmentError if it ended in no known way."""
        return read_stop_reason(choice) == "length"

    def to_inference_response(
        self, prompt: PromptLike, response: Any, *, tools: Tools | None = None
    ) -> InferenceResponse:
        """Convert a whole reply with its n choices. Raises AlignmentError."""
        choices = choices_of(response)
        tokens = [self.tokens_from_choice(choice, response) for choice in choices]
        return InferenceResponse(
            prompt=prompt if isinstance(prompt, str) else str(list(prompt)),
            prompt_tokens=self._prompt_ids(InferenceTurn(prompt, None, response, tools), tokens[0]),
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
        request: RequestParameters | None = None,
        system_prompt: str | None = None,
    ) -> Rollout:
        """Make a rollout of one prompt and one choice; the other arguments are those of `InferenceTurn`.

        Raises AlignmentError for a choice whose ids or logprobs are missing, wrong, or disagree.
        """
        turn = InferenceTurn(prompt, choice, response, tools, request, system_prompt)
        (rollout,) = self.create_rollouts_from_turns([turn], env_name, env_example_id, reward)
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
        request: RequestParameters | None = None,
        system_prompt: str | None = None,
    ) -> list[Rollout]:
        """Make one rollout per choice of a reply, even for equal choices, with a reward each.

        Raises AlignmentError, and ValueError if the numbers of rewards and choices differ.
        """
        choices = choices_of(response)
        if len(choices) != len(rewards):
            raise ValueError(f"{len(rewards)} rewards for {len(choices)} choices")
        return [
            self.create_rollout_from_choice(
                prompt,
                choice,
                env_name,
                env_example_id,
                reward,
                response=response,
                tools=tools,
                request=request,
                system_prompt=system_prompt,
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
        logprobs, options = _needed(tokens.logprobs), _options(turn)
        self._warn(tokens.ids, logprobs)
        self._check_usage(turn.response, len(tokens.ids))
        constrained, logprob_kind = tokens.constrained, self._logprob_kind
        if constrained is None and options.is_constrained:
            # Nothing says where, nor whether the logprobs are of what the grammar left.
            constrained, logprob_kind = bytes([TokenConstraint.UNKNOWN]) * len(tokens.ids), "unknown"
        return Call(
            call_id=f"{env_example_id}/{uuid4().hex}",
            parent_id=None,
            new_prompt=pack_ids(self._prompt_ids(turn, tokens)),
            sampled=pack_ids(tokens.ids),
            logprobs=pack_logprobs(logprobs),
            stop_reason=read_stop_reason(turn.choice),
            policy_version=0,
            temperature=self._temperature if options.temperature is None else options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=options.seed,
            logprob_kind=logprob_kind,
            constrained=constrained or b"",
            ids_from=tokens.ids_from,
            prompt_from="client" if tokens.prompt_ids is None and not is_ids(turn.prompt) else "server",
        )

    def _prompt_ids(self, turn: InferenceTurn, tokens: ChoiceTokens) -> IntArray:
        """The server's prompt ids, or a local rendering if it reports none."""
        if is_ids(turn.prompt):
            return self._ids_sent(turn.prompt, tokens)
        if tokens.prompt_ids is None:
            self.warnings["prompt_rendered_by_the_client"] += 1
            return self._rendered(turn)
        if not len(tokens.prompt_ids):
            raise AlignmentError("the server reports an empty prompt")
        if self._prompts.can_render and not np.array_equal(self._rendered(turn), tokens.prompt_ids):
            self.warnings["prompt_differs_from_local_rendering"] += 1
        return tokens.prompt_ids

    def _rendered(self, turn: InferenceTurn) -> IntArray:
        options = _options(turn)
        return self.tokenize_prompt(
            turn.prompt,
            system_prompt=turn.system_prompt or options.system_prompt,
            tools=turn.tools or options.tools,
            **(options.template_args or {}),
        )

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


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _options(turn: InferenceTurn) -> SamplingOptions:
    request = turn.request if turn.request is not None else plain_or_empty(turn.response).get("request")
    return SamplingOptions.of(request or {})


def _size_of(tokenizer: Any) -> int | None:
    """The number of a tokenizer's ids, added ones included; None if it does not say."""
    return len(tokenizer) if hasattr(tokenizer, "__len__") else None


def _needed(logprobs: FloatArray | None) -> FloatArray:
    if logprobs is None:
        raise AlignmentError("the choice has no log probabilities: ask for logprobs=True")
    return logprobs


def _text(choice: Any) -> str:
    plain = as_plain(choice)
    message = plain.get("message")
    return str((plain.get("text") if message is None else as_plain(message).get("content")) or "")

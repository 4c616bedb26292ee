"""Requests to an OpenAI-compatible server: sent in batches, and read for what they ask of its sampler.

Invariant: whatever in a request changes the distribution that is sampled from is on the calls that are made
of its replies, or makes all of their tokens constrained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx.prompts import PromptMessage, as_messages

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

RequestParameters = Mapping[str, Any]
"""The parameters of a request by their names on the wire; those in `extra_body` count like the others."""

MAX_IN_FLIGHT = 64
"""Requests of one batch that a server gets at once."""

GRAMMARS = frozenset(
    {
        # vLLM
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "allowed_token_ids",
        "bad_words",
        # SGLang
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        # both
        "logit_bias",
    }
)
"""Parameters that force tokens, forbid them, or change their probabilities one by one."""

_EXTRA = ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "chat_template_kwargs")
"""Parameters that OpenAI's API lacks: the SDK takes them in `extra_body`."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a request asks of the sampler, and what its prompt has beside messages. None: it does not say."""

    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    is_constrained: bool = False
    """Whether a grammar, or whatever else limits single tokens, is in force."""

    template_args: Mapping[str, Any] | None = None
    """`chat_template_kwargs`"""

    tools: Sequence[Mapping[str, Any]] | None = None
    system_prompt: str | None = None

    @classmethod
    def of(cls, request: RequestParameters) -> SamplingOptions:
        """Read a request. Raises AlignmentError for penalties that change logprobs as tokens repeat."""
        given = {**request, **(request.get("extra_body") or {})}
        given = {name: value for name, value in given.items() if value is not None}
        for name in ("presence_penalty", "frequency_penalty"):
            if given.get(name):
                raise AlignmentError(
                    f"{name}={given[name]} changes what was sampled, and no trainer knows it"
                )
        return cls(
            temperature=given.get("temperature"),
            top_p=given.get("top_p", 1.0),
            top_k=given.get("top_k") or -1,
            min_p=given.get("min_p", 0.0),
            repetition_penalty=given.get("repetition_penalty", 1.0),
            seed=given.get("seed"),
            is_constrained=_is_constrained(given),
            template_args=given.get("chat_template_kwargs"),
            tools=given.get("tools"),
            system_prompt=given.get("system_prompt"),
        )


def _is_constrained(given: RequestParameters) -> bool:
    if any(given.get(name) for name in GRAMMARS):
        return True
    wanted = given.get("response_format")
    if wanted and not (isinstance(wanted, Mapping) and wanted.get("type") == "text"):
        return True
    return given.get("tool_choice", "auto") not in ("auto", "none")


async def complete_all(
    client: AsyncOpenAI, prompts: Sequence[str | Sequence[PromptMessage]], request: RequestParameters
) -> list[ChatCompletion]:
    """One chat completion for each prompt, in their order; the first error cancels the rest.

    Logprobs and token ids are asked for. Each reply has the `request` that it answers, without its prompt.
    """
    slots = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def complete(prompt: str | Sequence[PromptMessage]) -> ChatCompletion:
        async with slots:
            completion = await client.chat.completions.create(
                messages=cast("Any", as_messages(prompt, system_prompt)),
                logprobs=True,
                extra_body={**extra, "return_token_ids": True},
                **sent,
            )
        # Like every unknown field of a reply, it is kept when the reply is dumped and loaded again.
        cast("Any", completion).request = {**sent, "system_prompt": system_prompt, "extra_body": extra}
        return completion

    given = {name: value for name, value in request.items() if value is not None}
    system_prompt = given.pop("system_prompt", None)
    extra = {**given.pop("extra_body", {}), **{name: given.pop(name) for name in _EXTRA if name in given}}
    sent: dict[str, Any] = given
    tasks = [asyncio.ensure_future(complete(prompt)) for prompt in prompts]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""What an OpenAI-compatible server's reply says about tokens: ids, log probabilities, the prompt's ids.

The invariant: ids are read, never guessed. Of the places where servers report ids the first that is there is
taken, in the order of `SOURCES`; where there are several they must agree, and ids and log probabilities must
have one length. Without any, vocabulary pieces are converted only where that is proven (see `pieces`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.rollouts.pieces import REMEDY, PieceTokenizer, ids_of_pieces

IdsFrom = Literal[
    "sampler",
    "token_ids",
    "meta_info",
    "output_ids",
    "raw_output",
    "logprobs_token_id",
    "token_id_text",
    "sglext",
    "pieces",
]
"""Where sampled ids came from. `sampler`: the engine itself, through our gateway."""

PIECES: IdsFrom = "pieces"

SENTINEL_LOGPROB = -9999.0
"""Servers that cannot send -inf send this instead."""

_TOKEN_ID_TEXT = re.compile(r"token_id:(\d+)")


@dataclass(frozen=True, slots=True)
class ChoiceTokens:
    """The tokens of one choice."""

    ids: IntArray
    """int32 [R]"""

    ids_from: IdsFrom
    logprobs: FloatArray | None
    """float32 [R]; None if the server reported none."""

    prompt_ids: IntArray | None
    """int32 [P] as the server reported them; None if it did not."""


def read_choice(
    choice: Any, *, response: Any = None, tokenizer: PieceTokenizer | None = None
) -> ChoiceTokens:
    """The tokens of a choice: an `openai` object, or a dictionary of OpenAI's shape.

    `response` is the reply around it, where some servers put ids; `tokenizer` allows the last resort of
    vocabulary pieces. Raises AlignmentError that says what is missing or which sources disagree.
    """
    plain, around = as_plain(choice), as_plain(response) if response is not None else {}
    ids, source = _reported_ids(plain, around) or _proven_pieces(plain, tokenizer)
    logprobs = read_logprobs(plain)
    if logprobs is not None and len(logprobs) != len(ids):
        raise AlignmentError(
            f"the choice has {len(ids)} token ids (from {source}) and {len(logprobs)} log probabilities"
        )
    if not len(ids):
        raise AlignmentError("the choice has no tokens")
    return ChoiceTokens(ids, source, logprobs, read_prompt_ids(plain, around))


def as_plain(value: Any) -> Mapping[str, Any]:
    """A dictionary as it is; a pydantic object (such as the `openai` package's) with its extra fields."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise AlignmentError(f"expected a choice or response of the OpenAI API, got {type(value).__name__}")


def read_prompt_ids(choice: Mapping[str, Any], response: Mapping[str, Any]) -> IntArray | None:
    """The prompt's ids, int32 [P], wherever the server reported them; None if nowhere."""
    places = (
        choice.get("prompt_token_ids"),
        response.get("prompt_token_ids"),
        _section(choice, "raw_output").get("prompt_token_ids"),
        _section(response, "sglext").get("prompt_token_ids"),
        _section(response, "nvext").get("prompt_token_ids"),
        _section(choice, "message").get("prompt_token_ids"),
    )
    found = [read_ids(place, "prompt_token_ids") for place in places if place is not None]
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        raise AlignmentError("the server reports the prompt's ids in two places, and they differ")
    return found[0] if found else None


def read_logprobs(choice: Mapping[str, Any]) -> FloatArray | None:
    """The sampled tokens' log probabilities, float32 [R]; None if the choice has none.

    Raises AlignmentError for a list that is not of numbers.
    """
    logprobs = _section(choice, "logprobs")
    if logprobs.get("content"):
        values = [entry.get("logprob") for entry in logprobs["content"]]
    elif logprobs.get("token_logprobs"):
        values = logprobs["token_logprobs"]
    elif pairs := _section(choice, "meta_info").get("output_token_logprobs"):
        values = [pair[0] for pair in pairs]
    else:
        return None
    if not all(isinstance(value, int | float) for value in values):
        raise AlignmentError("the choice's log probabilities are not all numbers")
    return np.array(values, dtype=np.float32)


def _reported_ids(choice: Mapping[str, Any], response: Mapping[str, Any]) -> tuple[IntArray, IdsFrom] | None:
    """The ids of the first source that has any. Raises AlignmentError if two sources disagree."""
    found: list[tuple[IntArray, IdsFrom]] = [
        (ids, source) for source, read in _READERS.items() if (ids := read(choice, response)) is not None
    ]
    for ids, source in found[1:]:
        if not np.array_equal(ids, found[0][0]):
            raise AlignmentError(f"the choice's token ids from {found[0][1]} and from {source} differ")
    return found[0] if found else None


def _token_ids(choice: Mapping[str, Any], _: Mapping[str, Any]) -> IntArray | None:
    """vLLM's `return_token_ids`, and our gateway's."""
    return _optional(choice.get("token_ids"), "token_ids")


def _meta_info(choice: Mapping[str, Any], _: Mapping[str, Any]) -> IntArray | None:
    """SGLang: [logprob, id, text] for each token."""
    pairs = _section(choice, "meta_info").get("output_token_logprobs")
    return _optional([pair[1] for pair in pairs] if pairs else None, "meta_info.output_token_logprobs")


def _output_ids(choice: Mapping[str, Any], _: Mapping[str, Any]) -> IntArray | None:
    """SGLang's own `/generate`."""
    return _optional(choice.get("output_ids"), "output_ids")


def _raw_output(choice: Mapping[str, Any], _: Mapping[str, Any]) -> IntArray | None:
    """Fireworks' `raw_output`."""
    return _optional(_section(choice, "raw_output").get("completion_token_ids"), "raw_output")


def _logprobs_token_id(choice: Mapping[str, Any], _: Mapping[str, Any]) -> IntArray | None:
    """`logprobs.content[].token_id`, or `logprobs.token_ids` of the older form: for all tokens, or none."""
    logprobs = _section(choice, "logprobs")
    entries = [entry.get("token_id") for entry in logprobs.get("content") or ()]
    named = [entry for entry in entries if entry is not None]
    if named and len(named) != len(entries):
        raise AlignmentError(f"{len(named)} of {len(entries)} entries of logprobs.content have a token_id")
    return _optional(named or logprobs.get("token_ids") or None, "logprobs")


def _token_id_text(choice: Mapping[str, Any], _: Mapping[str, Any]) -> IntArray | None:
    """vLLM's `return_tokens_as_token_ids`: `token: "token_id:123"`, for all tokens, or none."""
    matches = [_TOKEN_ID_TEXT.fullmatch(text) for text in _token_texts(choice)]
    named = [match for match in matches if match]
    if not named or len(named) != len(matches):
        return None
    return read_ids([int(match[1]) for match in named], "logprobs.content[].token")


def _sglext(choice: Mapping[str, Any], response: Mapping[str, Any]) -> IntArray | None:
    """SGLang's extension of the response: a list of ids for each choice."""
    lists = _section(response, "sglext").get("completion_token_ids")
    index = choice.get("index") or 0
    return _optional(lists[index] if lists and index < len(lists) else None, "sglext.completion_token_ids")


_READERS: dict[IdsFrom, Callable[[Mapping[str, Any], Mapping[str, Any]], IntArray | None]] = {
    "token_ids": _token_ids,
    "meta_info": _meta_info,
    "output_ids": _output_ids,
    "raw_output": _raw_output,
    "logprobs_token_id": _logprobs_token_id,
    "token_id_text": _token_id_text,
    "sglext": _sglext,
}

SOURCES: tuple[IdsFrom, ...] = (*_READERS, PIECES)
"""The order in which ids are looked for."""


def _proven_pieces(choice: Mapping[str, Any], tokenizer: PieceTokenizer | None) -> tuple[IntArray, IdsFrom]:
    strings = _token_texts(choice)
    if not strings:
        raise AlignmentError(
            "the choice has no token ids and no logprobs: ask for logprobs=True, and for ids "
            "(return_token_ids with vLLM and with this gateway)"
        )
    if tokenizer is None:
        raise AlignmentError(f"the choice has token texts and no token ids; {REMEDY}")
    text = _section(choice, "message").get("content") or choice.get("text")
    return ids_of_pieces(strings, text, tokenizer), PIECES


def _token_texts(choice: Mapping[str, Any]) -> list[str]:
    logprobs = _section(choice, "logprobs")
    if logprobs.get("content"):
        return [str(entry.get("token")) for entry in logprobs["content"]]
    return [str(token) for token in logprobs.get("tokens") or ()]


def _section(around: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = around.get(name)
    return as_plain(found) if found is not None else {}


def _optional(values: Any, what: str) -> IntArray | None:
    return None if values is None else read_ids(values, what)


def read_ids(values: Any, what: str) -> IntArray:
    """Ids as int32 [N]. Raises AlignmentError for anything but whole numbers from 0 on."""
    if not all(
        isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < 2**31
        for value in values
    ):
        raise AlignmentError(f"{what} holds something that is no token id")
    return np.array(values, dtype=np.int32)

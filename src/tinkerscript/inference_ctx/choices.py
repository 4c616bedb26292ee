"""Reads the tokens in a reply of an OpenAI-compatible server: ids, logprobs, and the prompt's ids.

Ids are read from the first of `SOURCES` that the server reported. Sources must agree, and ids and logprobs
must have the same length. Raw vocabulary pieces (`Ġhello`) become ids only if the caller declares them, or
with proof (`ids_of_pieces`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.alignment.checks import (
    ERRORS,
    POSITIVE_TOLERANCE,
    SENTINEL_LOGPROB,
    logprob_errors,
)
from tinkerscript.rollouts.call import FloatArray, IntArray, StopReason, TokenConstraint

NO_IDS_REMEDY = (
    "text does not determine ids: ask the server for ids (return_token_ids with vLLM and with this gateway), "
    "or leave the episode out of training"
)

IdsSource = Literal["sampler", "token_ids", "logprobs_token_id", "token_id_text", "pieces"]
"""`sampler`: the engine itself. The others are in `SOURCES`."""

SOURCES: tuple[IdsSource, ...] = ("token_ids", "logprobs_token_id", "token_id_text", "pieces")
"""In order: `choice.token_ids` (vLLM, our gateway), `token_id` in `logprobs.content` (our gateway), `token:
"token_id:123"` (vLLM), and vocabulary pieces as token texts.
"""

# With other finish reasons (`abort`, `content_filter`), the reply is incomplete or was changed.
_STOP_REASONS: dict[str, StopReason] = {
    "stop": "stop",
    "tool_calls": "stop",
    "function_call": "stop",
    "length": "length",
}

_TOKEN_ID_TEXT = re.compile(r"token_id:(\d+)")
_REPLACEMENT_CHARACTER = "\ufffd"
_BYTE_LEVEL_SPACE = "Ġ"
_SENTENCEPIECE_SPACE = "▁"


class PieceTokenizer(Protocol):
    def convert_tokens_to_ids(self, tokens: list[str]) -> Any: ...
    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True, slots=True)
class ChoiceTokens:
    ids: IntArray
    """int32 [R]"""

    ids_from: IdsSource
    logprobs: FloatArray | None
    """float32 [R]; None if the server reported none."""

    prompt_ids: IntArray | None
    """int32 [P]; None if the server reported none."""

    constrained: bytes | None
    """`TokenConstraint` of each id (uint8 [R]), empty without a grammar; None if not reported."""


def read_choice(
    choice: Any,
    *,
    response: Any = None,
    tokenizer: PieceTokenizer | None = None,
    raw_pieces: bool = False,
    vocabulary: int | None = None,
) -> ChoiceTokens:
    """Read the tokens of a choice, an `openai` object or a dictionary of OpenAI's shape.

    `response`: the reply around it, where some servers put ids. `tokenizer`: allows vocabulary pieces as a
    last resort. `raw_pieces`: the server sends pieces. `vocabulary`: number of the model's ids. Raises
    AlignmentError saying what is missing or wrong.
    """
    plain, around = as_plain(choice), plain_or_empty(response)
    ids, source = _reported_ids(plain) or _read_pieces(plain, tokenizer, declared=raw_pieces)
    logprobs = _logprobs(plain)
    if logprobs is not None and len(logprobs) != len(ids):
        raise AlignmentError(
            f"the choice has {len(ids)} token ids (from {source}) and {len(logprobs)} log probabilities"
        )
    if not len(ids):
        raise AlignmentError("the choice has no tokens")
    prompt_ids = _prompt_ids(plain, around)
    for what, found in (("sampled", ids), ("prompt", () if prompt_ids is None else prompt_ids)):
        if vocabulary is not None and len(found) and max(found) >= vocabulary:
            raise AlignmentError(
                f"the {what} id {max(found)} is not in the vocabulary of {vocabulary}: the server has "
                "another model, or one with more ids than this tokenizer (pass vocabulary=)"
            )
    return ChoiceTokens(ids, source, logprobs, prompt_ids, _constrained(plain, around, len(ids)))


def read_stop_reason(choice: Any) -> StopReason:
    """Whether the choice ended at its token limit (`length`) or by itself (`stop`).

    Raises AlignmentError for other finish reasons.
    """
    reason = as_plain(choice).get("finish_reason")
    if not isinstance(reason, str) or reason not in _STOP_REASONS:
        raise AlignmentError(
            f"the choice's finish reason is {reason!r}: it may be cut off or changed; leave it "
            "out of training"
        )
    return _STOP_REASONS[reason]


def as_plain(value: Any) -> Mapping[str, Any]:
    """Convert a pydantic object (such as `openai`'s) or a mapping to a dictionary. Raises AlignmentError."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise AlignmentError(f"expected a choice or response of the OpenAI API, got {type(value).__name__}")


def plain_or_empty(value: Any) -> Mapping[str, Any]:
    return {} if value is None else as_plain(value)


def _prompt_ids(choice: Mapping[str, Any], response: Mapping[str, Any]) -> IntArray | None:
    places = (choice.get("prompt_token_ids"), response.get("prompt_token_ids"))
    found = [read_ids(place, "prompt_token_ids") for place in places if place is not None]
    if len(found) == 2 and not np.array_equal(found[0], found[1]):
        raise AlignmentError("the server reports the prompt's ids in two places that disagree")
    return found[0] if found else None


def _logprobs(choice: Mapping[str, Any]) -> FloatArray | None:
    logprobs = _section(choice, "logprobs")
    if logprobs.get("content"):
        values = [entry.get("logprob") for entry in logprobs["content"]]
    elif logprobs.get("token_logprobs"):
        values = logprobs["token_logprobs"]
    else:
        return None
    if not all(isinstance(value, int | float) for value in values):
        raise AlignmentError("the choice's logprobs are not all numbers")
    logprobs = np.array(values, dtype=np.float64)
    if errors := logprob_errors(logprobs):
        wrong = next(value for value in values if not SENTINEL_LOGPROB < value <= POSITIVE_TOLERANCE)
        raise AlignmentError(f"the choice has the logprob {wrong}: {ERRORS[errors[0]]}", name=errors[0])
    return logprobs.astype(np.float32)


def _constrained(choice: Mapping[str, Any], response: Mapping[str, Any], number: int) -> bytes | None:
    kinds = choice.get("constrained", response.get("constrained"))
    if kinds is None:
        return None
    if kinds and (
        len(kinds) != number or not all(isinstance(k, int) and 0 <= k <= max(TokenConstraint) for k in kinds)
    ):
        raise AlignmentError(f"the choice has {number} token ids, and `constrained` is {kinds}")
    return bytes(kinds)


def _reported_ids(choice: Mapping[str, Any]) -> tuple[IntArray, IdsSource] | None:
    logprobs = _section(choice, "logprobs")
    entries = [entry.get("token_id") for entry in logprobs.get("content") or ()]
    named = [entry for entry in entries if entry is not None]
    if named and len(named) != len(entries):
        raise AlignmentError(f"{len(named)} of {len(entries)} entries of logprobs.content have a token_id")
    texts = [_TOKEN_ID_TEXT.fullmatch(text) for text in _token_texts(choice)]
    reported: dict[IdsSource, Any] = {
        "token_ids": choice.get("token_ids"),
        "logprobs_token_id": named or logprobs.get("token_ids") or None,
        "token_id_text": [int(text[1]) for text in texts if text] if texts and all(texts) else None,
    }
    found: list[tuple[IntArray, IdsSource]] = [
        (read_ids(ids, source), source) for source, ids in reported.items() if ids is not None
    ]
    for ids, source in found[1:]:
        if not np.array_equal(ids, found[0][0]):
            raise AlignmentError(f"the choice's token ids from {found[0][1]} and from {source} differ")
    return found[0] if found else None


def _read_pieces(
    choice: Mapping[str, Any], tokenizer: PieceTokenizer | None, *, declared: bool
) -> tuple[IntArray, IdsSource]:
    strings = _token_texts(choice)
    if not strings:
        raise AlignmentError(
            "the choice has no token ids and no logprobs: ask for logprobs=True, and for ids "
            "(return_token_ids with vLLM and with this gateway)"
        )
    if tokenizer is None:
        raise AlignmentError(f"the choice has token texts but no token ids; {NO_IDS_REMEDY}")
    text = _section(choice, "message").get("content") or choice.get("text")
    return ids_of_pieces(strings, text, tokenizer, declared=declared), "pieces"


def _token_texts(choice: Mapping[str, Any]) -> list[str]:
    logprobs = _section(choice, "logprobs")
    if logprobs.get("content"):
        return [str(entry.get("token")) for entry in logprobs["content"]]
    return [str(token) for token in logprobs.get("tokens") or ()]


def ids_of_pieces(
    strings: Sequence[str], text: object, tokenizer: PieceTokenizer, *, declared: bool = False
) -> IntArray:
    """Convert raw vocabulary pieces to int32 ids [R]. Raises AlignmentError if these may not be the sampled
    ids.

    A string may be a piece or decoded text, which look alike: 'é' is the text of one token and the piece of
    the byte 0xE9. So the ids must decode to `text`, the reply without special tokens, and the strings must
    spell it differently, unless they are `declared` to be pieces.

    With byte-level BPE this is proof, because decoded text, read as a piece, stands for the same or fewer
    characters. With SentencePiece a string is refused if another piece may decode alike (`A` and `<0x41>`;
    `▁a` and `a` at the start).
    """
    ids = [_id_of(piece, tokenizer) for piece in strings]
    if declared:
        if isinstance(text, str) and tokenizer.decode(ids, skip_special_tokens=True) != text:
            raise _refusal("the server's pieces do not decode to the choice's text: are they pieces?")
        return np.array(ids, dtype=np.int32)
    if any(_REPLACEMENT_CHARACTER in string for string in strings):
        raise _refusal("a token text contains U+FFFD, which may stand for a part of any character")
    if not isinstance(text, str) or tokenizer.decode(ids, skip_special_tokens=True) != text:
        raise _refusal("the token texts, read as pieces, do not decode to the choice's text")
    pairs = list(zip(strings, ids, strict=True))
    has_special = tokenizer.decode(ids) != text
    spoken = [pair for pair in pairs if not (has_special and _is_special(pair[1], tokenizer))]
    if "".join(piece for piece, _ in spoken) == text:
        raise _refusal("the token texts spell the choice's text exactly: they may be decoded text")
    if not _spells_spaces(_BYTE_LEVEL_SPACE, tokenizer):
        _check_sentencepiece(spoken, tokenizer)
    return np.array(ids, dtype=np.int32)


def _check_sentencepiece(spoken: Sequence[tuple[str, int]], tokenizer: PieceTokenizer) -> None:
    if not _spells_spaces(_SENTENCEPIECE_SPACE, tokenizer):
        raise _refusal("the vocabulary is neither byte-level BPE nor SentencePiece, so nothing can be proven")
    for place, (piece, number) in enumerate(spoken):
        twins = [f"<0x{ord(piece):02X}>"] if len(piece) == 1 and piece.isascii() else []
        twins += [_SENTENCEPIECE_SPACE + piece] if place == 0 else []
        for twin in twins:
            other = _known(twin, tokenizer)
            if other not in (None, number) and tokenizer.decode([other]) == tokenizer.decode([number]):
                raise _refusal(f"the pieces {piece!r} and {twin!r} decode alike")


def _spells_spaces(piece: str, tokenizer: PieceTokenizer) -> bool:
    number = _known(piece, tokenizer)
    # Decodes two, because some decoders drop the first space.
    return number is not None and tokenizer.decode([number, number]) in (" ", "  ")


def _id_of(piece: str, tokenizer: PieceTokenizer) -> int:
    number = _known(piece, tokenizer)
    if number is None:
        raise _refusal(f"the token text {piece!r} is not a piece of the vocabulary")
    return number


def _known(piece: str, tokenizer: PieceTokenizer) -> int | None:
    (number,) = tokenizer.convert_tokens_to_ids([piece])
    # Some tokenizers return the unknown token's id instead of None.
    unknown = number == getattr(tokenizer, "unk_token_id", None) and piece != getattr(
        tokenizer, "unk_token", None
    )
    return None if number is None or unknown else int(number)


def _is_special(number: int, tokenizer: PieceTokenizer) -> bool:
    return not tokenizer.decode([number], skip_special_tokens=True) and bool(tokenizer.decode([number]))


def _refusal(problem: str) -> AlignmentError:
    return AlignmentError(f"{problem}; {NO_IDS_REMEDY}")


def _section(around: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return plain_or_empty(around.get(name))


def read_ids(values: Any, what: str) -> IntArray:
    """int32 [N]. Raises AlignmentError for anything but integers in [0, 2**31)."""
    if not all(
        isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < 2**31
        for value in values
    ):
        raise AlignmentError(f"{what} contains something that is not a token id")
    return np.array(values, dtype=np.int32)

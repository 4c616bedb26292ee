"""The last resort: ids from raw vocabulary pieces (`Ġhello`), where a server's reply holds no ids.

Owns the proof. The invariant: the ids returned are those that were sampled, or AlignmentError is raised.
A string on the wire may be a piece or decoded text, which look alike: 'é' is the text of one token and the
piece of the byte 0xE9. So strings are converted only if reading them as text cannot explain the reply too.

With byte-level BPE the text alone is proof: a string that was decoded text stands, read as a piece, for the
same characters or for fewer. So the ids decode to the reply's text only where every string stands for the
same characters both ways, and then it spells one piece. With SentencePiece two pieces may decode alike (`A`
and `<0x41>`; `▁a` and `a` at the start): a string with such a twin is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tinkerscript.errors import AlignmentError
from tinkerscript.rollouts.call import IntArray

REMEDY = (
    "text does not determine ids: ask the server for ids (return_token_ids with vLLM and with this gateway), "
    "or leave the episode out of training"
)

_HALF_CHARACTER = "\ufffd"
_BYTE_LEVEL_SPACE = "Ġ"
_SENTENCEPIECE_SPACE = "▁"


class PieceTokenizer(Protocol):
    """What the proof needs of a tokenizer; Hugging Face's have it."""

    def convert_tokens_to_ids(self, tokens: list[str]) -> Any: ...
    def decode(self, token_ids: Any, skip_special_tokens: bool = ...) -> Any: ...


def ids_of_pieces(strings: Sequence[str], text: object, tokenizer: PieceTokenizer) -> IntArray:
    """Ids of raw vocabulary pieces, int32 [R].

    `text` is the reply's text, special tokens left out. Raises AlignmentError unless every string is a piece,
    the ids decode to `text`, and the strings spell it differently, so that they are not decoded text.
    """
    ids = [_id_of(piece, tokenizer) for piece in strings]
    if any(_HALF_CHARACTER in string for string in strings):
        raise _refusal("a token text holds U+FFFD, which stands for a part of any character")
    if not isinstance(text, str) or tokenizer.decode(ids, skip_special_tokens=True) != text:
        raise _refusal("the token texts, read as pieces, do not decode to the choice's text")
    pairs = list(zip(strings, ids, strict=True))
    has_special = tokenizer.decode(ids) != text
    spoken = [pair for pair in pairs if not (has_special and _is_special(pair[1], tokenizer))]
    if "".join(piece for piece, _ in spoken) == text:
        raise _refusal("the token texts spell the choice's text as it is: they may be decoded text")
    if not _spells_spaces(_BYTE_LEVEL_SPACE, tokenizer):
        _check_sentencepiece(spoken, tokenizer)
    return np.array(ids, dtype=np.int32)


def _check_sentencepiece(spoken: Sequence[tuple[str, int]], tokenizer: PieceTokenizer) -> None:
    """Raises AlignmentError for pieces with a twin, and for vocabularies of another kind."""
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
    """Whether the vocabulary writes a space as `piece`. (Of two, since some decoders drop the first.)"""
    number = _known(piece, tokenizer)
    return number is not None and tokenizer.decode([number, number]) in (" ", "  ")


def _id_of(piece: str, tokenizer: PieceTokenizer) -> int:
    number = _known(piece, tokenizer)
    if number is None:
        raise _refusal(f"the token text {piece!r} is no piece of the vocabulary")
    return number


def _known(piece: str, tokenizer: PieceTokenizer) -> int | None:
    """The id of `piece`; None if there is none, where some tokenizers give the unknown token's."""
    (number,) = tokenizer.convert_tokens_to_ids([piece])
    unknown = number == getattr(tokenizer, "unk_token_id", None) and piece != getattr(
        tokenizer, "unk_token", None
    )
    return None if number is None or unknown else int(number)


def _is_special(number: int, tokenizer: PieceTokenizer) -> bool:
    return not tokenizer.decode([number], skip_special_tokens=True) and bool(tokenizer.decode([number]))


def _refusal(problem: str) -> AlignmentError:
    return AlignmentError(f"{problem}; {REMEDY}")

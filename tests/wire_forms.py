"""How servers spell sampled tokens on the wire, and what our reader makes of it.

`outcomes` puts every id of a vocabulary through one form, alone or in random (so mostly non-canonical)
sequences, and counts: right, refused, or silently wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx import InferenceContext

HALF_CHARACTER = "\ufffd"


class Vocabulary:
    """A Hugging Face tokenizer with each id's piece and its text alone."""

    def __init__(self, tokenizer: Any, *, every: int = 1) -> None:
        """`every`: 4 takes a quarter of the ids."""
        self.tokenizer = tokenizer
        self._every = every
        self.context = InferenceContext(tokenizer)
        pieces = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.piece: dict[int, str] = {
            number: piece for number, piece in enumerate(pieces) if piece is not None
        }
        self.text: dict[int, str] = {number: tokenizer.decode([number]) for number in self.piece}

    @property
    def ids(self) -> list[int]:
        return list(self.piece)[:: self._every]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


Choice = dict[str, Any]


def _choice(vocabulary: Vocabulary, ids: list[int], tokens: list[str], **fields: Any) -> Choice:
    """OpenAI's shape, with `tokens` as the entries' texts."""
    entries = [
        {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}
        for token in tokens
    ]
    message = {"role": "assistant", "content": vocabulary.decode(ids)}
    return {
        "index": 0,
        "message": message,
        "finish_reason": "stop",
        "logprobs": {"content": entries},
    } | fields


def _texts(vocabulary: Vocabulary, ids: list[int]) -> list[str]:
    return [vocabulary.text[number] for number in ids]


def _with_ids(vocabulary: Vocabulary, ids: list[int], said: list[int]) -> Choice:
    choice = _choice(vocabulary, ids, _texts(vocabulary, ids))
    for entry, number in zip(choice["logprobs"]["content"], said, strict=True):
        entry["token_id"] = number
    return choice


def _vllm_token_ids(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    return _choice(vocabulary, ids, _texts(vocabulary, ids), token_ids=ids)


def _content_token_id(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    return _with_ids(vocabulary, ids, ids)


def _token_id_text(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    return _choice(vocabulary, ids, [f"token_id:{number}" for number in ids])


def _openai(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    """Decoded text; parts of characters escaped, as OpenAI sends them."""
    tokens = [
        "bytes:" + "".join(f"\\x{byte:02x}" for byte in text.encode()) if HALF_CHARACTER in text else text
        for text in _texts(vocabulary, ids)
    ]
    return _choice(vocabulary, ids, tokens)


def _vllm_text(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    """Decoded text, and as `bytes` that text encoded again."""
    return _choice(vocabulary, ids, _texts(vocabulary, ids))


def _vllm_in_context(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    """The text that each token adds; half a character waits for its end, and is dropped if none comes."""
    tokens: list[str] = []
    done = ""
    for end in range(1, len(ids) + 1):
        text = vocabulary.decode(ids[:end]).rstrip(HALF_CHARACTER)
        tokens.append(text[len(done) :])
        done = text
    choice = _choice(vocabulary, ids, tokens)
    choice["message"]["content"] = done
    return choice


def _raw(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    return _choice(vocabulary, ids, [vocabulary.piece[number] for number in ids])


def _raw_stripped(vocabulary: Vocabulary, ids: list[int], rng: random.Random) -> Choice:
    """Raw pieces beside a text whose outer white space a parser took."""
    choice = _raw(vocabulary, ids, rng)
    choice["message"]["content"] = choice["message"]["content"].strip()
    return choice


def _raw_with_specials(vocabulary: Vocabulary, ids: list[int], rng: random.Random) -> Choice:
    """Raw pieces beside a text that shows the special tokens."""
    choice = _raw(vocabulary, ids, rng)
    choice["message"]["content"] = vocabulary.tokenizer.decode(ids)
    return choice


def _mixture(vocabulary: Vocabulary, ids: list[int], rng: random.Random) -> Choice:
    """Each token as its raw piece or as its text."""
    spellings = (vocabulary.piece, vocabulary.text)
    return _choice(vocabulary, ids, [rng.choice(spellings)[number] for number in ids])


def _sources_disagree(vocabulary: Vocabulary, ids: list[int], rng: random.Random) -> Choice:
    other = list(ids)
    place = rng.randrange(len(ids))
    other[place] = ids[place] + 1
    return _with_ids(vocabulary, ids, other) | {"token_ids": ids}


def _lengths_differ(vocabulary: Vocabulary, ids: list[int], _: random.Random) -> Choice:
    return _choice(vocabulary, ids, [*_texts(vocabulary, ids), "x"], token_ids=ids)


Form = Callable[[Vocabulary, list[int], random.Random], Choice]

WITH_IDS: dict[str, Form] = {
    "vllm_token_ids": _vllm_token_ids,
    "content_token_id": _content_token_id,
    "token_id_text": _token_id_text,
}
"""Forms that hold the ids: never refused, always right."""

WITHOUT_IDS: dict[str, Form] = {
    "openai_text_and_bytes": _openai,
    "vllm_text_and_bytes": _vllm_text,
    "vllm_text_in_context": _vllm_in_context,
    "raw_pieces": _raw,
    "raw_pieces_text_stripped": _raw_stripped,
    "raw_pieces_text_with_specials": _raw_with_specials,
    "mixture": _mixture,
}
"""Forms from which ids are proven, or refused."""

CONTRADICTIONS: dict[str, Form] = {
    "two_sources_disagree": _sources_disagree,
    "lengths_differ": _lengths_differ,
}
"""Forms that contradict themselves: always refused."""


@dataclass(frozen=True)
class Outcomes:
    """Ids counted by what became of the choice that they were in."""

    right: int
    refused: int
    wrong: list[tuple[list[int], Choice]]
    """Sequences that were read as other ids, with the choice: must be empty."""

    @property
    def share(self) -> float:
        """Ids read, of all."""
        return self.right / (self.right + self.refused)


def alone(vocabulary: Vocabulary) -> Iterator[list[int]]:
    """Every id, as a sequence of its own."""
    yield from ([number] for number in vocabulary.ids)


def in_sequences(vocabulary: Vocabulary, rng: random.Random) -> Iterator[list[int]]:
    """Every id once, in random sequences of 1 to 24."""
    ids = vocabulary.ids
    rng.shuffle(ids)
    while ids:
        length = rng.randint(1, 24)
        yield ids[:length]
        del ids[:length]


def outcomes(
    vocabulary: Vocabulary, form: Form, sequences: Iterator[list[int]], rng: random.Random
) -> Outcomes:
    """Put every sequence through `form` and `response_tokens_from_choice`."""
    counts: Counter[str] = Counter()
    wrong: list[tuple[list[int], Choice]] = []
    for ids in sequences:
        choice = form(vocabulary, ids, rng)
        try:
            found = vocabulary.context.response_tokens_from_choice(choice).tolist()
        except AlignmentError:
            counts["refused"] += len(ids)
            continue
        if found == ids:
            counts["right"] += len(ids)
        else:
            wrong.append((ids, choice))
    return Outcomes(counts["right"], counts["refused"], wrong)

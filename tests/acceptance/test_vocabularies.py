"""Whole vocabularies of real models, each id alone and in sequences: right or refused, none silently wrong.

`make acceptance` takes a quarter of one of them. With `LONG=1` it takes all of them whole, and prints the
shares in docs/tokens.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import vocabularies
from wire_forms import CONTRADICTIONS, WITH_IDS, WITHOUT_IDS, Vocabulary, alone, in_sequences, outcomes

FORMS = WITH_IDS | WITHOUT_IDS | CONTRADICTIONS
REAL: dict[str, tuple[Callable[[], Any], int]] = {
    "deepseek": (vocabularies.deepseek, 129_280),
    "qwen": (vocabularies.qwen, 151_851),
    "tekken": (vocabularies.tekken, 131_072),
    "mistral": (vocabularies.mistral, 32_768),
}

pytestmark = pytest.mark.timeout(600)


WHOLE = [pytest.param((name, 1), id=name, marks=pytest.mark.long) for name in REAL]


@pytest.fixture(scope="module", params=[pytest.param(("mistral", 4), id="a quarter"), *WHOLE])
def real(request: pytest.FixtureRequest) -> tuple[str, Vocabulary]:
    name, every = request.param
    make, size = REAL[name]
    vocabulary = Vocabulary(make(), every=every)
    assert len(vocabulary.piece) == size
    return name, vocabulary


@pytest.mark.parametrize("form", FORMS)
def test_every_id_is_right_or_refused(real: tuple[str, Vocabulary], form: str) -> None:
    name, vocabulary = real
    rng = random.Random(7)
    shares: list[float] = []
    for sequences in (alone(vocabulary), in_sequences(vocabulary, rng)):
        found = outcomes(vocabulary, FORMS[form], sequences, rng)
        assert found.wrong == []
        assert found.right + found.refused == len(vocabulary.ids)
        shares.append(found.share)
    print(f"{name:9} {form:30} read: alone {shares[0]:6.1%}, in sequences {shares[1]:6.1%}; wrong: 0")
    if form in WITH_IDS:
        assert shares == [1, 1]
    if form in CONTRADICTIONS:
        assert shares == [0, 0]
    if form == "raw_pieces":
        assert shares[1] > 0.75


def test_the_documents_conversion_is_silently_wrong(real: tuple[str, Vocabulary]) -> None:
    """`convert_tokens_to_ids` of decoded text, as the document has it: why the reader refuses text."""
    name, vocabulary = real
    texts = [vocabulary.text[number] for number in vocabulary.ids]
    converted = vocabulary.tokenizer.convert_tokens_to_ids(texts)
    pairs = list(zip(vocabulary.ids, converted, strict=True))
    unknown = vocabulary.tokenizer.unk_token_id
    right = sum(found == number for number, found in pairs)
    wrong = sum(found not in (None, number) for number, found in pairs)
    in_silence = sum(found == unknown != number for number, found in pairs) if unknown is not None else 0
    shares = f"right {right / len(pairs):.1%}, wrong {wrong} ids, {in_silence} read as unknown"
    print(f"{name:9} as the document converts: {shares}")
    assert wrong > 0

"""A whole real vocabulary through every form of the wire: each id is right or refused."""

from __future__ import annotations

import random

import pytest

from vocabularies import deepseek
from wire_forms import CONTRADICTIONS, WITH_IDS, WITHOUT_IDS, Vocabulary, in_sequences, outcomes

FORMS = WITH_IDS | WITHOUT_IDS | CONTRADICTIONS

pytestmark = pytest.mark.xdist_group("real_vocabulary")


@pytest.fixture(scope="module")
def real() -> Vocabulary:
    return Vocabulary(deepseek())


@pytest.mark.parametrize("form", FORMS)
def test_every_id_of_a_real_vocabulary_is_right_or_refused(real: Vocabulary, form: str) -> None:
    """DeepSeek's 129,280 ids, each once, in random sequences. `make acceptance` has more vocabularies."""
    rng = random.Random(5)
    found = outcomes(real, FORMS[form], in_sequences(real, rng), rng)
    assert found.wrong == []
    assert found.right + found.refused == len(real.ids) > 129_000
    if form in WITH_IDS:
        assert found.refused == 0
    if form in CONTRADICTIONS:
        assert found.right == 0
    if form == "raw_pieces":
        assert found.share > 0.95


def test_the_documents_conversion_is_silently_wrong(real: Vocabulary) -> None:
    """What the tests above would find: the document's `convert_tokens_to_ids` of decoded text."""
    converted = real.tokenizer.convert_tokens_to_ids(list(real.text.values()))
    wrong = [n for n, found in zip(real.ids, converted, strict=True) if found not in (None, n)]
    assert 50 < len(wrong) < 500

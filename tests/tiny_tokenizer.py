"""A model folder without weights: a byte-level tokenizer with Qwen3's markers, and a config.json.

One token a byte, so that tests can write token ids by hand and sample any tokenisation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
"""`hello` is one token when encoded, so that spelling it out is a non-canonical tokenisation."""


def write_model_folder(folder: Path, *, max_context: int = 4096, **config: Any) -> Path:
    """Write tokenizer.json and config.json into `folder`; `config` adds or replaces keys."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in MERGES]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    data = {"model_type": "qwen3", "max_position_embeddings": max_context} | config
    (folder / "config.json").write_text(json.dumps(data), encoding="utf-8")
    named = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder

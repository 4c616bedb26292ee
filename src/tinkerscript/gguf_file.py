"""Convert a GGUF file to a trainable folder in Hugging Face format.

We build byte-level BPE tokenizers, because transformers 5.5 turns some into CodeLlama's, which cannot decode
their own ids after saving.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from tinkerscript.errors import ConfigError

CACHE = Path.home() / ".cache" / "tinkerscript" / "gguf"

CONTROL = 3  # GGUF's type for special tokens.

# How Llama 3 and Qwen split words. They differ in digits per number.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}|"
    r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(digits: str) -> list[Any]:
    pattern = Regex(WORDS.format(digits=digits))
    return [
        pre_tokenizers.Split(pattern, behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)

PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "default": lambda: [_BYTE_LEVEL],
    "gpt-2": lambda: [_BYTE_LEVEL],
    "llama-bpe": lambda: _split("{1,3}"),
    "qwen2": lambda: _split(""),
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), _BYTE_LEVEL],
}


def folder_of_gguf(file: Path, *, note: Callable[[str], None]) -> Path:
    with file.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    folder = CACHE / f"{file.stem}-{digest[:12]}"
    if not folder.exists():
        make_folder(file, folder, note=note)
    return folder


def make_folder(file: Path, folder: Path, *, note: Callable[[str], None]) -> None:
    """Write weights, config and tokenizer, atomically across processes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".gguf-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        try:
            fields = _fields(file)
            _tokenizer(file, fields).save_pretrained(made)
            note(f"converting {file} to a model folder, once: {folder}")
            _write_weights(file, fields, made)
        except ConfigError:
            raise
        except Exception as error:  # Bad files raise all kinds.
            raise ConfigError(f"engine.model: {file} cannot be read as a GGUF model: {error}") from error
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise


class _Reader(GGUFReader):
    def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
        # Beyond the end of the file, GGUFReader would read nothing, for as many items as the file says.
        if count and offset >= len(self.data):
            raise ValueError("the file ends before what it announces")
        return super()._get(offset, dtype, count, *more, **options)


def _fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in _Reader(file).fields.items()}


def _write_weights(file: Path, fields: dict[str, Any], folder: Path) -> None:
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32}
    if blocks := getattr(transformers, "GgufConfig", None):  # Newer versions may leave the weights in blocks.
        options["quantization_config"] = blocks(dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model.hf_quantizer = None  # They would refuse to save what they call quantized.
    vars(model.config).pop("quantization_config", None)
    end = fields["tokenizer.ggml.eos_token_id"]
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)


def _tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if fields["tokenizer.ggml.model"] != "gpt2":  # SentencePiece; transformers gets it right.
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    kind = fields.get("tokenizer.ggml.pre", "default")
    if kind not in PRE_TOKENIZERS:
        raise ConfigError(
            f"engine.model: {file} splits texts as {kind!r}, and TinkerScript knows "
            f"{', '.join(PRE_TOKENIZERS)}: give the folder of the model that the file was made from"
        )
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[kind]())
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    specials = [AddedToken(token, special=True, normalized=False) for token, of in kinds if of == CONTROL]
    made.add_special_tokens(specials)
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    begin = fields.get("tokenizer.ggml.bos_token_id")
    architecture = fields["general.architecture"]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=None if begin is None else tokens[begin],
        eos_token=end,
        pad_token=end,
        model_max_length=fields[f"{architecture}.context_length"],
    )
    fast.chat_template = fields.get("tokenizer.chat_template")
    return fast

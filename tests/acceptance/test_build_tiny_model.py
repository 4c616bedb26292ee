"""The build script in its short form: the folder loads, the loss falls, a seed fixes the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_tiny_model.py"
STEPS = "40"
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training.json",
}


def build(out: Path) -> Path:
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--samples", "1", "--steps", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.long
def test_the_build_loads_learns_and_repeats(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        folder, again = threads.map(build, [tmp_path / "one", tmp_path / "two"])
    check_it_loads(folder)
    check_its_record(folder)
    first, second = (load_file(str(path / "model.safetensors")) for path in (folder, again))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def check_it_loads(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == FILES
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    chat = [{"role": "user", "content": "What is 23+45?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits
    assert logits.shape == (1, len(prompt), model.config.vocab_size)
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size() == len(tokenizer)


def check_its_record(folder: Path) -> None:
    record = json.loads((folder / "training.json").read_text())
    assert record["steps"] == int(STEPS)
    assert record["loss_last"] < record["loss_first"] - 0.5
    assert record["parameters"] == sum(
        w.numel() for w in load_file(str(folder / "model.safetensors")).values()
    )

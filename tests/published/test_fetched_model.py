"""The folder that `examples/smollm2/fetch.py` makes holds the model as it was published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = [
    "The quick brown fox, 12345 times.",
    "  two spaces\n\n\ttab, é, ß, 漢字, 😀, עברית",
    "<|im_start|>user\nWhat is 2+2?<|im_end|>\n",
    'def f(x):\n    return {"a": [x, -1.5e-3]}  # done',
]


def test_its_tokenizer_gives_texts_back_and_its_config_names_the_end_of_a_reply(smollm2: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_chat_is_answered_with_what_it_asks_for_and_ended(smollm2: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    sampled = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False
    )[0, prompt.shape[1] :]
    assert tokenizer.decode(sampled) == "The capital of France is Paris.<|im_end|>"

"""`engine.model` may be a GGUF file: its folder has the weights, and a tokenizer that gives the same ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tinkerscript import gguf_file
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import model_folder, pinned_model

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 2000, 32, 4, 2, 256


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_file, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> dict[str, Any]:
    """SmolLM2's, cut to its first tokens."""
    made = json.loads((smollm2 / "tokenizer.json").read_text())
    vocabulary = {token: number for token, number in made["model"]["vocab"].items() if number < VOCABULARY}
    merges = [pair for pair in made["model"]["merges"] if "".join(pair) in vocabulary]
    made["model"] |= {"vocab": vocabulary, "merges": merges}
    return made


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Small, at random weights."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**shape))


def written(path: Path, template: str, tokenizer: dict[str, Any], model: LlamaForCausalLM) -> Path:
    """The model and its tokenizer as llama.cpp's converter writes them."""
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(special["<|im_start|>"])
    writer.add_eos_token_id(special["<|im_end|>"])
    writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        data = weights.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # llama.cpp has halves where others have pairs.
            data = data.reshape(HEADS, 2, -1, WIDTH).swapaxes(1, 2).reshape(data.shape)
        named = names.get_name(name, try_suffixes=(".weight",))
        assert named, name
        writer.add_tensor(named, np.ascontiguousarray(data, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_the_folder_of_its_model(
    tmp_path: Path, cache: Path, smollm2: Path, tokenizer: dict[str, Any], model: LlamaForCausalLM
) -> None:
    template = (smollm2 / "chat_template.jinja").read_text()
    file, told = written(tmp_path / "small.gguf", template, tokenizer, model), list[str]()
    folder = model_folder(str(file), note=told.append)
    assert folder.parent == cache
    assert told == [f"converting {file} to a model folder, once: {folder}"]
    text = "Ünïcode 漢字 12345  <|im_start|>user\n\n\tdef f(x): return 1.5e-3<|im_end|>"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert ids == Tokenizer.from_str(json.dumps(tokenizer)).encode(text).ids
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        assert torch.equal(loaded(torch.tensor([ids])).logits, model(torch.tensor([ids])).logits)
    assert pinned_model(str(file), note=told.append) == str(folder), "all processes of a run use the folder"
    assert len(told) == 1, "it is made once"


def test_a_tokenizer_of_another_kind_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("tekken")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"small.gguf splits texts as 'tekken', and TinkerScript knows"):
        model_folder(str(file))
    assert list(cache.iterdir()) == []


def test_words_are_split_as_the_model_s_authors_split_them() -> None:
    assert gguf_file.WORDS.format(digits="") == PRETOKENIZE_REGEX

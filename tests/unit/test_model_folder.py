"""What a model's folder says: read from its files, without torch."""

from __future__ import annotations

import json
import struct
from collections.abc import Generator
from pathlib import Path

import pytest
from huggingface_hub import constants

from chat_families import FAMILIES
from fake_hub import COMMIT, FakeHub
from tinkerscript.errors import ConfigError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.gguf_file import make_folder
from tinkerscript.model_folder import (
    TINY_MODEL,
    context_of,
    copy_tokenizer,
    eos_token_of,
    hub_id_of,
    model_folder,
    model_name,
    pinned_model,
    stop_ids_of,
    vocabulary_of,
)


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_limits_are_read_of_text_models_inside_others_too(tmp_path: Path) -> None:
    write(tmp_path, config={"text_config": {"max_position_embeddings": 77, "vocab_size": 11}})
    assert (context_of(tmp_path), vocabulary_of(tmp_path)) == (77, 11)
    for name in ("n_positions", "max_seq_len"):
        assert context_of(write(tmp_path, config={name: 78})) == 78
    for text, problem in (("{}", "has no max_position_embeddings"), ("{", r"cannot read .*config\.json")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=problem):
            context_of(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json: there is no such file"):
        vocabulary_of(tmp_path)
    with pytest.raises(ConfigError, match=r"has no config\.json; give .tiny., the folder"):
        model_folder(str(tmp_path))
    assert model_folder("tiny") == TINY_MODEL


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({}, {}, set()),
        ({}, {"eos_token_id": 3}, {3}),
        ({"eos_token_id": [0, 5]}, {"eos_token_id": 3}, {0, 5}),
    ],
)
def test_stop_ids_are_read(tmp_path: Path, generation: object, config: object, ids: set[int]) -> None:
    assert stop_ids_of(write(tmp_path, config=config, generation_config=generation)) == ids


def test_the_end_of_text_is_the_tokenizers_text_else_the_models_id(tmp_path: Path) -> None:
    assert eos_token_of(tmp_path) is None
    assert eos_token_of(write(tmp_path, config={"eos_token_id": [7, 8]})) == 7
    assert eos_token_of(write(tmp_path, tokenizer_config={"eos_token": {"content": "<end>"}})) == "<end>"


def test_a_tokenizer_is_copied_without_weights(tmp_path: Path) -> None:
    copy_tokenizer(TINY_MODEL, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    (tmp_path / "copy").mkdir()
    copy_tokenizer(tmp_path, tmp_path / "copy")
    assert (tmp_path / "copy" / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[FakeHub]:
    """A hub with one model, an empty cache, and a process that has asked for nothing yet."""
    served = FakeHub()
    model = FAMILIES["llama3.1"].write(tmp_path / "origin")
    for name in ("model.safetensors", "pytorch_model.bin", "README.md", "original.pth"):
        (model / name).write_text("x")
    served.models["acme/llama"] = model
    served.gated.add("acme/gated")
    monkeypatch.setattr("tinkerscript.model_folder._snapshots", {})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.chdir(tmp_path)
    with served.serving() as url:
        files = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield served


def test_a_model_of_the_hub_is_fetched_without_weights(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    folder = model_folder("acme/llama", note=notes.append)
    assert (hub_id_of(folder), model_name(folder), context_of(folder)) == ("acme/llama", "acme/llama", 8192)
    files = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert hub.fetched() == files | {"chat_template.jinja"}
    assert len(notes) == 1
    assert "asking the Hugging Face Hub for acme/llama" in notes[0]
    assert ChatRenderer(folder).uses_template
    pinned = pinned_model("acme/llama", note=notes.append)
    assert pinned == f"acme/llama@{COMMIT}"
    asked = len(hub.requests)
    monkeypatch.setattr("tinkerscript.model_folder._snapshots", {})
    assert model_folder(pinned, note=notes.append) == folder, "another process"
    assert (len(hub.requests), len(notes)) == (asked, 1)
    assert (model_folder("acme/llama", weights=True) / "model.safetensors").is_file()
    assert hub.fetched() == files | {"chat_template.jinja", "model.safetensors"}


def test_a_folder_comes_before_a_model_of_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    local = FAMILIES["gemma2"].write(tmp_path / "acme" / "llama")
    assert model_folder("acme/llama").resolve() == local
    assert pinned_model("acme/llama") == "acme/llama"
    assert hub_id_of(local) is None
    assert not hub.requests


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("acme/none", r"'acme/none' is neither a folder nor a model of the Hugging Face Hub \(http"),
        ("acme/gated", r"'acme/gated' is gated: accept its terms at http.*/acme/gated, and set HF_TOKEN"),
        ("acme/llama@nope", "has no revision 'nope'"),
        ("acme/bare", r"'acme/bare' in the Hugging Face Hub has no tokenizer\.json"),
        ("nowhere", r"'nowhere' does not exist; give 'tiny', the folder"),
        ("a/b/c", "'a/b/c' does not exist"),
    ],
)
def test_what_the_hub_does_not_give_is_named(hub: FakeHub, tmp_path: Path, model: str, message: str) -> None:
    (tmp_path / "bare").mkdir()
    write(tmp_path / "bare", config={})
    hub.models["acme/bare"] = tmp_path / "bare"
    with pytest.raises(ConfigError, match=message):
        model_folder(model)


def test_without_a_network_the_cache_is_all_there_is(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("acme/llama")
    monkeypatch.setattr("tinkerscript.model_folder._snapshots", {})
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        why = "HF_HUB_OFFLINE is set" if offline else "cannot be reached"
        for model, weights in (("acme/other", False), ("acme/llama", True)):
            with pytest.raises(ConfigError, match=f"nor completely in the cache .*, and .*{why}"):
                model_folder(model, weights=weights)
        assert model_folder("acme/llama") == folder


@pytest.mark.parametrize(
    "announced",
    [
        struct.pack("<QQQcIIQ", 0, 1, 1, b"a", 9, 0, 2**40),  # An array of 2^40 bytes.
        struct.pack("<QQQcIQ", 0, 1, 1, b"a", 8, 2**60),  # A string.
        struct.pack("<QQ", 0, 2**40),
        struct.pack("<QQ", 2**40, 0),
    ],
    ids=["array", "string", "fields", "tensors"],
)
def test_a_gguf_file_that_announces_more_than_it_has_is_refused(tmp_path: Path, announced: bytes) -> None:
    """Reading all that an array announces would take hours, and all memory."""
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 3) + announced)
    with pytest.raises(ConfigError, match=r"small\.gguf cannot be read.*the file ends before"):
        make_folder(file, tmp_path / "made", note=print)

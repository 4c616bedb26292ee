"""Fixtures that several tests share: small models that are made on the spot."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from clock import Clock
from tiny_tokenizer import write_model_folder

# What the tests import makes millions of objects that stay: not looking through them again and again saves a
# sixth of the time that collecting the tests takes.
gc.disable()

settings.register_profile("chaos", max_examples=250, stateful_step_count=50, deadline=None)
"""`--hypothesis-profile=chaos`: state machines go through more than 10,000 steps."""


# What starts in the background of a shell ignores Ctrl-C, and so would all that the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Find what imported objects keep alive, once: pytest collects ten times after this."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unpatched_asyncio() -> Iterator[None]:
    """Inspect replaces asyncio.run for good when a log is read or written inside of a running loop."""
    yield
    assert asyncio.run.__module__ == "asyncio.runners", "read logs with the async functions"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: Qwen3's chat format over single bytes, 4,096 tokens of context."""
    return write_model_folder(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3-shaped model with random weights (64 ids, 48 positions) and a byte-less tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from small_models import small_model

    folder = tmp_path_factory.mktemp("model")
    shape = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 48, "eos_token_id": 1}
    small_model("Qwen3", **shape, initializer_range=0.3).save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(64)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture
def engine(random_model: Path, tmp_path: Path) -> Iterator[Any]:
    """The embedded engine over the random model."""
    from tinkerscript.engine.embedded import EmbeddedEngine

    with EmbeddedEngine(random_model, checkpoint_dir=tmp_path / "checkpoints", seed=3) as made:
        yield made

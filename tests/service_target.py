"""Which service is checked: our wire server, or with CHECK_SERVICE=1 one that the environment names.

TINKER_API_KEY; TINKER_BASE_URL (empty: the Tinker service); SERVICE_MODEL (its name there); SERVICE_FOLDER
(its tokenizer and config.json; empty: fetched from the Hugging Face Hub, without weights).
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkerscript.model_folder import TINY_MODEL
from wire_setup import wire_server

DEFAULT_MODEL = "Qwen/Qwen3-4B-Instruct-2507"


@dataclass(frozen=True)
class Target:
    model: str
    folder: Path
    base_url: str

    def engine(self, **more: Any) -> dict[str, Any]:
        """The `engine` section of a config."""
        section = {
            "backend": "tinker",
            "model": str(self.folder),
            "service_model": self.model,
            "lora": {"rank": 8},
            "base_url": self.base_url,
        }
        return section | more


@contextmanager
def service_target(folder: Path) -> Generator[Target]:
    """`folder` is for the state of a server of ours."""
    if os.environ.get("CHECK_SERVICE"):
        model = os.environ.get("SERVICE_MODEL") or DEFAULT_MODEL
        files = os.environ.get("SERVICE_FOLDER") or fetched(model)
        yield Target(model, Path(files), os.environ.get("TINKER_BASE_URL", ""))
        return
    with wire_server(TINY_MODEL, folder, name="tiny-served") as wire:
        yield Target("tiny-served", TINY_MODEL, wire.url)


def fetched(model: str) -> str:
    """Folder of the model's small files."""
    from huggingface_hub import snapshot_download

    return snapshot_download(model, allow_patterns=["*.json", "*.txt", "*.jinja"])

"""Where the service is: the environment says, and nothing is asked of it without a key.

TINKER_API_KEY; TINKER_BASE_URL (empty: the Tinker service); SERVICE_MODEL (its name there); SERVICE_FOLDER
(its tokenizer and config.json; empty: fetched from the Hugging Face Hub, without weights).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "Qwen/Qwen3-4B-Instruct-2507"


@dataclass(frozen=True)
class Target:
    model: str
    folder: Path

    def engine(self, **more: Any) -> dict[str, Any]:
        """The `engine` section of a config."""
        section = {
            "backend": "tinker",
            "model": str(self.folder),
            "service_model": self.model,
            "lora_rank": 8,
        }
        return section | {"base_url": os.environ.get("TINKER_BASE_URL", "")} | more


def target_here() -> Target | None:
    """The service that the environment names; None without a key."""
    if not os.environ.get("TINKER_API_KEY"):
        return None
    model = os.environ.get("SERVICE_MODEL") or DEFAULT_MODEL
    folder = os.environ.get("SERVICE_FOLDER") or fetched(model)
    return Target(model, Path(folder))


def fetched(model: str) -> str:
    """Folder of the model's small files."""
    from huggingface_hub import snapshot_download

    return snapshot_download(model, allow_patterns=["*.json", "*.txt", "*.jinja"])

"""Finds the weights that the trainer names, inside a vLLM replica, and checks their digest.

vLLM loads it by the entry point in `vllm.general_plugins`. TINKERSCRIPT_ADAPTERS names a folder or URL (with
the bearer token TINKERSCRIPT_ADAPTERS_TOKEN) with a folder per version; without it, the plugin is inactive.
Adapters load on request, full weights by `--weight-transfer-config '{"backend": "tinkerscript"}'`. vLLM loads
the very bytes that were hashed.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ADAPTERS = "TINKERSCRIPT_ADAPTERS"
ADAPTERS_TOKEN = "TINKERSCRIPT_ADAPTERS_TOKEN"

ADAPTER_FILE = "adapter_config.json"

# SHA-256 of a version's files. The version's name ends with this file's digest.
DIGESTS = "digests.json"

TRANSFER = "tinkerscript"
DIGEST_CHARACTERS = 16  # Hexadecimal digits in a version's name.

FETCH_TIMEOUT_S = 60.0

_NAME = re.compile(rf"[a-z]+-[\w.]+-\d+-([0-9a-f]{{{DIGEST_CHARACTERS}}})")


class WrongWeightsError(ValueError):
    pass


def is_version(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def write_manifest(folder: Path) -> str:
    """Returns the manifest's digest."""
    digests: dict[str, str] = {}
    for path in sorted((*folder.glob("*.safetensors"), *folder.glob(ADAPTER_FILE))):
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    content = json.dumps(digests, indent=2).encode()
    (folder / DIGESTS).write_bytes(content)
    return _short(content)


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGEST_CHARACTERS]


class WeightSource:
    def __init__(self, place: str, token: str = "") -> None:
        self._place = place
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._own = tempfile.TemporaryDirectory(prefix="tinkerscript-adapters-")

    def close(self) -> None:
        self._own.cleanup()

    def fetch(self, name: str) -> Path | None:
        """Return a checked copy of an adapter, or None if foreign or missing. Raises like `files_of`."""
        if not is_version(name):
            return None
        folder = Path(self._own.name) / name
        try:
            for file, content in self.files_of(name):
                folder.mkdir(exist_ok=True)
                (folder / file).write_bytes(content)
        except FileNotFoundError:
            return None
        return folder

    def files_of(self, name: str) -> Iterator[tuple[str, bytes]]:
        """Yield a version's checked files. Raises WrongWeightsError, OSError and httpx.HTTPError."""
        for file, digest in self._manifest(name).items():
            content = self._read(name, file)
            if hashlib.sha256(content).hexdigest() != digest:
                raise WrongWeightsError(f"{file} of {name} is not the one that was published")
            yield file, content

    def verify(self, name: str) -> None:
        """Raise like `files_of`. At a URL, check only the manifest, to download once."""
        if self._place.startswith("http"):
            self._manifest(name)
        else:
            for _ in self.files_of(name):
                pass

    def _manifest(self, name: str) -> dict[str, str]:
        content = self._read(name, DIGESTS)
        match, found = _NAME.fullmatch(name), _short(content)
        if match is None or match.group(1) != found:
            raise WrongWeightsError(f"the files of {name} have the digest {found}")
        return json.loads(content)

    def _read(self, name: str, file: str) -> bytes:
        if not self._place.startswith("http"):
            return (Path(self._place) / name / file).read_bytes()
        url = f"{self._place.rstrip('/')}/{name}/{file}"
        response = httpx.get(url, headers=self._headers, timeout=FETCH_TIMEOUT_S)
        if response.status_code == 404:
            raise FileNotFoundError(url)
        return response.raise_for_status().content


def register() -> None:
    place = os.environ.get(ADAPTERS)
    if not place:
        return
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry  # pyright: ignore[reportMissingImports]

    source = WeightSource(place, os.environ.get(ADAPTERS_TOKEN, ""))
    atexit.register(source.close)

    class Resolver(LoRAResolver):  # pyright: ignore[reportUntypedBaseClass]
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            folder = await asyncio.to_thread(source.fetch, lora_name)
            if folder is None:
                return None
            # vLLM assigns its own id.
            return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(folder))

    LoRAResolverRegistry.register_resolver("tinkerscript", Resolver())
    _register_transfer(source)


def _register_transfer(source: WeightSource) -> None:
    try:
        from vllm.distributed import weight_transfer  # pyright: ignore[reportMissingImports]
        from vllm.model_executor.layers import (  # pyright: ignore[reportMissingImports]
            vocab_parallel_embedding as embedding,
        )
        from vllm.model_executor.model_loader import reload  # pyright: ignore[reportMissingImports]
    except ImportError:
        return  # This vLLM cannot receive full weights.
    from safetensors.torch import load

    @dataclass
    class Named:
        name: str

    class Transfer(weight_transfer.WeightTransferEngine):  # pyright: ignore[reportUntypedBaseClass]
        init_info_cls = Named
        update_info_cls = Named

        def init_transfer_engine(self, init_info: Named) -> None:
            """Check the files while the model still has all its weights."""
            source.verify(init_info.name)

        def start_weight_update(self) -> None:
            reload.initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Named) -> None:
            tensors = (
                item for _, content in source.files_of(update_info.name) for item in load(content).items()
            )
            self.model.load_weights(tensors)

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            # A tied head would keep tensors of the old embeddings.
            if self.model_config.hf_text_config.tie_word_embeddings:
                modules = list(self.model.modules())
                source = next(each for each in modules if type(each) is embedding.VocabParallelEmbedding)
                for head in modules:
                    if isinstance(head, embedding.ParallelLMHead):
                        head.tie_weights(source)
                        head.quant_method.process_weights_after_loading(head)

        def shutdown(self) -> None:
            pass

    weight_transfer.WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)

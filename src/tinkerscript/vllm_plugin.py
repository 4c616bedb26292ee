"""What a vLLM replica runs of ours: it finds the adapter that a request names, and checks that it is the one.

Installed where vLLM is (`pip install tinkerscript`, without extras); vLLM loads it by its entry point in
`vllm.general_plugins`. It acts if TINKERSCRIPT_ADAPTERS names a folder, or the URL of one, with a folder for
each adapter; TINKERSCRIPT_ADAPTERS_TOKEN is the bearer token of a URL.

Invariant: what vLLM loads are the bytes that were hashed: they are read once, checked against the digest in
the adapter's name, and written to a folder that is this process's own.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

ADAPTERS = "TINKERSCRIPT_ADAPTERS"
ADAPTERS_TOKEN = "TINKERSCRIPT_ADAPTERS_TOKEN"

FILES = ("adapter_config.json", "adapter_model.safetensors")

DIGEST_CHARACTERS = 16
"""Of the SHA-256 digest, in hexadecimal, in an adapter's name."""

FETCH_TIMEOUT_S = 60.0

_NAME = re.compile(rf"[a-z]+-[\w.]+-\d+-([0-9a-f]{{{DIGEST_CHARACTERS}}})")


class WrongAdapterError(ValueError):
    """Files that are not those that the adapter's name stands for."""


def is_adapter(name: str) -> bool:
    """Whether this may be the name of an adapter of ours."""
    return _NAME.fullmatch(name) is not None


def digest_of(files: Mapping[str, bytes]) -> str:
    """The digest of an adapter's files, by name, as it is part of its name."""
    total = hashlib.sha256()
    for name in FILES:
        total.update(hashlib.sha256(files[name]).digest())
    return total.hexdigest()[:DIGEST_CHARACTERS]


def read_files(folder: Path) -> dict[str, bytes]:
    """An adapter's files, by name. Raises OSError."""
    return {name: (folder / name).read_bytes() for name in FILES}


def check(name: str, files: Mapping[str, bytes]) -> None:
    """Raise WrongAdapterError unless `files` have the digest in `name`."""
    match = _NAME.fullmatch(name)
    wanted, found = match.group(1) if match else "", digest_of(files)
    if wanted != found:
        raise WrongAdapterError(f"the files of adapter {name} have the digest {found}")


class AdapterSource:
    """Copies adapters from `place`, a folder or a URL, to a folder of its own."""

    def __init__(self, place: str, token: str = "") -> None:
        self._place = place
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._own = tempfile.TemporaryDirectory(prefix="tinkerscript-adapters-")

    def close(self) -> None:
        """Remove the copies."""
        self._own.cleanup()

    def fetch(self, name: str) -> Path | None:
        """The folder with a checked copy of the adapter `name`; None if it is none of ours or is not there.

        Raises WrongAdapterError, OSError and httpx.HTTPError.
        """
        if not is_adapter(name):
            return None
        files = self._download(name) if self._place.startswith("http") else self._read(name)
        if files is None:
            return None
        check(name, files)
        folder = Path(self._own.name) / name
        folder.mkdir(exist_ok=True)
        for file, content in files.items():
            (folder / file).write_bytes(content)
        return folder

    def _read(self, name: str) -> dict[str, bytes] | None:
        try:
            return read_files(Path(self._place) / name)
        except FileNotFoundError:
            return None

    def _download(self, name: str) -> dict[str, bytes] | None:
        files: dict[str, bytes] = {}
        with httpx.Client(headers=self._headers, timeout=FETCH_TIMEOUT_S) as client:
            for file in FILES:
                response = client.get(f"{self._place.rstrip('/')}/{name}/{file}")
                if response.status_code == 404:
                    return None
                files[file] = response.raise_for_status().content
        return files


def register() -> None:
    """vLLM's entry point: add the resolver, if this server has a place for adapters."""
    place = os.environ.get(ADAPTERS)
    if not place:
        return
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry  # pyright: ignore[reportMissingImports]

    source = AdapterSource(place, os.environ.get(ADAPTERS_TOKEN, ""))
    atexit.register(source.close)

    class Resolver(LoRAResolver):  # pyright: ignore[reportUntypedBaseClass]
        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            folder = await asyncio.to_thread(source.fetch, lora_name)
            if folder is None:
                return None
            # vLLM gives it an id of its own.
            return LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(folder))

    LoRAResolverRegistry.register_resolver("tinkerscript", Resolver())

"""The adapters that a replica loads are those that their names stand for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from interchange_helpers import run_config
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.server.process import running_server
from tinkerscript.vllm_plugin import (
    DIGESTS,
    WeightSource,
    WrongWeightsError,
    write_manifest,
)

FILES = ("adapter_config.json", "adapter_model.safetensors")


def written(folder: Path, version: int, content: bytes) -> str:
    """An adapter's folder by its name."""
    fresh = folder / "new"
    fresh.mkdir(parents=True)
    for file, data in zip(FILES, (b"{}", content), strict=True):
        (fresh / file).write_bytes(data)
    return fresh.rename(folder / f"policy-run_1-{version}-{write_manifest(fresh)}").name


@pytest.fixture
def source(tmp_path: Path) -> Iterator[WeightSource]:
    with closing(WeightSource(str(tmp_path))) as made:
        yield made


def test_a_copy_is_loaded_whatever_happens_to_the_original(source: WeightSource, tmp_path: Path) -> None:
    name = written(tmp_path, 1, b"weights")
    copy = source.fetch(name)
    assert copy is not None
    assert copy.parent != tmp_path
    (tmp_path / name / FILES[1]).write_bytes(b"others")
    assert (copy / FILES[1]).read_bytes() == b"weights"
    with pytest.raises(WrongWeightsError, match=name):
        source.fetch(name)


@pytest.mark.parametrize(
    "name", ["base", "policy-run-1", "../policy-run-1-0123456789abcdef", "policy-run-1-0123456789abcdef"]
)
def test_what_is_not_there_or_not_ours_is_left_to_others(source: WeightSource, name: str) -> None:
    assert source.fetch(name) is None


async def test_the_interchange_server_has_the_adapters_of_its_run(tmp_path: Path, byte_model: Path) -> None:
    name = written(tmp_path / "run" / "adapters", 7, b"weights")
    (tmp_path / "run" / "server.txt").write_text("not for replicas")
    tokens = {CLIENT_TOKEN: "client-secret-of-many", ADMIN_TOKEN: "admin-secret-of-many"}
    async with running_server(run_config(byte_model), tmp_path / "run", environ=tokens) as (info, _):

        def fetched(name: str, token: str) -> bytes | None:
            with closing(WeightSource(f"{info.url}/adapters", token)) as source:
                copy = source.fetch(name)
                return None if copy is None else (copy / FILES[1]).read_bytes()

        found = await asyncio.to_thread(fetched, name, tokens[ADMIN_TOKEN])
        assert found == b"weights"
        assert await asyncio.to_thread(fetched, "policy-r-8-0123456789abcdef", tokens[ADMIN_TOKEN]) is None
        for token, status in ((tokens[CLIENT_TOKEN], "403"), ("", "401")):
            with pytest.raises(httpx.HTTPStatusError, match=status):
                await asyncio.to_thread(fetched, name, token)
        admin = {"Authorization": f"Bearer {tokens[ADMIN_TOKEN]}"}
        async with httpx.AsyncClient(base_url=info.url, headers=admin) as http:
            for path in ("..%2F/server.txt", f"{name}/..%2F..%2Fserver.txt", f"{name}/server.txt"):
                reply = await http.get(f"/adapters/{path}")
                assert reply.status_code == 404, path
            assert "has no 'server.txt' of weights" in reply.json()["failure_reason"]


def test_all_weights_are_read_as_they_were_published(tmp_path: Path) -> None:
    fresh = tmp_path / "new"
    fresh.mkdir()
    parts = {f"model-{i}.safetensors": bytes([i]) * 100 for i in range(3)}
    for file, content in parts.items():
        (fresh / file).write_bytes(content)
    name = f"policy-run-4-{write_manifest(fresh)}"
    folder = fresh.rename(tmp_path / name)
    with closing(WeightSource(str(tmp_path))) as source:
        source.verify(name)
        assert dict(source.files_of(name)) == parts
        (folder / "model-1.safetensors").write_bytes(b"others")
        for read in (source.verify, lambda name: list(source.files_of(name))):
            with pytest.raises(WrongWeightsError, match=r"model-1.safetensors of policy-run-4"):
                read(name)
        (folder / DIGESTS).write_text("{}")
        with pytest.raises(WrongWeightsError, match="have the digest"):
            source.verify(name)

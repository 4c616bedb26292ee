"""The adapters that a replica loads are those that their names stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response

from serving import serving
from tinkerscript.vllm_plugin import FILES, AdapterSource, WrongAdapterError, digest_of, read_files


def written(folder: Path, version: int, content: bytes) -> str:
    """An adapter's folder by its name."""
    files = dict(zip(FILES, (b"{}", content), strict=True))
    name = f"policy-run_1-{version}-{digest_of(files)}"
    (folder / name).mkdir(parents=True)
    for file, data in files.items():
        (folder / name / file).write_bytes(data)
    return name


@pytest.fixture
def source(tmp_path: Path) -> Iterator[AdapterSource]:
    with closing(AdapterSource(str(tmp_path))) as made:
        yield made


def test_a_copy_is_loaded_whatever_happens_to_the_original(source: AdapterSource, tmp_path: Path) -> None:
    name = written(tmp_path, 1, b"weights")
    copy = source.fetch(name)
    assert copy is not None
    assert copy.parent != tmp_path
    (tmp_path / name / FILES[1]).write_bytes(b"others")
    assert read_files(copy)[FILES[1]] == b"weights"
    with pytest.raises(WrongAdapterError, match=name):
        source.fetch(name)


def test_the_files_of_another_version_are_refused(source: AdapterSource, tmp_path: Path) -> None:
    older, newer = written(tmp_path, 1, b"older"), written(tmp_path, 2, b"newer")
    (tmp_path / newer / FILES[1]).write_bytes((tmp_path / older / FILES[1]).read_bytes())
    with pytest.raises(WrongAdapterError):
        source.fetch(newer)


@pytest.mark.parametrize(
    "name", ["base", "policy-run-1", "../policy-run-1-0123456789abcdef", "policy-run-1-0123456789abcdef"]
)
def test_what_is_not_there_or_not_ours_is_left_to_others(source: AdapterSource, name: str) -> None:
    assert source.fetch(name) is None


def test_adapters_come_over_http_with_a_token(tmp_path: Path) -> None:
    app = FastAPI()

    @app.get("/adapters/{name}/{file}")
    def adapter(name: str, file: str, request: Request) -> Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return Response(status_code=401)
        path = tmp_path / name / file
        return FileResponse(path) if path.exists() else Response(status_code=404)

    name = written(tmp_path, 7, b"weights")
    with serving(app) as url, closing(AdapterSource(f"{url}/adapters", "secret")) as source:
        copy = source.fetch(name)
        assert copy is not None
        assert read_files(copy)[FILES[1]] == b"weights"
        assert source.fetch("policy-run_1-8-0123456789abcdef") is None
        stranger = AdapterSource(f"{url}/adapters")
        with closing(stranger), pytest.raises(httpx.HTTPStatusError, match="401"):
            stranger.fetch(name)

"""A run's folder at a URL: what is there is whole, and what is not there yet stays in the outbox."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from interchange_helpers import until
from tinkerscript import remote_folder
from tinkerscript.errors import ConfigError, UploadError
from tinkerscript.model_folder import TINY_MODEL, model_folder
from tinkerscript.remote_folder import (
    RemoteFolder,
    Uploads,
    fetched_checkpoint,
    is_url,
    local_checkpoint,
    resumable_folder,
)

URL = "memory://bucket/run_17"


@pytest.fixture(autouse=True)
def store() -> Iterator[dict[str, Any]]:
    """What is in fsspec's file system in memory: path -> file."""
    from fsspec.implementations.memory import MemoryFileSystem

    yield MemoryFileSystem.store
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@dataclass
class Run:
    """A run's folder, as a trainer fills it."""

    path: Path
    notes: list[str] = field(default_factory=list[str])
    pauses: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        (self.path / "checkpoints").mkdir(parents=True)
        (self.path / "config.yaml").write_text(f"experiment_dir: {URL}\n")

    def outbox(self, url: str = URL) -> Uploads:
        return Uploads(self.path, url, self.notes.append, keep_checkpoints=2, pause=self.pauses.append)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def journal(self, text: str) -> None:
        with (self.path / "journal.jsonl").open("a") as file:
            file.write(text)

    def checkpoint(self, name: str, text: str = "weights") -> Path:
        folder = self.path / "checkpoints" / name
        (folder / "parts").mkdir(parents=True)
        (folder / "model.safetensors").write_text(text)
        (folder / "parts" / "optimizer.pt").write_text(f"optimizer of {text}")
        return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "run_17")


class Broken:
    """`put_file` fails so many times; then it works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: float, *, only: str = "") -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self.times = times
        put = MemoryFileSystem.put_file

        def put_file(files: Any, source: str, target: str, **more: Any) -> Any:
            if self.times and only in target:
                self.times -= 1
                raise OSError("the network is down")
            return put(files, source, target, **more)

        monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("s3://bucket/run", True), ("file:///runs/one", True), ("memory://a", True)),
        *(("runs/one", False), ("auto", False), ("tinker://run/weights/1", False), ("C:/runs", False)),
    ],
)
def test_a_url_is_told_from_a_folder(text: str, expected: bool) -> None:
    assert is_url(text) == expected


async def test_what_is_finished_is_at_the_url_under_the_names_of_the_run_folder(run: Run) -> None:
    async with run.outbox() as outbox:
        outbox.add(run.write("rollouts/step_0001.jsonl", "{}\n"))
        run.journal("one\n")
        run.write("metrics.jsonl", "step 1\n")
        outbox.add(run.checkpoint("step_0001"))
        outbox.add_journal()
        await outbox.finish()
    remote = RemoteFolder(URL)
    assert remote.names("") == ["checkpoints", "config.yaml", "journal", "metrics.jsonl", "rollouts"]
    assert remote.read("rollouts/step_0001.jsonl") == b"{}\n"
    assert remote.steps() == [1]
    assert remote.names("checkpoints/step_0001") == ["manifest.json", "model.safetensors", "parts"]
    assert run.notes == []
    assert outbox.left() == []


async def test_the_journal_is_copied_in_pieces_of_whole_lines(run: Run) -> None:
    run.journal("one\ntw")
    remote = RemoteFolder(URL)
    async with run.outbox() as outbox:
        outbox.add_journal()
        await until(lambda: bool(remote.pieces()), "the first piece")
        assert remote.pieces() == [(0, 4, "000000000000000-000000000000004.jsonl")]
        run.journal("o\nthree\n")
        await outbox.finish()
    assert _journal(remote) == b"one\ntwo\nthree\n"
    run.journal("four\n")
    async with run.outbox() as outbox:
        await outbox.finish()
    assert _journal(remote) == b"one\ntwo\nthree\nfour\n"
    assert len(remote.pieces()) == 3


def _journal(remote: RemoteFolder) -> bytes:
    return b"".join(remote.read(f"journal/{name}") for _, _, name in remote.pieces())


def test_what_follows_a_gap_in_the_journal_is_left_out(tmp_path: Path) -> None:
    remote = RemoteFolder(URL)
    for name in ("000000000000000-000000000000004", "000000000000009-000000000000012", "other"):
        (tmp_path / "piece").write_text("one\n")
        remote.put(tmp_path / "piece", f"journal/{name}.jsonl")
    assert [(first, end) for first, end, _ in remote.pieces()] == [(0, 4)]


async def test_a_copy_is_tried_again_and_then_left_until_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run.outbox() as outbox:
        broken = Broken(monkeypatch, remote_folder.ATTEMPTS, only="step_0001")
        outbox.add(run.write("rollouts/step_0001.jsonl", "first"))
        outbox.add(run.write("rollouts/step_0002.jsonl", "second"))
        await until(lambda: bool(run.notes), "a note")
        assert run.pauses == [1, 2, 4, 8]
        assert broken.times == 0
        await outbox.finish()
    assert run.notes == [f"rollouts/step_0001.jsonl is not copied to {URL}: OSError: the network is down"]
    assert RemoteFolder(URL).names("rollouts") == ["step_0001.jsonl", "step_0002.jsonl"]


async def test_what_could_not_be_copied_is_named_and_copied_by_the_next_run(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        async with run.outbox() as outbox:
            Broken(patch, float("inf"))
            outbox.add(run.checkpoint("step_0001"))
            run.journal("one\n")
            with pytest.raises(UploadError, match="not copied to memory://bucket/run_17") as raised:
                await outbox.finish()
        assert "checkpoints/step_0001, journal.jsonl (OSError: the network is down)" in str(raised.value)
        assert outbox.left() == ["checkpoints/step_0001", "journal.jsonl"]
    shutil.rmtree(run.path / "checkpoints")
    async with run.outbox() as outbox:
        await outbox.finish()
    assert RemoteFolder(URL).steps() == [1]
    assert outbox.left() == []


async def test_a_run_that_fails_waits_a_while_and_says_what_is_left(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(remote_folder, "STOP_S", 0.05)
    hangs = threading.Event()
    with suppress(ZeroDivisionError):
        async with run.outbox() as outbox:
            monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: hangs.wait())
            outbox.add(run.write("rollouts/step_0001.jsonl", "first"))
            raise ZeroDivisionError
    hangs.set()
    assert run.notes == [f"not copied to {URL} yet: rollouts/step_0001.jsonl; --resume copies them"]


async def test_a_checkpoint_is_whole_or_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteFolder(URL)
    Broken(monkeypatch, 1, only="manifest")
    with pytest.raises(OSError, match="the network is down"):
        remote.put_checkpoint(run.checkpoint("step_0001"), "checkpoints/step_0001")
    assert remote.names("checkpoints/step_0001") == ["model.safetensors", "parts"]
    assert remote.steps() == []
    with pytest.raises(ConfigError, match=r"step_0001 is no finished checkpoint: it has no manifest\.json"):
        fetched_checkpoint(f"{URL}/checkpoints/step_0001")


async def test_the_oldest_checkpoints_go_and_one_that_is_deleted_here_is_copied(
    run: Run,
) -> None:
    async with run.outbox() as outbox:
        for step in (9, 10, 11):
            folder = run.checkpoint(f"step_{step:04d}")
            outbox.add(folder)
            shutil.rmtree(folder)
        outbox.add(run.checkpoint("final"))
        await outbox.finish()
    assert RemoteFolder(URL).names("checkpoints") == ["final", "step_0010", "step_0011"]


async def test_checkpoints_of_roles_are_copied_fetched_and_dropped_with_the_policys(
    run: Run, tmp_path: Path
) -> None:
    run.journal("one\n")
    async with run.outbox() as outbox:
        for step in (9, 10, 11):
            for name in (f"roles/rival/step_{step:04d}", f"step_{step:04d}"):
                outbox.add(run.checkpoint(name, text=name))
        await outbox.finish()
    remote = RemoteFolder(URL)
    assert remote.names("checkpoints") == ["roles", "step_0010", "step_0011"]
    # One more: a run may end between the copy of a role's and that of the policy's.
    assert remote.names("checkpoints/roles/rival") == ["step_0009", "step_0010", "step_0011"]
    folder = resumable_folder(URL, tmp_path / "elsewhere")
    found = sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("model.safetensors"))
    assert found == ["checkpoints/roles/rival/step_0011", "checkpoints/step_0011"]
    assert (folder / found[0] / "model.safetensors").read_text() == "roles/rival/step_0011"


async def test_a_new_run_is_refused_where_there_is_one(run: Run, tmp_path: Path) -> None:
    run.journal("one\n")
    async with run.outbox() as outbox:
        await outbox.finish()
    other = Run(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{URL} already holds a run; resume it .*--resume {URL}"):
        async with other.outbox():
            raise AssertionError("it began")


async def test_a_url_that_cannot_be_written_is_refused_before_anything_trains(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Broken(monkeypatch, float("inf"))
    with pytest.raises(ConfigError, match=f"experiment_dir: {URL} cannot be written: OSError: the network"):
        async with run.outbox():
            raise AssertionError("it began")
    with pytest.raises(ConfigError, match="nosuch://x cannot be opened: Protocol not known: nosuch"):
        run.outbox("nosuch://x")


@pytest.fixture
async def copied(run: Run) -> Run:
    """A run at the URL, with two checkpoints."""
    run.journal("one\ntwo\n")
    run.write("metrics.jsonl", "step 1\n")
    async with run.outbox() as outbox:
        for name in ("step_0001", "step_0002", "final"):
            outbox.add(run.checkpoint(name, text=f"weights of {name}"))
        await outbox.finish()
    return run


async def test_a_run_is_resumed_on_another_machine(copied: Run, tmp_path: Path) -> None:
    notes: list[str] = []
    folder = resumable_folder(URL, tmp_path / "elsewhere", note=notes.append)
    assert folder == tmp_path / "elsewhere" / "run_17"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    step = "checkpoints/step_0002"
    assert files == {
        *("config.yaml", "fetched_journal", "journal.jsonl", "metrics.jsonl"),
        *(f"{step}/model.safetensors", f"{step}/parts/optimizer.pt"),
    }
    assert (folder / "journal.jsonl").read_text() == "one\ntwo\n"
    assert (folder / step / "model.safetensors").read_text() == "weights of step_0002"
    assert notes == [f"fetching the run at {URL} into {folder}"]
    assert resumable_folder(URL, tmp_path / "elsewhere") == folder, "what is here is used"


async def test_a_run_that_has_gone_on_elsewhere_is_not_resumed_from_what_is_here(copied: Run) -> None:
    (copied.path / "journal.jsonl").write_text("one\n")
    with pytest.raises(ConfigError, match=r"has gone on elsewhere \(8 bytes of its journal are there, 4 in"):
        resumable_folder(URL, copied.path.parent)


def test_a_url_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run yet"):
        resumable_folder(URL, tmp_path)


async def test_a_checkpoint_is_fetched_once_and_again_when_it_is_another(
    copied: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notes: list[str] = []
    url = f"{URL}/checkpoints/final"
    first = fetched_checkpoint(url, note=notes.append)
    assert first.name == "final"
    assert (first / "parts" / "optimizer.pt").read_text() == "optimizer of weights of final"
    assert fetched_checkpoint(url, note=notes.append) == first
    assert notes == [f"fetching {url}"]
    shutil.rmtree(copied.path / "checkpoints" / "final")
    async with copied.outbox() as outbox:
        outbox.add(copied.checkpoint("final", text="other weights"))
        await outbox.finish()
    second = Path(local_checkpoint(url))
    assert (second / "model.safetensors").read_text() == "other weights"
    assert local_checkpoint("runs/one/checkpoints/final") == "runs/one/checkpoints/final"


async def test_a_model_may_be_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    RemoteFolder(URL).put_checkpoint(TINY_MODEL, "checkpoints/final")
    folder = model_folder(f"{URL}/checkpoints/final", weights=True)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("name", ["../../outside", "/etc/outside", ""])
async def test_a_manifest_that_leads_out_of_its_folder_is_refused(
    copied: Run, store: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    manifest = {"files": {name: {"bytes": 0, "sha256": ""}}}
    RemoteFolder(URL).put(copied.write("manifest", json.dumps(manifest)), "checkpoints/final/manifest.json")
    with pytest.raises(ConfigError, match="which is no file of the checkpoint"):
        fetched_checkpoint(f"{URL}/checkpoints/final")
    assert not list(tmp_path.rglob("outside"))


async def test_a_file_that_is_not_what_was_copied_is_refused(
    copied: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name = "checkpoints/final/model.safetensors"
    RemoteFolder(URL).put(copied.write("broken", "Weights of final"), name)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not what its manifest\.json says"):
        fetched_checkpoint(f"{URL}/checkpoints/final")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

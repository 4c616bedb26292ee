"""A run's folder at a URL: what is there is whole, and what is not there yet is copied by the next one."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from interchange_helpers import until
from run_ledger import rows
from tinkerscript.errors import ConfigError, UploadError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import ResumptionRow, StepRow
from tinkerscript.remote_folder import (
    RemoteFolder,
    Uploads,
    fetched_checkpoint,
    is_url,
    local_checkpoint,
    resumable_folder,
)
from tinkerscript.train.identity import write_manifest

URL = "memory://bucket/run_17"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty file system in memory, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@dataclass
class Run:
    """A run's folder, as a trainer fills it."""

    path: Path
    notes: list[str] = field(default_factory=list[str])
    pauses: list[float] = field(default_factory=list[float])

    def __post_init__(self) -> None:
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(f"experiment_dir: {URL}\n")

    def uploads(self, url: str = URL) -> Uploads:
        return Uploads(self.path, url, self.notes.append, pause=self.pauses.append)

    async def copied(self) -> None:
        """A process of the run copies all that is here."""
        async with self.uploads() as uploads:
            await uploads.finish()

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    async def step(self, step: int, *, resumption: int = 1) -> None:
        """A step in the ledger, and before the first one that a trainer began."""
        ledger = SqliteLedger(self.path / LEDGER_FILE)
        if step == 1:
            ledger.put(ResumptionRow(resumption=resumption, step=0, time=0.0))
        ledger.put(StepRow(step=step, time=0.0, policy_version=step, undone=resumption - 1))
        await ledger.commit()
        await ledger.close()

    def checkpoint(self, name: str, text: str = "weights") -> Path:
        folder = self.path / "checkpoints" / name
        (folder / "parts").mkdir(parents=True)
        (folder / "model.safetensors").write_text(text)
        (folder / "parts" / "optimizer.pt").write_text(f"optimizer of {text}")
        write_manifest(folder, "run")
        return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "runs" / "run_17")


def break_writing(monkeypatch: pytest.MonkeyPatch, of: str = "") -> None:
    """Writing fails from now on, of files whose name has this in it."""
    pipe = MemoryFileSystem.pipe_file

    def pipe_file(files: Any, target: str, *given: Any, **more: Any) -> Any:
        if of in target:
            raise OSError("the network is down")
        return pipe(files, target, *given, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)


def test_a_url_is_told_from_a_folder() -> None:
    for url in ("s3://bucket/run", "file:///runs/one", "memory://a"):
        assert is_url(url)
    for other in ("runs/one", "auto", "tinker://run/weights/1", "C:/runs"):
        assert not is_url(other)


async def test_what_is_finished_is_at_the_url_under_the_names_of_the_run_folder(run: Run) -> None:
    run.write("rollouts/step_0001.jsonl", "{}\n")
    run.write("search.sqlite", "what stays here")
    await run.step(1)
    run.write("metrics.jsonl", "step 1\n")
    run.checkpoint("step_0001")
    (run.path / "checkpoints" / "step_0002").mkdir()  # Still being written: it has no manifest.
    await run.copied()
    remote = RemoteFolder(URL)
    names = "checkpoints config.yaml ledger.sqlite metrics.jsonl position.json rollouts"
    assert remote.names("") == names.split()
    assert remote.read("rollouts/step_0001.jsonl") == b"{}\n"
    assert remote.names("checkpoints") == ["step_0001"]
    assert remote.names("checkpoints/step_0001") == ["manifest.json", "model.safetensors", "parts"]
    assert run.notes == []


def steps_there(tmp_path: Path) -> list[int]:
    """Those of the ledger at the URL."""
    copy = tmp_path / "there"
    copy.mkdir(exist_ok=True)
    RemoteFolder(URL).get(LEDGER_FILE, copy / LEDGER_FILE)
    return [row.step for row in rows(copy, StepRow, "ORDER BY step")]


ANOTHER_STEP = """
INSERT INTO steps (step, time, policy_version, accepted, failed, trained, stopped, undone)
    VALUES (2, 0, 2, 0, 0, 0, '', 0)
"""


async def test_the_ledger_is_copied_whole_while_it_is_written(run: Run, tmp_path: Path) -> None:
    await run.step(1)
    remote = RemoteFolder(URL)
    async with run.uploads() as uploads:
        with closing(sqlite3.connect(run.path / LEDGER_FILE)) as writer:
            writer.execute("BEGIN IMMEDIATE")
            writer.execute(ANOTHER_STEP)
            uploads.copy()
            await until(lambda: remote.position() == (1, 1), "the first copy")
            assert steps_there(tmp_path) == [1], "what is committed"
            writer.commit()
        await uploads.finish()
    assert (remote.position(), steps_there(tmp_path)) == ((1, 2), [1, 2])
    assert not list(run.path.glob(".copy-*"))


async def test_what_is_not_copied_is_for_the_next_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.checkpoint("step_0001")
    await run.step(1)
    with monkeypatch.context() as patch:
        async with run.uploads() as uploads:
            break_writing(patch)
            with pytest.raises(UploadError, match="not copied to memory://bucket/run_17: OSError: the net"):
                await uploads.finish()
    await run.copied()
    assert RemoteFolder(URL).steps() == [1]
    assert RemoteFolder(URL).position() == (1, 1)


async def test_a_checkpoint_is_whole_or_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteFolder(URL)
    break_writing(monkeypatch, of="manifest")
    with pytest.raises(OSError, match="the network is down"):
        remote.put_checkpoint(run.checkpoint("step_0001"), "checkpoints/step_0001")
    assert remote.names("checkpoints/step_0001") == ["model.safetensors", "parts"]
    assert remote.steps() == []
    with pytest.raises(ConfigError, match=r"step_0001 is not a finished checkpoint: it has no manifest"):
        fetched_checkpoint(f"{URL}/checkpoints/step_0001")


async def test_the_url_has_the_checkpoints_that_are_here_also_the_best_one(run: Run, tmp_path: Path) -> None:
    """Step 3 is the best one, and older than the newest two. A run resumed from there keeps it, too."""
    await run.step(1)
    async with run.uploads() as uploads:
        for step in (3, 9, 10):
            run.checkpoint(f"step_{step:04d}")
        run.checkpoint("final")
        uploads.copy()
        await until(lambda: RemoteFolder(URL).steps() == [3, 9, 10], "three checkpoints")
        run.checkpoint("step_0011")
        shutil.rmtree(run.path / "checkpoints" / "step_0009")
        await uploads.finish()
    kept = ["step_0003", "step_0010", "step_0011"]
    assert RemoteFolder(URL).names("checkpoints") == ["final", *kept]
    folder = resumable_folder(URL, tmp_path / "elsewhere")
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept
    await Run(folder).copied()
    assert RemoteFolder(URL).names("checkpoints") == ["final", *kept]


async def test_a_new_run_is_refused_where_there_is_one(run: Run, tmp_path: Path) -> None:
    await run.step(1)
    await run.copied()
    other = Run(tmp_path / "other")
    with pytest.raises(ConfigError, match=f"{URL} already holds a run; resume it .*--resume {URL}"):
        async with other.uploads():
            raise AssertionError("it began")


async def test_a_url_that_cannot_be_written_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    break_writing(monkeypatch)
    with pytest.raises(ConfigError, match=f"experiment_dir: {URL} cannot be written: OSError: the network"):
        async with run.uploads():
            raise AssertionError("it began")
    with pytest.raises(ConfigError, match="nosuch://x cannot be opened: Protocol not known: nosuch"):
        run.uploads("nosuch://x")


@pytest.fixture
async def copied(run: Run) -> Run:
    """A run at the URL, with a step's checkpoint and the last one."""
    await run.step(1)
    run.write("metrics.jsonl", "step 1\n")
    for name in ("step_0002", "final"):
        run.checkpoint(name, text=f"weights of {name}")
    await run.copied()
    return run


async def test_a_run_is_resumed_on_another_machine(copied: Run, tmp_path: Path) -> None:
    notes: list[str] = []
    folder = resumable_folder(URL, tmp_path / "elsewhere", note=notes.append)
    assert folder == tmp_path / "elsewhere" / "run_17"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    step = "checkpoints/step_0002"
    parts = {f"{step}/{name}" for name in ("manifest.json", "model.safetensors", "parts/optimizer.pt")}
    assert files == {"config.yaml", "ledger.sqlite", "metrics.jsonl"} | parts
    assert [row.step for row in rows(folder, StepRow)] == [1]
    assert (folder / step / "model.safetensors").read_text() == "weights of step_0002"
    assert notes == [f"fetching the run at {URL} into {folder}"]
    assert resumable_folder(URL, tmp_path / "elsewhere") == folder, "what is here is used"


@pytest.mark.parametrize(("resumption", "steps"), [(1, 2), (2, 1)])
async def test_a_run_that_has_gone_on_elsewhere_is_not_resumed_from_what_is_here(
    copied: Run, tmp_path: Path, resumption: int, steps: int
) -> None:
    """It has more steps there, or as many that another trainer made."""
    elsewhere = Run(resumable_folder(URL, tmp_path / "elsewhere"))
    for step in range(1, steps + 1) if resumption > 1 else [steps]:
        await elsewhere.step(step, resumption=resumption)
    await elsewhere.copied()
    message = rf"was continued elsewhere \(it has {resumption} starts and 2 steps there, 1 and 1 in "
    with pytest.raises(ConfigError, match=message):
        resumable_folder(URL, copied.path.parent)


@pytest.mark.usefixtures("copied")
def test_a_fetch_that_was_cut_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "get", Mock(side_effect=OSError("the network is down")))
        with pytest.raises(ConfigError, match="cannot be read: OSError: the network is down"):
            resumable_folder(URL, tmp_path / "elsewhere")
    folder = resumable_folder(URL, tmp_path / "elsewhere")
    assert [row.step for row in rows(folder, StepRow)] == [1]


async def test_a_checkpoint_is_fetched_once_and_again_when_it_is_another(copied: Run) -> None:
    notes: list[str] = []
    url = f"{URL}/checkpoints/final"
    first = fetched_checkpoint(url, note=notes.append)
    assert first.name == "final"
    assert (first / "parts" / "optimizer.pt").read_text() == "optimizer of weights of final"
    assert fetched_checkpoint(url, note=notes.append) == first
    assert notes == [f"fetching {url}"]
    shutil.rmtree(copied.path / "checkpoints" / "final")
    copied.checkpoint("final", text="other weights")
    await copied.copied()
    second = Path(local_checkpoint(url))
    assert (second / "model.safetensors").read_text() == "other weights"
    assert local_checkpoint("runs/one/checkpoints/final") == "runs/one/checkpoints/final"


@pytest.mark.parametrize("name", ["../../outside", "/etc/outside", ""])
@pytest.mark.usefixtures("copied")
def test_a_manifest_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    manifest = {"files": {name: {"bytes": 0, "sha256": ""}}}
    RemoteFolder(URL).write(json.dumps(manifest).encode(), "checkpoints/final/manifest.json")
    with pytest.raises(ConfigError, match="which is not a file of the checkpoint"):
        fetched_checkpoint(f"{URL}/checkpoints/final")
    assert not list(tmp_path.rglob("outside"))


@pytest.mark.usefixtures("copied")
def test_a_file_that_is_not_what_was_copied_is_refused(tmp_path: Path) -> None:
    name = "checkpoints/final/model.safetensors"
    RemoteFolder(URL).write(b"Weights of final", name)
    with pytest.raises(ConfigError, match=r"model\.safetensors differs from its entry in manifest\.json"):
        fetched_checkpoint(f"{URL}/checkpoints/final")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]

"""Whether a folder holds a run, and whether its files are of one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE, RUN_ID
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.rows import StepRow
from tinkerscript.train.identity import check_unused, check_whole, holds_run, identify, write_manifest


async def ledger(folder: Path, *steps: int) -> None:
    ledger = SqliteLedger(folder / LEDGER_FILE)
    await ledger.commit([StepRow(step=step, time=0.0, policy_version=step) for step in steps])
    await ledger.close()


async def test_a_folder_holds_a_run_once_its_ledger_has_a_step_or_an_episode(tmp_path: Path) -> None:
    identify(tmp_path)
    await ledger(tmp_path)
    assert not holds_run(tmp_path)
    check_unused(tmp_path)
    await ledger(tmp_path, 1)
    assert holds_run(tmp_path)
    check_whole(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run; resume it"):
        check_unused(tmp_path)
    (tmp_path / RUN_ID).unlink()
    with pytest.raises(ConfigError, match=r"has no run_id, which identifies the run of ledger\.sqlite"):
        check_whole(tmp_path)


async def test_a_ledger_of_another_run_is_refused(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        identify(tmp_path / name)
        await ledger(tmp_path / name, 1)
    (tmp_path / "one" / LEDGER_FILE).replace(tmp_path / "other" / LEDGER_FILE)
    with pytest.raises(ConfigError, match=r"ledger\.sqlite in .*: from another run than the rest"):
        check_whole(tmp_path / "other")


def test_a_ledger_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    identify(tmp_path)
    (tmp_path / LEDGER_FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"cannot be read .*put a whole ledger back"):
        holds_run(tmp_path)


def test_a_checkpoint_is_on_the_disk_before_its_manifest_says_that_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "step_0001"
    (checkpoint / "notes").mkdir(parents=True)
    written = [checkpoint / "weights", checkpoint / "notes" / "license"]
    for path in written:
        path.write_text("w")
    synced, fsync = list[tuple[int, bool]](), os.fsync

    def noted(opened: int) -> None:
        synced.append((os.fstat(opened).st_ino, (checkpoint / "manifest.json").exists()))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", noted)
    write_manifest(checkpoint, "run")
    before = {node for node, is_said in synced if not is_said}
    after = {node for node, is_said in synced if is_said}
    manifest = checkpoint / "manifest.json"
    assert {path.stat().st_ino for path in (*written, checkpoint / "notes", manifest)} <= before
    assert {path.stat().st_ino for path in (checkpoint, tmp_path)} <= after

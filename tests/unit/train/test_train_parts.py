"""Policy versions, the child processes of a run, and which checkpoints are kept."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from interchange_helpers import until
from run_ledger import KeptRows
from tinkerscript.config import RunConfig
from tinkerscript.errors import GatewayError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.history import begin
from tinkerscript.ledger.rows import CheckpointRow, PublicationRow, StepRow, TrainerRow
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.processes.launcher import Child
from tinkerscript.processes.supervisor import ChildFailedError, Supervisor, run_beside
from tinkerscript.rollouts.call import pack_ids
from tinkerscript.sampler import SampleRequest
from tinkerscript.testing import QuietReporter
from tinkerscript.train.open_run import begin_run
from tinkerscript.train.policy import Policy
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.run_status import RunStatus
from trainer_fakes import ScriptedPublisher


async def test_policy_versions_only_grow_also_over_restarts() -> None:
    ledger = KeptRows()
    first = Policy(ScriptedPublisher(), ledger)
    assert [await first.publish(), await first.publish()] == [0, 1]
    again = Policy(ScriptedPublisher(), ledger, version=1)
    assert again.version == 1
    assert await again.publish() == 2
    assert [row.policy_version for row in ledger.of(PublicationRow)] == [0, 1, 2]


async def test_a_policy_version_is_in_the_ledger_before_it_samples() -> None:
    class Slow(KeptRows):
        asked, committed = asyncio.Event(), asyncio.Event()

        async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
            self.note(rows)
            self.asked.set()
            await self.committed.wait()

    ledger = Slow()
    policy = Policy(ScriptedPublisher(), ledger)
    publishing = asyncio.create_task(policy.publish())
    await ledger.asked.wait()
    assert policy.version == -1
    with pytest.raises(GatewayError, match="no weights have been published"):
        await policy.sample(SampleRequest(prompt=pack_ids([5]), max_tokens=1))
    ledger.committed.set()
    assert await publishing == policy.version == 0
    await policy.sample(SampleRequest(prompt=pack_ids([5]), max_tokens=1))


def child(tmp_path: Path, code: str, **extra: object) -> Child:
    return Child("child", lambda _: [sys.executable, "-c", code], tmp_path / "log", **extra)  # type: ignore[arg-type]


UNTIL_STDIN_CLOSES = "import sys; sys.stdin.read()"


async def test_a_killed_child_is_started_again_when_it_may_be_and_ended_at_last(tmp_path: Path) -> None:
    notes, incarnations, deaths = list[str](), list[int](), list[tuple[int, int]]()
    may, asked = asyncio.Event(), asyncio.Event()

    def argv(incarnation: int) -> list[str]:
        incarnations.append(incarnation)
        return [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]

    def may_restart() -> bool:
        asked.set()
        return may.is_set()

    kept = Child("child", argv, tmp_path / "log", on_death=lambda i, code: deaths.append((i, code)))
    kept.may_restart = may_restart
    async with Supervisor(max_restarts=2, note=notes.append) as supervisor:
        await supervisor.start(kept)
        await until(lambda: "up" in kept.log.read_text())
        first = kept.process
        assert first is not None
        os.kill(first.pid, signal.SIGKILL)
        await asked.wait()
        assert kept.restarts == 0
        may.set()
        await until(lambda: kept.log.read_text().count("up") == 2)
    assert deaths == [(0, -signal.SIGKILL)]
    assert notes == ["child died (signal 9); starting it again in 0.2 s"]
    assert incarnations == [0, 1]
    assert kept.process is not first
    assert kept.process is not None
    assert kept.process.returncode == 0


@pytest.mark.parametrize(
    ("code", "fatal", "restarts", "words"),
    [
        ("'no such thing'", {1}, 0, r"exit code 1\) after 0 restarts(.|\n)*no such thing"),
        ("3", {}, 2, "code 3"),
    ],
)
async def test_a_child_that_cannot_run_ends_the_work_with_its_last_words(
    tmp_path: Path, code: str, fatal: Collection[int], restarts: int, words: str
) -> None:
    notes: list[str] = []
    broken = child(tmp_path, f"import sys; sys.exit({code})", fatal_codes=frozenset(fatal))
    async with Supervisor(max_restarts=2, note=notes.append) as supervisor:
        await supervisor.start(broken)
        forever = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(ChildFailedError, match=words):
            await run_beside(supervisor, forever)  # type: ignore[arg-type]
        assert forever.cancelled()
    assert len(notes) == restarts


GRANDCHILD = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('up', flush=True); "


def group(pid: int) -> list[int]:
    """The live processes of a session."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue  # It ended during the look.
    return found


@pytest.mark.parametrize("how", ["it dies", "it hangs", "the run ends"])
async def test_what_a_child_has_started_ends_with_it(tmp_path: Path, how: str) -> None:
    """Also where it ignores that its standard input closes."""
    stubborn = GRANDCHILD + "import time; time.sleep(600)"
    kept = child(tmp_path, stubborn, environ={**os.environ, "A": "B"})
    async with Supervisor(max_restarts=0, note=print) as supervisor:
        await supervisor.start(kept)
        assert kept.process is not None
        first = kept.process.pid
        await until(lambda: "up" in kept.log.read_text())
        assert len(group(first)) == 2
        if how == "it dies":
            os.kill(first, signal.SIGKILL)
        elif how == "it hangs":
            supervisor.kill(kept)
        if how != "the run ends":
            with pytest.raises(ChildFailedError):
                await supervisor.failed()
    await until(lambda: not group(first))


def with_parent(code: str, **options: Any) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "tinkerscript.processes.with_parent", sys.executable, "-c", code]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True, **options)


@pytest.mark.parametrize("how", ["its parent ends", "it is stubborn", "its wrapper is killed"])
async def test_a_program_with_parent_ends_with_its_parent(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log"
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if how == "it is stubborn" else ""
    code = f"import signal, time; {stubborn}{GRANDCHILD}time.sleep(600)"
    with path.open("wb") as log, with_parent(code, stdout=log) as process:
        await until(lambda: "up" in path.read_text())
        assert len(group(process.pid)) == 4
        assert process.stdin is not None
        if how == "its wrapper is killed":
            process.kill()
            process.wait()
        else:
            process.stdin.close()
        await until(lambda: not group(process.pid))


def test_a_program_with_parent_hands_on_its_exit_code() -> None:
    with with_parent("raise SystemExit(7)") as process:
        assert process.wait(30) == 7


def test_the_newest_checkpoints_and_the_best_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(RunConfig(), TINY_MODEL, now=datetime.now(), path=tmp_path)
    for name in ("step_9996", "step_9997", "step_9998", "step_9999", "step_10000", "final", "step_by_hand"):
        (folder.checkpoints / name).mkdir()
    folder.keep_checkpoints(2, needed={9997})
    folder.close()
    left = sorted(path.name for path in folder.checkpoints.iterdir())
    assert left == ["final", "step_10000", "step_9997", "step_9999", "step_by_hand"]


async def test_a_checkpoint_without_a_row_never_takes_the_place_of_one_that_can_be_resumed(
    tmp_path: Path,
) -> None:
    """The server that ended the run had the checkpoint of step 13, but not its row."""
    folder = RunFolder(RunConfig(), TINY_MODEL, now=datetime.now(), path=tmp_path)
    ledger = SqliteLedger(tmp_path / LEDGER_FILE)

    def sealed(step: int) -> None:
        for policy in (folder.checkpoints, folder.checkpoints_of("judge")):
            (policy / folder.checkpoint_name(step)).mkdir(parents=True)
        folder.seal(folder.checkpoint_name(step))

    async def saved(step: int) -> None:
        sealed(step)
        reached = StepRow(step=step, time=0.0, policy_version=step)
        await ledger.commit([reached, CheckpointRow(step=step, time=0, policy_version=step, train_seconds=0)])
        folder.keep_checkpoints(1)

    async def resumed() -> tuple[int, list[str]]:
        shown = QuietReporter()
        status = RunStatus(shown)
        history = (await begin(ledger, folder.whole_checkpoints(), time=0.0)).history
        begin_run(RunConfig(), folder, status, ledger=ledger, history=history)
        await status.end(None)
        return history.step, shown.notes

    await saved(10)
    await ledger.commit([StepRow(step=13, time=0.0, policy_version=13)])
    sealed(13)
    step, (said,) = await resumed()
    assert step == 10
    aside = folder.checkpoints / "undone_1"
    assert said.endswith(
        f"step_0013 is not in the ledger: the run continues from step 10, "
        f"and this checkpoint was moved to {aside}"
    )
    assert (aside / "step_0013").is_dir()
    assert (folder.checkpoints_of("judge") / "undone_1" / "step_0013").is_dir()
    await saved(12)
    assert (await resumed())[0] == 12
    await ledger.close()
    folder.close()

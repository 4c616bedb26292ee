"""Locks that die with their process, and processes that end with their parent or on a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinkerscript.lifecycle import DISK_FULL, INTERRUPTED, stop_child, try_lock

WAITS = """
import asyncio, sys
from tinkerscript.lifecycle import run_until_interrupted

async def work():
    print("working", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

sys.exit(run_until_interrupted(work(), exit_with_parent=True))
"""

BLOCKS = """
import asyncio, time, tinkerscript.lifecycle as lifecycle

async def work():
    print("working", flush=True)
    time.sleep(60)

lifecycle.STOP_WITHIN_S = {within_s}
lifecycle.run_until_interrupted(work())
"""

HANGS = """
import asyncio, time, tinkerscript.lifecycle as lifecycle

async def main():
    lifecycle.ORPHAN_GRACE_S = 0.1
    lifecycle.when_parent_ends(lambda: None)
    print("working", flush=True)
    time.sleep(60)

asyncio.run(main())
"""


def start(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


@pytest.mark.parametrize("code", ["import sys; sys.stdin.read()", "import time; time.sleep(60)"])
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_child_is_gone_when_its_stop_returns_or_is_cancelled(code: str, is_cancelled: bool) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=subprocess.PIPE, start_new_session=True
    )
    stopping = asyncio.create_task(stop_child(child, grace_s=60 if is_cancelled or "stdin" in code else 0.1))
    if is_cancelled:
        await asyncio.sleep(0)
        stopping.cancel()
    (error,) = await asyncio.gather(stopping, return_exceptions=True)
    assert isinstance(error, asyncio.CancelledError) == is_cancelled
    assert child.returncode is not None


def test_a_lock_has_one_holder_and_dies_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = try_lock(path)
    assert first is not None
    assert try_lock(path) is None
    first.close()
    holder = start(
        "import pathlib, time; from tinkerscript.lifecycle import try_lock;"
        f"lock = try_lock(pathlib.Path({str(path)!r})); print('working', flush=True); time.sleep(60)"
    )
    with holder:
        assert try_lock(path) is None
        holder.kill()
    second = try_lock(path)
    assert second is not None
    second.close()


@pytest.mark.parametrize("ends", ["a signal", "its parent"])
def test_work_cleans_up_after_a_signal_and_after_its_parents_end(ends: str) -> None:
    with start(WAITS) as process:
        if ends == "a signal":
            os.kill(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
        output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("cleaned up\n", INTERRUPTED)


def test_work_that_blocks_the_loop_ends_within_its_time_after_a_signal() -> None:
    with start(BLOCKS.format(within_s=0.1)) as process:
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == INTERRUPTED


def test_a_second_signal_ends_work_that_blocks_the_loop_at_once() -> None:
    with start(BLOCKS.format(within_s=60)) as process:
        deadline = time.monotonic() + 30
        while process.poll() is None:
            assert time.monotonic() < deadline
            os.kill(process.pid, signal.SIGINT)
    assert process.returncode == INTERRUPTED


def test_a_hanging_child_ends_with_its_parent() -> None:
    with start(HANGS) as process:
        process.communicate(timeout=30)
    assert process.returncode == 1


def test_a_full_disk_is_the_exit_code_even_if_the_log_is_on_it_too() -> None:
    program = """
import logging
from tinkerscript.lifecycle import exit_disk_full
logging.basicConfig()
logging.raiseExceptions = False
logging.warning("no room")
exit_disk_full()
"""
    with Path("/dev/full").open("w") as full:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run([sys.executable, "-c", program], stderr=full, env=environ, check=False)
    assert done.returncode == DISK_FULL

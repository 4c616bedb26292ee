"""Start and end processes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

INTERRUPTED = 130  # Exit code after SIGINT or SIGTERM.
DISK_FULL = errno.ENOSPC  # Exit code that tells our parent not to restart us.
STOP_WITHIN_S = 5.0  # After SIGINT or SIGTERM.
GRACE_S = 5  # For open requests at shutdown; a hard exit follows after twice that.
ORPHAN_GRACE_S = 3.0

# Practically no full collections. The first counts created minus freed objects of any age, so it is low:
# freed old ones hide new ones.
COLLECTOR_THRESHOLDS = (100, 0, 1_000_000_000)


def exit_disk_full() -> NoReturn:
    """Exit with `DISK_FULL`. Flushing to a full disk would make the code 120."""
    sys.stdout = sys.stderr = None
    raise SystemExit(DISK_FULL)


def try_lock(path: Path) -> IO[str] | None:
    """Return an open file with the lock, or None. The process's end releases it."""
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def hold_lock(path: Path) -> Generator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class ProcessId(NamedTuple):
    """A process, recognizable even after its pid is reused."""

    host: str
    pid: int
    started: int  # Ticks since boot, 0 if unknown.

    @staticmethod
    def own() -> ProcessId:
        return ProcessId(socket.gethostname(), os.getpid(), _start_of(os.getpid()) or 0)

    def is_gone(self) -> bool:
        """Other machines' processes count as alive."""
        return self.host == socket.gethostname() and _start_of(self.pid) != self.started


def _start_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() or not _is_alive(pid) else 0
    return int(status.rpartition(")")[2].split()[19])  # The name may contain spaces.


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_command(name: str, *arguments: str) -> list[str]:
    """The command ends with us. Its standard input must be our pipe."""
    return [sys.executable, "-m", "tinkerscript", name, *arguments, "--exit-with-parent"]


def shorten_collections() -> None:
    """Restrict the garbage collector to new objects.

    Servers have millions of long-lived objects and no cycles per request. Full collections would be the
    slowest percent of calls in `bench/gateway.py`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def collect_less_often() -> None:
    """Let more new objects accumulate.

    An Inspect episode keeps thousands; frequent collections would take a sixth of its time.
    """
    gc.set_threshold(5_000, 20, 20)


def collect_everything() -> None:
    gc.unfreeze()
    gc.collect()


def exit_hard_after(seconds: float, code: int = 1) -> None:
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def when_parent_ends(stop: Callable[[], object]) -> None:
    """Call `stop` on the event loop when standard input, a pipe from the parent, closes.

    `ORPHAN_GRACE_S` later, the process exits hard.
    """
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def watch() -> None:
        # A buffered read would hold a lock, and fail the interpreter's shutdown.
        while os.read(stdin, 4096):
            pass
        exit_hard_after(ORPHAN_GRACE_S)
        with suppress(RuntimeError):  # The process is already ending.
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_until_interrupted(work: Coroutine[Any, Any, int], *, exit_with_parent: bool = False) -> int:
    """Run `work` and return its exit code, or 130 after a signal.

    SIGINT, SIGTERM and, with `exit_with_parent`, the parent's end cancel `work`. After `STOP_WITHIN_S` or a
    second signal, the process exits hard.
    """

    async def main() -> int:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        signals = 0

        def stop(*_: object) -> None:
            nonlocal signals
            signals += 1
            if signals > 1:
                os._exit(INTERRUPTED)
            exit_hard_after(STOP_WITHIN_S, INTERRUPTED)
            loop.call_soon_threadsafe(task.cancel)

        # The loop's own handlers would wait for code that blocks the loop.
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        if exit_with_parent:
            when_parent_ends(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            print("stopped", file=sys.stderr)
            return INTERRUPTED
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    return asyncio.run(main())


def describe_exit(code: int) -> str:
    if code == DISK_FULL:
        return os.strerror(code)
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def last_lines(log: Path, number: int = 8) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()[-number:]
    except OSError as error:
        lines = [f"({error})"]
    return "\n".join("    " + line for line in lines or ["(nothing)"])


@contextmanager
def without_garbage_collection() -> Generator[None]:
    """Import a sixth faster in this block."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def stop_child(child: Process, grace_s: float) -> None:
    """Close the child's standard input, and kill its process group after `grace_s` or if cancelled.

    The child must lead its group. It has ended even if this raises.
    """
    if child.stdin is not None:
        child.stdin.close()
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), grace_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()

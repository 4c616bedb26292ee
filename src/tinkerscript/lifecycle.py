"""Start and end processes: imports, file locks, the parent's death, signals, hard exits.

Invariant: a lock is released when its process dies for any reason. A child that has lost its parent
ends within a bounded time, even if its code hangs.
"""

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
DISK_FULL = errno.ENOSPC  # Exit code of a child on a full disk, where a restart would not help.
STOP_WITHIN_S = 5.0  # Time for a process to end after SIGINT or SIGTERM.
GRACE_S = 5  # Seconds for open requests at shutdown. After twice that time the process exits hard.
ORPHAN_GRACE_S = 3.0  # Time for an orphaned process to end in order.

# New objects per collection of new objects, collections per collection of survivors, and practically no full
# collections. The first is low because it counts created minus freed objects of any age, so freed old objects
# hide new ones.
COLLECTOR_THRESHOLDS = (100, 0, 1_000_000_000)


def exit_disk_full() -> NoReturn:
    """End this process with `DISK_FULL`.

    Standard output and error are dropped first, because Python would flush them at exit and return 120
    if the log is on the full disk.
    """
    sys.stdout = sys.stderr = None
    raise SystemExit(DISK_FULL)


def try_lock(path: Path) -> IO[str] | None:
    """Return an open file that holds the lock of `path`, or None if another process holds it."""
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
    """A process, identified even after its pid is used again."""

    host: str
    pid: int
    started: int
    """The start time in ticks since the machine's boot, or 0 if the system does not provide it."""

    @staticmethod
    def own() -> ProcessId:
        return ProcessId(socket.gethostname(), os.getpid(), _start_of(os.getpid()) or 0)

    def is_gone(self) -> bool:
        """Return whether the process has ended. A process of another machine counts as alive."""
        return self.host == socket.gethostname() and _start_of(self.pid) != self.started


def _start_of(pid: int) -> int | None:
    """Return the start time of a process, or None if it has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() or not _is_alive(pid) else 0
    return int(status.rpartition(")")[2].split()[19])  # The name before ")" may contain spaces.


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_command(name: str, *arguments: str) -> list[str]:
    """Return the argv of a `tinkerscript` command as a child that ends with this process.

    Its standard input must be a pipe from this process.
    """
    return [sys.executable, "-m", "tinkerscript", name, *arguments, "--exit-with-parent"]


def shorten_collections() -> None:
    """Restrict the garbage collector to new objects.

    This is for a server with millions of long-lived objects and without reference cycles per request. A
    full collection stops its event loop for longer the more objects it has; `bench/gateway.py` shows it
    as the slowest percent of calls.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def collect_less_often() -> None:
    """Let the garbage collector wait for more new objects.

    An episode of an Inspect task creates thousands, which live until it ends. Frequent collections
    would take a sixth of its time.
    """
    gc.set_threshold(5_000, 20, 20)


def collect_everything() -> None:
    """Free everything that `shorten_collections` retains, for a server that has dropped its objects."""
    gc.unfreeze()
    gc.collect()


def exit_hard_after(seconds: float, code: int = 1) -> None:
    """End this process with `code` after `seconds`, even if it hangs."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def when_parent_ends(stop: Callable[[], object]) -> None:
    """Call `stop` on the running event loop when standard input, a pipe from the parent, closes.

    The process exits hard if it is still alive `ORPHAN_GRACE_S` seconds later.
    """
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def watch() -> None:
        # A thread that blocks in a buffered read would hold a lock at which the interpreter's shutdown fails.
        while os.read(stdin, 4096):
            pass
        exit_hard_after(ORPHAN_GRACE_S)
        with suppress(RuntimeError):  # A closed loop means that the process is already ending.
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_until_interrupted(work: Coroutine[Any, Any, int], *, exit_with_parent: bool = False) -> int:
    """Run `work` and return its exit code, or 130 if a signal stopped it.

    SIGINT, SIGTERM and, with `exit_with_parent`, the parent's end cancel `work`. The process exits hard
    if its cleanup takes more than `STOP_WITHIN_S` seconds, or at the second signal.
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
    """Disable the garbage collector during imports, which saves a sixth of their time.

    What is imported stays, so later collections pass over it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def stop_child(child: Process, grace_s: float) -> None:
    """Close the child's standard input, which asks it to end, and kill its process group after `grace_s`.

    If this is cancelled the group is killed at once. The child must lead its group. It has ended even
    if this raises.
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

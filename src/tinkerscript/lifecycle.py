"""How a process of ours starts and ends: imports, file locks, the parent's death, signals, hard exits.

Invariant: a lock is released when its process dies, however it dies; a child whose parent is gone ends within
a bound, even if its own code hangs.
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

INTERRUPTED = 130
"""Exit code after SIGINT or SIGTERM."""

DISK_FULL = errno.ENOSPC
"""Exit code of a child for which a disk has no room, and which starting again does not help."""

STOP_WITHIN_S = 5.0
"""Seconds in which a process ends after SIGINT or SIGTERM, whatever it is doing."""

GRACE_S = 5
"""Seconds that open requests may take to finish at shutdown; after twice that the process exits hard."""

ORPHAN_GRACE_S = 3.0
"""Seconds in which a process whose parent is gone may end in an orderly way."""

COLLECTOR_THRESHOLDS = (100, 0, 1_000_000_000)
"""New objects until the collector looks through them; collections of new objects until it looks through those
that survived one; and, in effect, never: a full collection. The first is low because it counts what was made
less what was freed, however old, and so hides new objects while old ones go."""


def exit_disk_full() -> NoReturn:
    """End this process with `DISK_FULL`.

    The log may be on the full disk too. What could not be written to it is given up: Python would try again
    at the end, and exit with 120 instead.
    """
    sys.stdout = sys.stderr = None
    raise SystemExit(DISK_FULL)


def try_lock(path: Path) -> IO[str] | None:
    """An open file that holds the lock of `path` until it is closed; None if another process holds it."""
    file = path.open("w", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


@contextmanager
def waited_lock(path: Path) -> Generator[None]:
    """Hold the lock of `path` in the block, once no other process holds it."""
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class ProcessId(NamedTuple):
    """A process, as no other will ever be named."""

    host: str
    pid: int
    started: int
    """In ticks since the machine started; 0 on a system that does not say."""

    @staticmethod
    def own() -> ProcessId:
        return ProcessId(socket.gethostname(), os.getpid(), _start_of(os.getpid()) or 0)

    def is_gone(self) -> bool:
        """Whether it has ended. One of another machine is taken to be at work."""
        return self.host == socket.gethostname() and _start_of(self.pid) != self.started


def _start_of(pid: int) -> int | None:
    """None for a process that has ended."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() or not _is_alive(pid) else 0
    return int(status.rpartition(")")[2].split()[19])  # After the name, which may hold spaces.


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_command(name: str, *arguments: str) -> list[str]:
    """The argv of a `tinkerscript` command as a child that ends with this process, which is to be the other
    end of its standard input."""
    return [sys.executable, "-m", "tinkerscript", name, *arguments, "--exit-with-parent"]


def shorten_collections() -> None:
    """Let the garbage collector look through new objects only, and never again through what survived.

    For a server that keeps millions of objects, and whose requests leave no reference cycles: a full
    collection stops its event loop for longer the more it keeps, and `bench/gateway.py` shows it as the
    slowest percent of the calls.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def collect_less_often() -> None:
    """Let the garbage collector wait for more new objects.

    An episode of an Inspect task makes thousands, which live until it ends. Looking through them as often as
    usual takes a sixth of its time.
    """
    gc.set_threshold(5_000, 20, 20)


def collect_everything() -> None:
    """Free what `shorten_collections` leaves: for a server that has just thrown away all that it kept."""
    gc.unfreeze()
    gc.collect()


def exit_hard_after(seconds: float, code: int = 1) -> None:
    """End this process with `code` after `seconds`, whatever it is doing then."""
    timer = threading.Timer(seconds, os._exit, args=(code,))
    timer.daemon = True
    timer.start()


def when_parent_ends(stop: Callable[[], object]) -> None:
    """Call `stop` on the running event loop when standard input, a pipe from the parent, closes.

    The process exits hard if it is still alive `ORPHAN_GRACE_S` seconds later.
    """
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()

    def watch() -> None:
        # Unbuffered: a thread that holds a buffer's lock would break the interpreter's shutdown.
        while os.read(stdin, 4096):
            pass
        exit_hard_after(ORPHAN_GRACE_S)
        with suppress(RuntimeError):  # The loop is closed: the process is ending already.
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_until_interrupted(work: Coroutine[Any, Any, int], *, exit_with_parent: bool = False) -> int:
    """Run `work`; returns its exit code, or 130 if a signal stopped it.

    SIGINT, SIGTERM and, on request, the parent's end cancel `work`, which cleans up before this returns. The
    process exits hard if that takes more than `STOP_WITHIN_S` seconds, and at the second signal at once.
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

        # Not the loop's own handlers: those wait for code that blocks the loop.
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
    """How a child process ended, from its return code."""
    if code == DISK_FULL:
        return os.strerror(code)
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def last_lines(log: Path, number: int = 8) -> str:
    """The last lines of a log, indented, for a message."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-number:]
    except OSError as error:
        lines = [f"({error})"]
    return "\n".join("    " + line for line in lines or ["(nothing)"])


@contextmanager
def without_garbage_collection() -> Generator[None]:
    """For a block that imports much: not looking through what stays saves a sixth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def stop_child(child: Process, grace_s: float) -> None:
    """Close the child's standard input, at which it should end; kill its process group after `grace_s`.

    The group is killed at once if this is cancelled. The child leads it, and is gone even when this raises.
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

"""`python -m tinkerscript.processes.with_parent PROGRAM ...`: run a program that ends when our parent does.

For programs that are not ours: the supervisor asks a child to stop by closing its standard input, which
happens too when the supervisor is killed. In a session of its own, which the supervisor gives it, what the
program has started ends as well, also when this process is killed: Ray kills what an actor has started, and
leaves what that has started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

PROGRAM_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""


def main(argv: list[str]) -> int:
    """Run `argv` until it ends or standard input closes; returns its exit code."""
    if os.getpgrp() == os.getpid():
        _end_the_group_after_this_process()
    program = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    stopped = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stopped.set()
        program.terminate()
        try:
            program.wait(PROGRAM_GRACE_S)
        except subprocess.TimeoutExpired:
            program.kill()

    threading.Thread(target=watch, daemon=True).start()
    code = program.wait()
    if stopped.is_set() and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # This process too: nobody reads its exit code any more.
    return code


def _end_the_group_after_this_process() -> None:
    """However this one ends: then its end of a pipe closes, which a process of the same group reads."""
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        return
    os.close(write)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.read(read, 1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

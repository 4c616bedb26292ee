"""`python -m tinkerscript.processes.tether PROGRAM ...`: a program that ends when its parent does.

For programs that are not ours: the supervisor asks a child to stop by closing its standard input, which
happens too when the supervisor is killed. In a session of its own, which the supervisor gives it, what the
program has started ends as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

STOP_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""


def main(argv: list[str]) -> int:
    """Run `argv` until it ends or standard input closes; returns its exit code."""
    program = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    stopped = threading.Event()

    def watch() -> None:
        while os.read(0, 1024):
            pass
        stopped.set()
        program.terminate()
        try:
            program.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            program.kill()

    threading.Thread(target=watch, daemon=True).start()
    code = program.wait()
    if stopped.is_set() and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # This process too: nobody reads its exit code any more.
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

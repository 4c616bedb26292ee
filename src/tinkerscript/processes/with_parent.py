"""`python -m tinkerscript.processes.with_parent PROGRAM ...` runs a program that ends with our parent.

The supervisor stops a child by closing its standard input, which also closes if the supervisor is killed. If
this process leads a session, the program's descendants end too, which Ray would leave.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

PROGRAM_GRACE_S = 2.0


def main(argv: list[str]) -> int:
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
        os.killpg(0, signal.SIGKILL)  # This ends us too.
    return code


def _end_the_group_after_this_process() -> None:
    # However we end, our end of the pipe closes, and the fork kills the group.
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

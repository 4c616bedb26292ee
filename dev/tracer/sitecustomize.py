"""Records which modules of `src/` are at work in this process, and when. Python imports it at its start.

`episode_trace.py` puts this folder on PYTHONPATH and names in the environment where records go and what to
record. Every process appends lines to a file of its own, `<kind> <nanoseconds> <file>`, on one clock:

    run       functions of this file run; again only after RESOLUTION_NS
    claim     the process asks for an episode
    publish   a function named `publish` of this file returns

A function is at work when it is called or resumed. What runs because a module is being imported is left out.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from inspect import CO_OPTIMIZED
from types import FrameType

RESOLUTION_NS = 1_000_000
CLAIM_PATH = "/claim_episode"
HTTPX = "httpx/_client.py"
HTTPX_SENDS = "send"
PUBLISHES = "publish"


class Recorder:
    """The profile function of every thread of a process."""

    def __init__(self, folder: str, src: str) -> None:
        self._path = f"{folder}/{os.getpid()}"
        self._src = src.rstrip("/") + "/"
        self._file = -1
        self._names: dict[str, str] = {}
        """Source file -> its name below `src`, HTTPX for httpx's client, and empty for any other."""

        self._last: dict[str, int] = {}

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        name = self._names.get(file)
        if name is None:
            name = self._names[file] = self._name(file)
        if not name or event not in ("call", "return"):
            return
        function, now = frame.f_code.co_name, time.monotonic_ns()
        if name == HTTPX:
            if event == "call" and function == HTTPX_SENDS and _path_of_request(frame).endswith(CLAIM_PATH):
                self._write("claim", now, name)
        elif event == "return":
            if function == PUBLISHES:
                self._write("publish", now, name)
        elif now - self._last.get(name, 0) > RESOLUTION_NS and _is_at_work(frame):
            self._last[name] = now
            self._write("run", now, name)

    def _name(self, file: str) -> str:
        if file.startswith(self._src):
            return file.removeprefix(self._src)
        return HTTPX if file.endswith(HTTPX) else ""

    def _write(self, kind: str, now: int, name: str) -> None:
        """At once: a process may be killed at the end of a run."""
        if self._file < 0:
            self._file = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.write(self._file, f"{kind} {now} {name}\n".encode())


def _path_of_request(frame: FrameType) -> str:
    request = frame.f_locals.get("request")
    return "" if request is None else request.url.path


def _is_at_work(frame: FrameType) -> bool:
    """Whether the frame is a function's, and not called by the body of a class or of an imported module."""
    caller: FrameType | None = frame
    while caller is not None:
        is_program = caller is not frame and caller.f_globals.get("__name__") == "__main__"
        if not caller.f_code.co_flags & CO_OPTIMIZED and not is_program:
            return False
        caller = caller.f_back
    return True


if folder := os.environ.get("EPISODE_TRACE"):
    Recorder(folder, os.environ["EPISODE_TRACE_SRC"]).install()

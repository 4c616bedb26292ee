"""Ends what a failed test leaves running."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from command_line import STARTED


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop().process
        if process.poll() is None:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.wait()
            psutil.wait_procs(family, timeout=20)

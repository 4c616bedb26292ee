"""An OpenEnv environment on a local server, for the tests of both ways to it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_S = 60.0


@pytest.fixture(scope="session")
def countdown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the server."""
    port_file = tmp_path_factory.mktemp("openenv") / "port"
    program = Path(__file__).parent / "countdown_server.py"
    process = subprocess.Popen([sys.executable, str(program), str(port_file)])
    deadline = time.monotonic() + START_S
    while not port_file.exists():
        assert process.poll() is None, "the environment's server ended"
        assert time.monotonic() < deadline, f"the environment's server took more than {START_S} s"
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port_file.read_text()}"
    process.terminate()
    process.wait()

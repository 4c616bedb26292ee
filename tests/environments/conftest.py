"""An OpenEnv environment on a local server, for the tests of both ways to it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def countdown() -> Iterator[str]:
    """The URL of the server."""
    program = Path(__file__).parent / "countdown_server.py"
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline()  # Empty if the server has ended.
        assert port, "the environment's server ended"
        yield f"http://127.0.0.1:{int(port)}"
        process.terminate()

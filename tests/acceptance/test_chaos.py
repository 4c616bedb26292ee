"""The short form of `make chaos`: every kind of process is killed among hostile clients; nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import ROOT

SHORT = {
    "CHAOS_EPISODES": "100",
    "CHAOS_WORKERS": "4",
    "CHAOS_KILLS": "2",
    "CHAOS_ALL_STATES": "no",
    "CHAOS_RESTARTS": "2",
}


FILES = [f"tests/chaos/{name}.py" for name in ("test_kills", "test_server_kills")]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_short_form_finds_no_fault(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", *FILES, "--basetemp", str(tmp_path / "t")]
    with (tmp_path / "output.txt").open("wb") as output:
        code = subprocess.call(command, cwd=ROOT, env=os.environ | SHORT, stdout=output, stderr=output)
    assert code == 0, (tmp_path / "output.txt").read_text()[-4000:]

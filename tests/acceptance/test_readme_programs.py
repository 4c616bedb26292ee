"""The README's first program, run as printed; its agent is in test_newcomer.py."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import ROOT, summary

PROGRAM, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


@pytest.mark.timeout(300)
def test_the_program_trains_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'before': " in done.stdout
    assert "'after': " in done.stdout
    assert summary(tmp_path)["train_episodes"] == 3 * 8 * 8

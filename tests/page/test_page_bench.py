"""The page's benchmark at a hundredth of its size: what does not depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from command_line import ROOT

FIRST_SCREEN_KB = 300
NODES = 5000
CEILING_MS = 20_000
"""Of a shared machine; the limits themselves are in docs/benchmarks.md."""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_large_run_stays_light() -> None:
    command = [sys.executable, ROOT / "bench" / "page.py", "--scale", "0.01", "--rounds", "1"]
    done = subprocess.run([*command, "--parts", "reader"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    decoder, text, found = json.JSONDecoder(), done.stdout, {}
    while text.strip():
        part, end = decoder.raw_decode(text.lstrip())
        found |= part
        text = text.lstrip()[end:]
    assert found["made"]["episodes"] == 10_000 + 11 * 40 + 1
    reader = found["reader"]
    assert reader["others"]["first screen, kB"] < FIRST_SCREEN_KB
    assert reader["most nodes"] <= NODES
    assert {name: each["ms"] for name, each in reader["screens"].items() if each["ms"] > CEILING_MS} == {}
    assert {"first screen", "step", "long episode", "all curves", "search, a word"} <= reader[
        "screens"
    ].keys()
    assert reader["others"]["rows after 'Show more'"] == 450

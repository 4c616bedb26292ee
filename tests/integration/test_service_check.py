"""What a user with a key runs against the Tinker service (`make service`) passes against our wire server."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wire_setup import KEY, wire_server

from tinkerscript.config import TINY_MODEL

ROOT = Path(__file__).parents[2]


def check(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/service"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)


def test_the_check_of_a_service_passes_here(tmp_path: Path) -> None:
    with wire_server(TINY_MODEL, tmp_path, name="tiny-served") as wire:
        done = check(
            os.environ
            | {
                "TINKER_API_KEY": KEY,
                "TINKER_BASE_URL": wire.url,
                "SERVICE_MODEL": "tiny-served",
                "SERVICE_FOLDER": str(TINY_MODEL),
            }
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_without_a_key_there_is_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all tests there are skipped (tests/service/conftest.py)."""
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "service"))
    assert importlib.import_module("service_target").target_here() is None

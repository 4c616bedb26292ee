"""`dev/install.py`: uv does what pip would do with its settings, or pip does it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import install

LISTED = """\
:env:.extra-index-url='https://env/simple'
:env:.disable-pip-version-check='1'
global.cert='/etc/ca.crt'
global.constraint='/etc/constraints.txt'
global.extra-index-url='file:///a/simple file:///b/simple'
global.find-links='\\n/wheels'
install.index-url='https://mirror/simple?a=b'
download.index-url='https://other/simple'
"""


def test_the_settings_of_pip_become_those_of_uv() -> None:
    made = install.for_uv(install.settings(LISTED))
    assert made is not None
    options, variables = made
    assert options[options.index("--default-index") + 1] == "https://mirror/simple?a=b"
    assert options.count("--index") == 1
    assert options[options.index("--index") + 1] == "https://env/simple", "the environment goes first"
    assert options[options.index("--find-links") + 1] == "/wheels"
    assert options[options.index("--constraint") + 1] == "/etc/constraints.txt"
    assert variables == {"SSL_CERT_FILE": "/etc/ca.crt"}


def test_several_values_become_several_options() -> None:
    made = install.for_uv({"extra-index-url": "file:///a/simple file:///b/simple"})
    assert made is not None
    assert [value for value in made[0] if value.startswith("file:")] == [
        "file:///a/simple",
        "file:///b/simple",
    ]


def test_a_setting_without_a_counterpart_is_left_to_pip() -> None:
    assert install.for_uv({"client-cert": "me.pem"}) is None


@pytest.mark.parametrize("code", [0, 1], ids=["uv installs", "uv fails"])
def test_pip_installs_what_uv_does_not(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        failed = code if command[0].endswith("uv") else 0
        return subprocess.CompletedProcess(command, failed, stdout="")

    (tmp_path / "uv").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["install.py", "--python", "there/python", "--no-deps", "a==1"])
    monkeypatch.setattr(install.subprocess, "run", run)
    assert install.main() == 0
    _, by_uv, *by_pip = ran
    assert by_uv[0] == str(tmp_path / "uv")
    assert by_uv[by_uv.index("--python") + 1] == "there/python"
    assert by_uv[-2:] == ["--no-deps", "a==1"]
    assert bool(by_pip) == bool(code)
    assert ("pip does" in capsys.readouterr().out) == bool(code)
    for command in by_pip:
        assert command[command.index("--python") + 1] == "there/python"
        assert command[-2:] == ["--no-deps", "a==1"]

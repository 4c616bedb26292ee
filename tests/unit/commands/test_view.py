"""`tinkerscript view`: what it refuses, and the browser that it opens."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tinkerscript.access_tokens import ADMIN_TOKEN
from tinkerscript.cli import CANNOT_RUN, app
from tinkerscript.commands.view import check_reach
from tinkerscript.errors import ConfigError


def test_a_folder_without_runs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in ([], ["."], ["nowhere"]):
        result = CliRunner().invoke(app, ["view", *arguments])
        assert result.exit_code == CANNOT_RUN
        assert result.stderr.startswith("error: ")
        assert "is not the folder of a run, and has none in it" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_other_machines_need_a_token() -> None:
    check_reach("127.0.0.1", {})
    check_reach("localhost", {})
    check_reach("0.0.0.0", {ADMIN_TOKEN: "sixteen-letters!"})
    with pytest.raises(ConfigError, match=f"{ADMIN_TOKEN} must be set in the environment"):
        check_reach("0.0.0.0", {})
    with pytest.raises(ConfigError, match="at least 16 characters, not 5"):
        check_reach("::", {ADMIN_TOKEN: "short"})


def test_a_browser_is_opened_and_its_absence_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinkerscript.dashboard.terminal import open_in_browser

    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or len(opened) == 1)
    printed: list[str] = []
    for _ in range(2):
        open_in_browser("http://here", printed.append)
        for thread in threading.enumerate():
            if thread.name == "browser":
                thread.join()
    assert opened == ["http://here"] * 2
    assert printed == ["no browser was found here; open http://here"]

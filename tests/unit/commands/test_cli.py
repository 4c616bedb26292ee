"""The command line: what it loads, how it fails, and with which exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import webbrowser
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from tinkerscript.access_tokens import ADMIN_TOKEN
from tinkerscript.addresses import listen
from tinkerscript.cli import CANNOT_RUN, app
from tinkerscript.client.settings import DEFAULT_SERVER_URL, local_server_url
from tinkerscript.commands.view import check_reach
from tinkerscript.errors import ConfigError, RequestRefusedError, WorkerError
from tinkerscript.workers import worker


def python(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_help_loads_typer_and_nothing_slow() -> None:
    shown = python(
        "import sys; from tinkerscript.cli import app; app(['--help'], standalone_mode=False);"
        "print(sorted({'rich', 'pydantic', 'httpx', 'asyncio', 'yaml', 'torch'} & set(sys.modules)))"
    )
    assert shown.returncode == 0, shown.stderr
    assert "worker Run a server's episodes on this machine." in " ".join(shown.stdout.split())
    assert shown.stdout.splitlines()[-1] == "[]"


def test_the_version_is_the_installed_one() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"tinkerscript {version('tinkerscript')}\n")


def test_the_keys_of_a_config_are_listed_where_there_are_no_docs() -> None:
    listed = CliRunner().invoke(app, ["config", "training.group"]).output
    assert listed.startswith("training.groups_per_step: ")
    assert "training.group_size: " in listed
    assert "training.steps" not in listed
    every = CliRunner().invoke(app, ["config"]).output
    assert "interchange_server.interchange_server_port: auto   (integer or auto)\n    HTTP port." in every
    assert CliRunner().invoke(app, ["config", "trainin.g"]).exit_code == CANNOT_RUN
    assert "docs/config.md" not in CliRunner().invoke(app, ["train", "--help"]).output


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        (["train", "x.yaml"], "yaml", "all"),
        (["engine", "--port", "0"], "torch", "all"),
        (["server", "--run-dir", "x"], "uvicorn", "server"),
    ],
)
def test_a_command_without_its_packages_names_the_extra(command: list[str], module: str, extra: str) -> None:
    absent = f"import sys; sys.modules[{module!r}] = None"
    run = python(f"{absent}; from tinkerscript.cli import app; app({command!r})")
    assert run.returncode == CANNOT_RUN, run.stderr
    assert run.stderr.endswith(f"error: this command needs {module}: pip install 'tinkerscript[{extra}]'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "give a CONFIG, or --resume RUN_DIR"),
        (["worker"], "give a worker either a script"),
        (["worker", "--task", "a.py@b", "--task", "a.py@b"], "give each task once"),
        (["serve", "x.yaml", "--checkpoint", "y"], "give no CONFIG and no --resume with it"),
        (["engine"], "give --port to serve Tinker's protocol, or --link"),
        (["server", "--run-dir", "/nowhere"], "/nowhere/config.yaml"),
    ],
)
def test_what_the_user_can_change_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == CANNOT_RUN
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_url_without_a_scheme_is_refused_by_name() -> None:
    for command in ("status --server localhost:1", "worker agent.py --server localhost:1"):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == CANNOT_RUN
        assert "must start with http:// or https://, got 'localhost:1'" in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["train", "serve"])
def test_port_says_where_the_server_of_a_config_listens(tmp_path: Path, command: str) -> None:
    """One that somebody else has is refused by its number; without `--port` a free one is taken."""
    (tmp_path / "run.yaml").write_text("engine: {model: tiny}\nworkers: {count: 0}\n")
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        words = [command, "run.yaml", "--port", port]
        run = python(f"from tinkerscript.cli import app; app({words!r})", tmp_path)
    assert run.returncode == CANNOT_RUN
    assert f"port {port} on 127.0.0.1 is in use" in run.stderr


def test_status_says_at_once_that_nothing_answers(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    began = time.monotonic()
    result = CliRunner().invoke(app, ["status", "--server", url])
    assert time.monotonic() - began < 20
    assert result.exit_code == 1
    assert f"no interchange server answers at {url}" in result.stderr


def test_a_run_is_found_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int
) -> None:
    """Whatever port its server has. Only a server of this user's on this machine: it gets the token."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TINKERSCRIPT_SERVER_URL", raising=False)
    run, url = tmp_path / "runs" / "latest", f"http://127.0.0.1:{unused_tcp_port}"
    run.mkdir(parents=True)

    def served(url: str, pid: int) -> None:
        (run / "server.json").write_text(json.dumps({"url": url, "pid": pid}))

    def said(command: str) -> str:
        return " ".join(CliRunner().invoke(app, command.split()).stderr.split())

    served(url, os.getpid())
    for command in ("status", "status runs/latest", "control failed --server runs/latest"):
        assert f"no interchange server answers at {url}: " in said(command), command
    asked: list[str] = []
    monkeypatch.setattr(worker, "worker_process", lambda options: asked.append(options.server_url) or 0)
    for command in ("worker a.py", "worker a.py --server runs/latest", "worker a.py --server http://a:1"):
        said(command)
    assert asked == [url, url, "http://a:1"]
    served("http://10.1.2.3:80", os.getpid())
    assert "names http://10.1.2.3:80; give that URL itself if you trust it" in said("status runs/latest")
    served(url, 2**30)
    assert "has had no interchange server" in said("control failed --server .")
    for command in ("status", "worker a.py"):
        refusal = "the interchange server of runs/latest does not run; name another with --server"
        assert refusal in said(command)
    assert len(asked) == 3, "nothing joins whatever has the default port"
    (run / "server.json").unlink()
    run.rmdir()
    assert local_server_url() == DEFAULT_SERVER_URL


def test_a_supervised_worker_is_restarted_for_a_servers_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def code(error: Exception, *options: str) -> int:
        monkeypatch.setattr(worker, "worker_process", Mock(side_effect=error))
        return CliRunner().invoke(app, ["worker", "agent.py", *options]).exit_code

    refused = RequestRefusedError(503, "busy")
    assert code(refused) == CANNOT_RUN
    assert code(refused, "--exit-with-parent") == 1
    assert code(WorkerError("no script"), "--exit-with-parent") == CANNOT_RUN


# `tinkerscript view`


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

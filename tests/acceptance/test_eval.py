"""`tinkerscript eval`: a task on a model through plain Inspect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import ROOT, start
from inspect_ai.log import list_eval_logs, read_eval_log_async

from tinkerscript.config import TINY_MODEL

ARITHMETIC = f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic"
GREEDY = ["--task-args", '{"split": "test"}', "--limit", "20", "--temperature", "0"]


@pytest.mark.timeout(400)
async def test_a_checkpoint_is_scored_and_the_log_is_an_ordinary_one(tmp_path: Path) -> None:
    command = start(tmp_path, "eval", ARITHMETIC, "--checkpoint", str(TINY_MODEL), *GREEDY)
    assert command.wait(seconds=300) == 0, command.text()
    assert re.search(r"exact\W+accuracy\W+1\.000", command.text())
    assert "20 samples scored, 0 failed" in command.text()
    (info,) = list_eval_logs(str(tmp_path / "logs"))
    log = await read_eval_log_async(info)
    assert (log.status, log.eval.task_args) == ("success", {"split": "test"})
    assert log.eval.model == "openai-api/tinkerscript/tiny"
    assert log.samples is not None
    assert log.samples[0].scores is not None
    assert [sample.output.completion for sample in log.samples] == [sample.target for sample in log.samples]


@pytest.mark.timeout(400)
def test_a_server_that_is_there_is_asked(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    server = start(tmp_path / "server", "serve", "--checkpoint", str(TINY_MODEL), "--port", "0")
    server.until(lambda: re.search(r"http://\S+/v1", server.text()), seconds=200)
    match = re.search(r"(http://\S+)/v1", server.text())
    assert match
    command = start(tmp_path, "eval", ARITHMETIC, "--server", match.group(1), *GREEDY)
    assert command.wait(seconds=200) == 0, command.text()
    assert "20 samples scored, 0 failed" in command.text()
    server.process.terminate()
    assert server.wait(seconds=60) == 130


@pytest.mark.timeout(400)
def test_what_cannot_be_evaluated_is_one_clear_line(tmp_path: Path) -> None:
    coding = f"{ROOT / 'examples' / 'coding_task.py'}@coding_task"
    for arguments, message in {
        (ARITHMETIC,): "give one of --checkpoint FOLDER and --server URL",
        ("nowhere.py@x", "--checkpoint", str(TINY_MODEL)): "there is no file nowhere.py",
        (ARITHMETIC, "--checkpoint", str(tmp_path)): "has no config.json",
        (ARITHMETIC, "--server", "http://127.0.0.1:9"): "no model server answers at http://127.0.0.1:9/v1",
        (coding, "--checkpoint", str(TINY_MODEL), "--sandbox", "nothing"): "nothing",
    }.items():
        command = start(tmp_path, "eval", *arguments)
        assert command.wait(seconds=120) == 2, command.text()
        assert message in command.text()
        assert "Traceback" not in command.text()

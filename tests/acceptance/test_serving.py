"""A trained model served as an OpenAI endpoint, and clients of every kind against it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from inspect_ai.log import list_eval_logs, read_eval_log_async

from command_line import ROOT, start
from tinkerscript.model_folder import TINY_MODEL

pytestmark = pytest.mark.xdist_group("serving")
"""One server serves all of them."""

TOKEN = "secret"
KEY = "the API key is TINKERSCRIPT_CLIENT_TOKEN"
SERVING = re.compile(rf"^serving 'tiny' at (http://\S+/v1) \({KEY}\)$", re.MULTILINE)
ARITHMETIC = f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic"
GREEDY = ["--task-args", '{"split": "test"}', "--limit", "20", "--temperature", "0"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    env = {**os.environ, "TINKERSCRIPT_CLIENT_TOKEN": TOKEN}
    folder = tmp_path_factory.mktemp("served")
    command = start(folder, "serve", "--checkpoint", str(TINY_MODEL), "--port", "0", env=env, lasts=True)
    command.until(lambda: SERVING.search(command.text()))
    match = SERVING.search(command.text())
    assert match
    url = match[1].removesuffix("/v1")
    status = httpx.get(f"{url}/get_engine_status", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert status["engine_status"] == "ENGINE.ROLLING", "the URL is printed once it can be used"
    assert status["policy_version"] == -1, "no run published these weights"
    yield match[1]
    family = command.family()
    command.process.terminate()
    assert command.wait(seconds=30) == 130
    assert all(not process.is_running() for process in family)


def test_a_checkpoint_answers_as_openai_does(served: str) -> None:
    client = openai.OpenAI(base_url=served, api_key=TOKEN, timeout=60)
    assert "tiny" in [model.id for model in client.models.list()]
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "What is 23+45?"}], temperature=0
    )
    assert reply.choices[0].message.content == "68"


def test_a_key_is_needed_where_one_is_set(served: str) -> None:
    headers = {"Authorization": "Bearer wrong"}
    reply = httpx.get(f"{served}/models", headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert httpx.get(f"{served}/models", headers=headers).status_code == 200


def test_inspect_evaluates_the_task_with_a_served_model(served: str, tmp_path: Path) -> None:
    """The demo task under plain `inspect eval`, with any model."""
    env = {**os.environ, "TINY_BASE_URL": served, "TINY_API_KEY": TOKEN}
    inspect = Path(sys.executable).parent / "inspect"
    task = ROOT / "examples" / "arithmetic.py"
    options = ["--model", "openai-api/tiny/tiny", "-T", "split=test", "--limit", "20", "--temperature", "0"]
    done = subprocess.run(
        [inspect, "eval", task.name, *options, "--log-dir", tmp_path / "logs", "--display", "plain"],
        cwd=task.parent,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "logs").glob("*.eval"))) == 1


def test_eval_asks_a_server_that_is_there(served: str, tmp_path: Path) -> None:
    env = {**os.environ, "TINKERSCRIPT_CLIENT_TOKEN": TOKEN}
    command = start(tmp_path, "eval", ARITHMETIC, "--server", served, *GREEDY, env=env)
    assert command.wait(seconds=200) == 0, command.text()
    assert "20 samples scored, 0 failed" in command.text()


UNSCORED = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import accuracy, scorer
from inspect_ai.solver import generate

@scorer(metrics=[accuracy()])
def broken():
    async def score(state, target):
        raise ValueError("no scale for this answer")
    return score

@task
def unscored():
    return Task(dataset=[Sample(id=i, input="1+1=") for i in (1, 2)], solver=[generate()], scorer=broken())
"""


def test_an_eval_whose_samples_fail_says_how_many_and_why(served: str, tmp_path: Path) -> None:
    (tmp_path / "unscored.py").write_text(UNSCORED)
    env = {**os.environ, "TINKERSCRIPT_CLIENT_TOKEN": TOKEN}
    command = start(tmp_path, "eval", "unscored.py@unscored", "--epochs", "1", "--server", served, env=env)
    assert command.wait(seconds=200) == 1
    assert "unscored: 0 samples scored, 2 failed" in command.text()
    assert "no scale for this answer" in command.text().split("the first failure: sample ")[1]


@pytest.mark.timeout(240)
async def test_eval_serves_a_checkpoint_and_leaves_an_ordinary_log(tmp_path: Path) -> None:
    command = start(tmp_path, "eval", ARITHMETIC, "--checkpoint", str(TINY_MODEL), *GREEDY)
    assert command.wait(seconds=200) == 0, command.text()
    assert re.search(r"exact\W+mean\W+1\.000", command.text())
    assert "20 samples scored, 0 failed" in command.text()
    (info,) = list_eval_logs(str(tmp_path / "logs"))
    log = await read_eval_log_async(info)
    assert (log.status, log.eval.task_args) == ("success", {"split": "test"})
    assert log.eval.model == "openai-api/tinkerscript/tiny"
    assert log.samples is not None
    assert log.samples[0].scores is not None
    assert [sample.output.completion for sample in log.samples] == [sample.target for sample in log.samples]

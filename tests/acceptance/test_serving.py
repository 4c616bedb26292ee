"""A trained model served as an OpenAI endpoint, and evaluated."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import openai
import pytest
from inspect_ai.log import list_eval_logs, read_eval_log_async

from command_line import ROOT, start
from tinkerscript.model_folder import TINY_MODEL

TOKEN = "secret"
KEY = "the API key is TINKERSCRIPT_CLIENT_TOKEN"
SERVING = re.compile(rf"^serving 'tiny' at (http://\S+)/v1 \({KEY}\)$", re.MULTILINE)
ARITHMETIC = f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic"
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


@pytest.mark.timeout(400)
def test_a_checkpoint_answers_as_openai_does_and_eval_asks_it(tmp_path: Path) -> None:
    """The samples of the evaluation fail: it says how many, and why."""
    env = {**os.environ, "TINKERSCRIPT_CLIENT_TOKEN": TOKEN}
    served = start(tmp_path, "serve", "--checkpoint", str(TINY_MODEL), "--port", "0", env=env)
    served.until(lambda: SERVING.search(served.text()))
    (url,) = SERVING.findall(served.text())
    status = httpx.get(f"{url}/get_engine_status", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert status["engine_status"] == "ENGINE.ROLLING", "the URL is printed once it can be used"
    assert status["policy_version"] == -1, "no run published these weights"
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, timeout=60)
    assert "tiny" in [model.id for model in client.models.list()]
    reply = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "What is 23+45?"}], temperature=0
    )
    assert reply.choices[0].message.content == "68"
    with pytest.raises(openai.AuthenticationError) as refused:
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    assert refused.value.code == "invalid_api_key"
    (tmp_path / "unscored.py").write_text(UNSCORED)
    arguments = ("eval", "unscored.py@unscored", "--epochs", "1", "--server", f"{url}/v1")
    command = start(tmp_path, *arguments, env=env, output="eval.txt")
    assert command.wait(seconds=200) == 1
    assert "unscored: 0 samples scored, 2 failed" in command.text()
    assert "no scale for this answer" in command.text().split("the first failure: sample ")[1]
    family = served.family()
    served.process.terminate()
    assert served.wait(seconds=30) == 130
    assert all(not process.is_running() for process in family)


@pytest.mark.timeout(240)
async def test_eval_serves_a_checkpoint_and_leaves_an_ordinary_log(tmp_path: Path) -> None:
    greedy = ["--task-args", '{"split": "test"}', "--limit", "20", "--temperature", "0"]
    command = start(tmp_path, "eval", ARITHMETIC, "--checkpoint", str(TINY_MODEL), *greedy)
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

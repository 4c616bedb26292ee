"""The server by itself: clients feed it samples, a trainer is started over HTTP; both go and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import psutil
import pytest
import yaml

from command_line import Command, start
from run_ledger import ask, counted_calls
from tinkerscript.client import Episode, TinkerScriptClient
from tinkerscript.protocol import EngineStatusResponse

GROUP_SIZE = 4
CONFIG: dict[str, Any] = {
    "experiment_dir": "run",
    "interchange_server": {"interchange_server_port": 0},
    "engine": {"model": "tiny"},
    "training": {
        "steps": 1000,
        "groups_per_step": 2,
        "group_size": GROUP_SIZE,
        "checkpoint_every": 1,
        "batch_rule": "groups",
    },
    "evaluation": {"episodes": 0},
    "workers": {"count": 0},
    "sampling": {"max_tokens": 16},
}
"""No task: the samples are the clients'."""


class Served:
    """`tinkerscript serve`, and what its users do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        self.command = self.serve("config.yaml")

    def serve(self, *arguments: str) -> Command:
        command = start(self.folder, "serve", *arguments)
        command.until(lambda: "interchange server at" in command.text())
        return command

    def resume(self) -> None:
        self.command = self.serve("--resume", "run")

    def stop(self) -> None:
        self.command.process.terminate()
        assert self.command.wait(seconds=30) == 130

    def kill(self) -> None:
        """SIGKILL to `tinkerscript serve`; its server and the trainer that it started end by themselves."""
        family = self.command.family()
        self.command.process.kill()
        self.command.process.wait()
        gone, alive = psutil.wait_procs(family, timeout=30)
        assert len(gone) >= 2
        assert not alive, [process.cmdline() for process in alive]

    @property
    def url(self) -> str:
        return json.loads((self.run / "server.json").read_text())["url"]

    def post(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body or {}, timeout=30)

    def status(self) -> EngineStatusResponse:
        reply = httpx.get(f"{self.url}/get_engine_status", timeout=30)
        return EngineStatusResponse.model_validate_json(reply.content)

    def start_engine(self) -> None:
        config = (self.folder / "config.yaml").read_text()
        assert self.post("/sync_train_config", {"yaml_as_string": config}).json()["success"]
        started = self.post("/start_engine").json()
        assert started["success"], started
        self.command.until(lambda: self.status().engine_status == "ENGINE.ROLLING")

    def stop_engine(self) -> None:
        assert self.post("/stop_engine").json()["success"]
        self.command.until(lambda: self.status().engine_status == "ENGINE.OFFLINE")


def asked(episode: Episode, *messages: dict[str, str]) -> str:
    """What the model says to `messages`, through the ordinary OpenAI client."""
    with openai.OpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as model:
        reply = model.chat.completions.create(model="policy", messages=cast("Any", messages))
    return reply.choices[0].message.content or ""


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


SCRIPT = """
import openai


async def rollout(episode):
    async with openai.AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as model:
        question = {"role": "user", "content": f"What is {episode.payload['a']}+1?"}
        await model.chat.completions.create(model="policy", messages=[question])
    return int(episode.episode_uuid[-1], 16) / 16
"""


@contextmanager
def teacher(served: Served) -> Iterator[TinkerScriptClient]:
    """Who registers samples, and a worker for them, which stays while servers and trainers come and go."""
    (served.folder / "agent.py").write_text(SCRIPT)
    arguments = ("worker", "agent.py", "--server", served.url, "--pool", "teacher")
    command = start(served.folder, *arguments, output="worker.txt")
    with TinkerScriptClient(served.url, client_uuid="teacher") as client:
        yield client
    command.process.terminate()
    assert command.wait(seconds=30) == 130, command.text()


@pytest.mark.timeout(300)
def test_a_server_fed_by_clients_trains_stops_dies_and_goes_on(tmp_path: Path) -> None:
    served = Served(tmp_path)
    assert served.post("/stop_engine").status_code == 409
    refused = served.post("/start_engine")
    assert "POST /sync_train_config first" in refused.json()["failure_reason"]
    served.start_engine()
    assert "a trainer is connected already" in served.post("/start_engine").json()["failure_reason"]
    with teacher(served) as client:
        for number in range(4):
            client.register_episode({"a": number}, task_id=f"sum-{number}", group_size=GROUP_SIZE)
        served.command.until(lambda: served.status().global_step >= 2)
        served.stop_engine()
        again = "tinkerscript train run/synced_config.yaml --join run"
        served.command.until(lambda: again in (served.run / "logs" / "trainer.log").read_text())
        served.start_engine()
        spoken = a_conversation_goes_on_when_the_server_comes_back(served)
        for number in range(2):
            task = f"sum-{number}"
            client.register_episode({"a": number}, task_id=task, group_size=GROUP_SIZE, round="second")
        served.command.until(lambda: served.status().global_step >= 3)
    served.stop_engine()
    assert len(ask(served.run, "SELECT step FROM steps")) == 3
    twice = "SELECT episode FROM trained WHERE undone = 0 GROUP BY episode HAVING count(*) > 1"
    assert ask(served.run, twice) == []
    first, second = counted_calls(served.run)[spoken]
    assert second.parent_id == first.call_id, "one sequence"
    served.stop()


def a_conversation_goes_on_when_the_server_comes_back(served: Served) -> str:
    """Same key, same claim, same sequence: the second server restores what the first one recorded."""
    with TinkerScriptClient(served.url, client_uuid="speaker") as client:
        client.register_episode({"a": 2}, task_id="talk", group_size=GROUP_SIZE)
        episode = client.begin_episode(pool=client.pool)
        question = says("user", "What is 2+2?")
        answer = asked(episode, question)
        served.kill()
        served.resume()
        served.start_engine()
        asked(episode, question, says("assistant", answer), says("user", "What is 3+3?"))
        client.end_episode(episode, reward=1.0)
    return episode.episode_uuid

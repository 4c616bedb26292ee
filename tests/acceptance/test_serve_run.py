"""The server by itself: clients feed it samples, a trainer is started over HTTP; both go and come back."""

from __future__ import annotations

import json
import threading
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

    def steps(self) -> int:
        return len(ask(self.run, "SELECT step FROM steps"))


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def asked(episode: Episode, *messages: dict[str, str]) -> str:
    """What the model says to `messages`, through the ordinary OpenAI client."""
    with openai.OpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as model:
        reply = model.chat.completions.create(model="policy", messages=cast("Any", messages))
    return reply.choices[0].message.content or ""


def says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@contextmanager
def feeding(url: str) -> Iterator[None]:
    """A user's program in the background: its own samples, its own agent, its own reward."""
    stop, failures = threading.Event(), list[BaseException]()

    def program() -> None:
        try:
            with TinkerScriptClient(url, client_uuid="teacher") as client:
                number = 0
                while not stop.is_set():
                    number += 1
                    name = f"sum-{number}"
                    client.register_episode({"a": number % 50}, task_id=name, group_size=GROUP_SIZE)
                    for place in range(GROUP_SIZE):
                        episode = client.begin_episode(pool=client.pool)
                        with episode:
                            question = f"What is {episode.payload['a']}+1?"
                            asked(episode, says("user", question))
                            client.end_episode(episode, reward=float(place % 2))
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=program)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=60)
    assert not thread.is_alive()
    assert not failures


SCRIPT = """
import openai


async def rollout(episode):
    async with openai.AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as model:
        question = {"role": "user", "content": f"What is {episode.payload['a']}+1?"}
        await model.chat.completions.create(model="policy", messages=[question])
    return int(episode.episode_uuid[-1], 16) / 16
"""


@contextmanager
def worker(served: Served) -> Iterator[None]:
    """The ready-made worker, for the teacher's own samples."""
    folder = served.folder / "worker"
    folder.mkdir()
    (folder / "agent.py").write_text(SCRIPT)
    command = start(folder, "worker", "agent.py", "--server", served.url, "--pool", "teacher")
    yield
    command.process.terminate()
    assert command.wait(seconds=30) == 130, command.text()


@pytest.mark.timeout(300)
def test_a_server_fed_by_clients_trains_stops_dies_and_goes_on(served: Served) -> None:
    assert served.post("/stop_engine").status_code == 409
    refused = served.post("/start_engine")
    assert "POST /sync_train_config first" in refused.json()["failure_reason"]
    served.start_engine()
    assert "a trainer is connected already" in served.post("/start_engine").json()["failure_reason"]
    with feeding(served.url):
        served.command.until(lambda: served.status().global_step >= 2)
    served.stop_engine()
    before = served.steps()
    assert before >= 2
    again = "tinkerscript train run/synced_config.yaml --join run"
    served.command.until(lambda: again in (served.run / "logs" / "trainer.log").read_text())
    served.start_engine()
    spoken = a_conversation_goes_on_when_the_server_comes_back(served)
    with worker(served), TinkerScriptClient(served.url, client_uuid="teacher") as teacher:
        for number in range(2):
            task = f"sum-{number}"
            teacher.register_episode({"a": number}, task_id=task, group_size=GROUP_SIZE, round="second")
        served.command.until(lambda: served.status().global_step >= before + 1)
    served.stop_engine()
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

"""A checkpoint to chat with: real processes that come when asked, and go when nobody needs them."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from command_line import end_all, named, start
from interchange_helpers import eventually, until
from record_helpers import episode
from tinkerscript.errors import NotRecordedError
from tinkerscript.model_folder import model_folder
from tinkerscript.page.checkpoint_server import CheckpointServer, checkpoints
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter

pytestmark = pytest.mark.timeout(300)

LOAD_S = 240.0
"""A model takes seconds to load; on a machine that does much else, more."""

ASK: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What is 2+2?"}],
    "max_tokens": 4,
    "logprobs": True,
    "return_token_ids": True,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two good checkpoints and a broken one."""
    folder = tmp_path / "run"
    for name in ("step_0001", "final"):
        shutil.copytree(model_folder("tiny"), folder / "checkpoints" / name)
    broken = folder / "checkpoints" / "step_0002"
    shutil.copytree(model_folder("tiny"), broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    (folder / "checkpoints" / "draft").mkdir()
    with RecordWriter(folder / RECORD_FILE) as record:
        record.status(state="finished", model="tiny", began=1.0, steps=2, step=2)
        record.episode(episode("e-1"))
    return folder


@pytest.fixture
async def server() -> AsyncGenerator[CheckpointServer]:
    made = CheckpointServer()
    yield made
    await made.end()


@pytest.fixture
def commands() -> Iterator[None]:
    yield
    end_all()


async def reaches(server: CheckpointServer, state: str) -> None:
    async def is_there() -> bool:
        assert server.loaded.state in ("loading", state), server.loaded.failure
        return server.loaded.state == state

    await eventually(is_there, f"the state {state}", deadline_s=LOAD_S)


def serving(run: Path) -> list[psutil.Process]:
    """The processes of checkpoints of this run."""
    return named(psutil.Process().children(recursive=True), f"--checkpoint {run}/checkpoints")


def test_checkpoints_are_folders_with_a_model_newest_first(run: Path) -> None:
    found = {each.name: each for each in checkpoints(run)}
    assert found.keys() == {"final", "step_0001", "step_0002"}
    assert [found[name].step for name in ("final", "step_0001", "step_0002")] == [None, 1, 2]
    weights = model_folder("tiny") / "model.safetensors"
    assert (found["final"].size_bytes, found["final"].is_adapter) == (weights.stat().st_size, False)
    times = [each.time for each in checkpoints(run)]
    assert times == sorted(times, reverse=True)
    assert checkpoints(run.parent) == []


async def test_a_checkpoint_is_loaded_asked_and_replaced(server: CheckpointServer, run: Path) -> None:
    with pytest.raises(NotRecordedError, match="has no checkpoint 'draft'; it has"):
        await server.load("one", run, "draft")
    with pytest.raises(NotRecordedError, match="is not loaded: load it first"):
        await server.chat("one", "final", ASK)
    both = await asyncio.gather(*(server.load("one", run, "final") for _ in range(2)))
    assert {(each.state, each.name) for each in both} == {("loading", "final")}
    await reaches(server, "ready")
    assert len(serving(run)) == 2, "`serve`, and the engine behind it"
    reply = await server.chat("one", "final", ASK)
    (choice,) = reply["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
    assert server.loaded.ends_in_s == pytest.approx(600, abs=60)
    with pytest.raises(NotRecordedError, match=r"refuses: .*temperature"):
        await server.chat("one", "final", {**ASK, "temperature": "warm"})
    with pytest.raises(NotRecordedError, match="'final' of two is not loaded"):
        await server.chat("two", "final", ASK)
    assert (await server.load("one", run, "step_0001")).name == "step_0001"
    assert not [each for each in serving(run) if "final" in " ".join(each.cmdline())], "one at a time"
    await server.end()
    assert server.loaded.state == "none"
    assert not serving(run)


async def test_a_checkpoint_that_cannot_be_loaded_says_why(server: CheckpointServer, run: Path) -> None:
    await server.load("one", run, "step_0002")
    await reaches(server, "failed")
    assert "the model ended (exit code" in server.loaded.failure
    assert "Error while deserializing header" in server.loaded.failure
    await until(lambda: not serving(run), "the end of the broken model")
    assert (await server.load("one", run, "step_0002")).state == "loading", "it can be tried again"


async def test_a_checkpoint_ends_when_nobody_uses_it(run: Path) -> None:
    server = CheckpointServer(idle_s=0.5)
    await server.load("one", run, "final")
    await reaches(server, "ready")
    await until(lambda: server.loaded.state == "none", "its end")
    await until(lambda: not serving(run), "the end of its processes")


async def test_no_checkpoint_survives_the_page(run: Path, commands: None) -> None:
    command = start(run.parent, "view", "run", "--port", "0")
    command.until(lambda: "\n" in command.text())
    async with httpx.AsyncClient(base_url=command.text().strip(), timeout=120) as http:
        for path in ("runs/run/checkpoints/..%2Ffinal/load", "runs/run/checkpoints/draft/load"):
            assert (await http.post(f"/api/{path}")).status_code == 404
        assert (await http.post("/api/runs/run/checkpoints/final/load")).json()["state"] == "loading"

        async def is_ready() -> bool:
            loaded = (await http.get("/api/loaded-checkpoint")).json()
            assert loaded["state"] in ("loading", "ready"), loaded["failure"]
            return loaded["state"] == "ready"

        await eventually(is_ready, "the model", deadline_s=LOAD_S)
        body = {"messages": ASK["messages"], "checkpoint": "final"}
        chat = await http.post("/api/runs/run/chat", json=body)
        assert (chat.status_code, bool(chat.json()["tokens"])) == (200, True), chat.text
        actions = [each["action"] for each in (await http.get("/api/runs/run/audit")).json()]
        assert actions == ["load checkpoint final"]
    loaded = serving(run)
    assert loaded
    command.process.kill()
    await until(lambda: not any(each.is_running() for each in loaded), "the end of the model")

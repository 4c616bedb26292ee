"""Programs of the first protocol version, unchanged on loopback: plain HTTP by its published interface.

`FirstVersion` sends what that client sends and reads what it reads: no token, no key but for the model, no
attempt. Its messages are strict where that client's are: a field that is missing is an error there.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from interchange_helpers import collect, new_episodes
from interchange_setup import Setup
from tinkerscript.trainer_link.messages import EpisodeAccepted


class Claimed(BaseModel):
    success: bool
    client_uuid: str
    episode_uuid: str
    openai_base_url: str
    openai_api_key: str
    fail_cause: str


class Status(BaseModel):
    episode_uuid: str
    client_uuid: str
    episode_status: str
    openai_base_url: str
    openai_api_key: str
    zmq_listen_result_addr: str
    latest_activity_timestamp: float
    allow_discard_timeout: float


class FirstVersion:
    """The client of the first version, with its names."""

    def __init__(self, server_url: str) -> None:
        self.client_uuid = str(uuid.uuid4())
        self._http = httpx.Client(base_url=server_url, timeout=30)

    def post(self, path: str, **body: Any) -> Any:
        reply = self._http.post(path, json=body)
        reply.raise_for_status()
        return reply.json()

    def try_begin_episode(self, **asked: Any) -> Claimed:
        asked = {"episode_type": "train"} | asked
        if "discard_episode_timeout" not in asked:  # The later name of the same.
            asked = {"allow_discard_timeout": 60} | asked
        return Claimed.model_validate(self.post("/claim_episode", client_uuid=self.client_uuid, **asked))

    def begin_episode(self, **asked: Any) -> Claimed:
        """Until there is one; the real client sleeps five seconds in between."""
        while not (claimed := self.try_begin_episode(**asked)).success:
            assert "No available episodes to claim." in claimed.fail_cause
        return claimed

    def chat(self, claimed: Claimed, *texts: str) -> str:
        messages = list[dict[str, str]]()
        for text in texts:
            messages.append({"role": "user", "content": text})
            reply = httpx.post(
                f"{claimed.openai_base_url}/chat/completions",
                json={"model": "fill_whatever_model", "messages": messages},
                headers={"Authorization": f"Bearer {claimed.openai_api_key}"},
            )
            messages.append(reply.raise_for_status().json()["choices"][0]["message"])
        return messages[-1]["content"]

    def end_episode(self, episode_uuid: str, task_id: str = "", **workflow_output: Any) -> bool:
        names = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid, "task_id": task_id}
        return self.post("/end_episode", workflow_output=workflow_output, **names)["success"]

    def abort_episode(self, episode_uuid: str) -> bool:
        """As its later clients do: the body of an end."""
        output = {"reward": 0.0, "is_success": None, "metadata": {}, "log_metrics": {}}
        names = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid, "task_id": ""}
        return self.post("/abort_episode", workflow_output=output, **names)["success"]

    def can_continue_episode(self, episode_uuid: str) -> bool:
        names = {"client_uuid": self.client_uuid, "episode_uuid": episode_uuid}
        return self.post("/can_continue_episode", **names)["can_continue"]

    def get_episode_buffer(self) -> list[Status]:
        return [Status.model_validate(each) for each in self.post("/get_episode_buffer")["buffer"]]

    def get_engine_status(self) -> str:
        return self._http.get("/get_engine_status").raise_for_status().json()["engine_status"]

    def close(self) -> None:
        self._http.close()


METRICS = {"turns": [1, 2, 3], "score": {"fuzzy": [0.5, 1.0]}}
"""As that client sends them: they lose no reward."""


async def accepted(setup: Setup, number: int) -> dict[str, EpisodeAccepted]:
    found = await collect(setup.link, number)
    return {uuid: each for uuid, each in found.items() if isinstance(each, EpisodeAccepted)}


async def test_two_tasks_do_not_land_in_one_group(setup: Setup) -> None:
    """Its programs may choose tasks themselves, and say which in `task_id`."""
    await setup.link.register(new_episodes(*"abc"))

    def program() -> str:
        client = FirstVersion(setup.url)
        first, second, third = (client.begin_episode() for _ in range(3))
        assert client.end_episode(first.episode_uuid, "sum-1", reward=1.0)
        assert client.end_episode(second.episode_uuid, "sum-1", reward=0.0)
        with pytest.raises(httpx.HTTPStatusError) as refused:
            client.end_episode(third.episode_uuid, "sum-2", reward=0.0)
        client.close()
        assert refused.value.response.status_code == 409
        return refused.value.response.json()["failure_reason"]

    reason = await asyncio.to_thread(program)
    assert "the group 'g' has a result of the task 'sum-1'" in reason
    assert {*await accepted(setup, 2)} == {"a", "b"}


async def test_the_demo_trains_on_everything_that_the_trainer_registered(setup: Setup) -> None:
    """The loop of the published example: begin, chat with any model name, compute a reward, end."""
    await setup.link.register(new_episodes(*"abcdef"))

    def demo() -> list[float]:
        client, rewards = FirstVersion(setup.url), list[float]()
        assert client.get_engine_status() == "ENGINE.ROLLING"
        for number in range(3):
            claimed = client.begin_episode(episode_type="default" if number == 0 else "train")
            answer = client.chat(claimed, "What is 1+1?", "Are you sure?")
            assert client.can_continue_episode(claimed.episode_uuid)
            rewards.append(float(number))
            assert client.end_episode(
                claimed.episode_uuid,
                reward=[0.25, rewards[-1]],
                is_success=number > 0,
                metadata={"answer": answer},
                log_metrics=METRICS,
            )
        client.close()
        return rewards

    told = await asyncio.gather(asyncio.to_thread(demo), asyncio.to_thread(demo))
    outcomes = await accepted(setup, 6)
    assert outcomes.keys() == set("abcdef")
    assert sorted(each.reward - 0.25 for each in outcomes.values()) == sorted([*told[0], *told[1]])
    assert all(len(each.calls) == 2 for each in outcomes.values())
    assert all(each.is_success is (each.reward > 0.25) for each in outcomes.values())
    assert all(each.log_metrics == {"turns": 2, "score/fuzzy": 0.75} for each in outcomes.values())


async def test_a_lone_program_that_gives_up_an_episode_is_given_it_again(setup: Setup) -> None:
    """Its rollout raised, it told nobody or gave no reason; what still comes of it does not count."""
    await setup.link.register(new_episodes("e"))

    def lone() -> None:
        client = FirstVersion(setup.url)
        aborted = client.begin_episode()
        assert client.abort_episode(aborted.episode_uuid)
        abandoned = client.begin_episode(discard_episode_timeout=0.2)
        again = client.begin_episode()
        for lost in (aborted, abandoned):
            assert lost.episode_uuid != again.episode_uuid
            assert not client.can_continue_episode(lost.episode_uuid)
            with pytest.raises(httpx.HTTPStatusError, match="409"):
                client.end_episode(lost.episode_uuid, reward=9.0)
            with pytest.raises(httpx.HTTPStatusError, match="409"):
                client.chat(lost, "late")
        client.chat(again, "1+1")
        for _ in range(2):
            assert client.end_episode(again.episode_uuid, reward=0.5), "repeated, as after a lost reply"
        client.close()

    await asyncio.to_thread(lone)
    outcome = (await accepted(setup, 1))["e"]
    assert (outcome.reward, outcome.attempt, len(outcome.calls)) == (0.5, 3, 1)
    assert [failure["kind"] for failure in outcome.retries] == ["aborted", "lease_expired"]


async def test_a_program_registers_its_own_and_reads_the_buffer(setup: Setup) -> None:
    """With the four fields of the document, two of them for services that this server replaces."""

    def program() -> list[Status]:
        client = FirstVersion(setup.url)
        addresses = {
            "openai_base_url": "http://vllm/v1",
            "openai_api_key": "k",
            "zmq_listen_result_addr": "ipc://x",
        }
        for name in ("mine", "waiting"):
            assert client.post("/register_episode", episode_uuid=name, **addresses)["success"]
        claimed = client.begin_episode(allow_discard_timeout=45)
        assert claimed.openai_base_url.startswith(setup.url)
        client.chat(claimed, "1+1")
        seen = client.get_episode_buffer()
        client.end_episode(claimed.episode_uuid, reward=1.0)
        client.close()
        return seen

    first, second = await asyncio.to_thread(program)
    assert (first.episode_uuid, first.episode_status, first.allow_discard_timeout) == (
        "mine",
        "claimed",
        45.0,
    )
    assert (second.episode_status, second.openai_api_key) == ("registered", "")
    assert isinstance((await collect(setup.link, 1))["mine"], EpisodeAccepted)

"""A server with several gateway processes, over HTTP: claims, calls, kills, and wrong addresses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from gated_sampler import GatedSampler

from interchange_helpers import collect, consumed, new_episodes, run_config, until
from interchange_setup import OUTPUT, Setup, serving
from tinkerscript.addresses import bind_gateways
from tinkerscript.errors import ConfigError
from tinkerscript.protocol import ClaimEpisodeResponse
from tinkerscript.rollouts.call import full_prompts
from tinkerscript.server.app import SECRET_FILE
from tinkerscript.trainer_link.messages import EpisodeAccepted

PROCESSES = 2
EPISODES = 8
"""Of each test."""

LONG = "The sea is wide. " * 40_000
"""More than one read of a socket brings."""

WAIT_S = 60.0
WAITED_S = 0.3
"""That calls wait for a sample."""

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group(
        "gateway processes"
    ),  # One server for most of the tests: its processes take seconds.
]


@dataclass
class Agents:
    """The episodes of a server with several processes, all claimed."""

    setup: Setup
    sampler: GatedSampler
    claims: list[ClaimEpisodeResponse]
    over: bool = False
    """Whether the trainer has their outcomes."""

    def of(self, number: int) -> list[ClaimEpisodeResponse]:
        """The claims that a process owns."""
        return [claim for claim in self.claims if claim.openai_base_url.endswith(f"/g/{number}/v1")]

    async def ask(self, claim: ClaimEpisodeResponse, messages: list[Any], **more: Any) -> httpx.Response:
        url = more.pop("url", claim.openai_base_url)
        return await self.setup.http.post(
            f"{url}/chat/completions",
            json={"model": "policy", "messages": messages} | more,
            headers={"Authorization": f"Bearer {claim.openai_api_key}"},
        )

    async def turn(self, claim: ClaimEpisodeResponse, messages: list[Any]) -> None:
        """One turn of a conversation, tried again like OpenAI's client does when the connection breaks."""
        messages.append({"role": "user", "content": f"{len(messages)}+1"})
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    reply = await self.ask(claim, messages)
                    break
                except httpx.TransportError:
                    continue
        assert reply.status_code == 200, reply.text
        messages.append(reply.json()["choices"][0]["message"])

    async def end(self, claim: ClaimEpisodeResponse) -> None:
        await self.setup.post(
            "/end_episode", episode_uuid=claim.episode_uuid, attempt=claim.attempt, workflow_output=OUTPUT
        )

    async def results(self) -> dict[str, EpisodeAccepted]:
        found: dict[str, EpisodeAccepted] = {}
        while len(found) < len(self.claims):
            outcomes = await collect(self.setup.link, 1)
            await self.setup.link.commit(consumed(outcomes))
            for claim in self.claims:
                if isinstance(outcome := outcomes.get(claim.episode_uuid), EpisodeAccepted):
                    found[claim.episode_uuid] = outcome
        self.over = True
        return found


@pytest.fixture(scope="module")
async def setup(tmp_path_factory: pytest.TempPathFactory, byte_model: Path) -> AsyncGenerator[Setup]:
    folder = tmp_path_factory.mktemp("processes")
    secret = folder / SECRET_FILE  # From which it follows who owns what.
    secret.write_bytes(bytes(32))
    secret.chmod(0o600)
    async with serving(folder, byte_model, sampler=GatedSampler(), processes=PROCESSES) as setup:
        yield setup


@pytest_asyncio.fixture(loop_scope="module")
async def agents(setup: Setup, request: pytest.FixtureRequest) -> AsyncGenerator[Agents]:
    sampler = setup.sampler
    assert isinstance(sampler, GatedSampler)
    sampler.requests.clear()
    await setup.link.register(new_episodes(*(f"{request.node.name} {n}" for n in range(EPISODES))))
    agents = Agents(setup, sampler, [await setup.claim() for _ in range(EPISODES)])
    assert all(agents.of(number) for number in (1, PROCESSES)), "each process owns some of them"
    yield agents
    if not agents.over:
        setup.link.cancel([claim.episode_uuid for claim in agents.claims], "the test is over")
        await setup.link.commit(consumed(await collect(setup.link, EPISODES)))


def pid_at(url: str) -> int | None:
    """Of the gateway process that listens there."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if httpx.URL(url).port in {each.laddr.port for each in child.net_connections() if not each.raddr}:
                return child.pid
    return None


async def test_ports_that_do_not_exist_are_a_clear_error(byte_model: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"port 65536: .*choose an interchange_server_port"),
        bind_gateways(run_config(byte_model).interchange_server, 2, 65535, None),
    ):
        pass


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_each_process_serves_its_claims_at_its_own_port(agents: Agents) -> None:
    setup, claims = agents.setup, agents.claims
    ports = {httpx.URL(claim.openai_base_url).port for claim in claims}
    assert len(ports | {httpx.URL(setup.url).port}) == PROCESSES + 1
    conversations: list[list[Any]] = [[] for _ in claims]

    async def totals() -> list[float]:
        names = ("calls_total", "call_seconds_count", "call_seconds_sum")
        return [await setup.metric(f"tinkerscript_model_{name}") for name in names]

    before = await totals()
    agents.sampler.go.clear()
    pairs = zip(claims, conversations, strict=True)
    turns = [asyncio.create_task(agents.turn(claim, messages)) for claim, messages in pairs]
    await until(lambda: agents.sampler.waiting == EPISODES, "all calls wait")
    await asyncio.sleep(WAITED_S)
    agents.sampler.go.set()
    await asyncio.gather(*turns)
    for claim, messages in zip(claims, conversations, strict=True):
        streamed = await agents.ask(claim, [*messages, user("2+2")], stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n"), streamed.text
        long = await agents.ask(claim, [user(LONG)])
        assert long.json()["error"]["code"] == "context_length_exceeded", "its body arrived whole"
        models = await setup.http.get(
            f"{claim.openai_base_url}/models", headers={"x-api-key": claim.openai_api_key}
        )
        assert models.json()["data"][0]["id"] == "bytes"
        await agents.end(claim)
        lost = await agents.ask(claim, messages)
        assert (lost.status_code, lost.json()["error"]["code"]) == (409, "claim_lost")
    calls, timed, seconds = (now - then for now, then in zip(await totals(), before, strict=True))
    assert calls == timed == 2 * EPISODES
    assert seconds >= EPISODES * WAITED_S
    for result in (await agents.results()).values():
        first, second = result.calls
        assert (first.parent_id, second.parent_id) == (None, first.call_id)


async def test_wrong_addresses_are_refused_with_the_right_one(agents: Agents) -> None:
    setup, (claim, other) = agents.setup, (agents.of(1)[0], agents.of(2)[0])
    of_agents = [each.openai_base_url.replace("/v1", "/agent/v1") for each in (claim, other)]
    for url in (other.openai_base_url, f"{setup.url}/v1", of_agents[1]):
        refused = await agents.ask(claim, [user("1+1")], url=url)
        assert refused.status_code == 421
        error = refused.json()["error"]
        assert error["code"] == "wrong_gateway"
        asked = httpx.URL(url).path.replace("/agent", "")
        assert f"this key is served at /g/1/v1, not at {asked}" in error["message"]
    at_server = await agents.ask(claim, [user("1+1")], url=f"{setup.url}/g/1/v1")
    assert at_server.status_code == 404
    assert f"/g/1/ to port {httpx.URL(claim.openai_base_url).port}, /g/2/ to" in at_server.text
    unknown = await setup.http.post(
        f"{other.openai_base_url}/chat/completions", json={}, headers={"Authorization": "Bearer ts-x.1.y"}
    )
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (401, "invalid_api_key")
    plain = await agents.ask(claim, [user("1+1")], reasoning_effort="high")
    assert plain.status_code == 400, "only agent mode leaves the field out"
    assert not agents.sampler.requests
    reply = await agents.ask(claim, [user("1+1")], url=of_agents[0], reasoning_effort="high")
    assert reply.status_code == 200, reply.text


async def test_a_process_answers_no_other_sites_page(agents: Agents) -> None:
    claim = agents.of(2)[0]
    url = f"{claim.openai_base_url}/chat/completions"
    for foreign in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        headers = {"Authorization": f"Bearer {claim.openai_api_key}", **foreign}
        refused = await agents.setup.http.post(url, json={"messages": [user("1+1")]}, headers=headers)
        assert refused.status_code == 403, refused.text
    assert not agents.sampler.requests


async def test_a_process_that_is_killed_loses_nothing_and_doubles_nothing(agents: Agents) -> None:
    conversations: dict[str, list[Any]] = {claim.episode_uuid: [] for claim in agents.claims}

    async def all_take_a_turn() -> None:
        await asyncio.gather(
            *(agents.turn(claim, conversations[claim.episode_uuid]) for claim in agents.claims)
        )

    await all_take_a_turn()
    agents.sampler.go.clear()
    turns = asyncio.create_task(all_take_a_turn())
    await until(lambda: agents.sampler.waiting == EPISODES)
    restarts = await agents.setup.metric("tinkerscript_gateway_restarts_total")
    url = agents.of(1)[0].openai_base_url
    killed = pid_at(url)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await until(lambda: agents.sampler.waiting == len(agents.of(2)), "the killed process' samples end")
    agents.sampler.go.set()
    await turns
    await all_take_a_turn()
    for claim in agents.claims:
        await agents.end(claim)
    results = await agents.results()
    assert pid_at(url) not in (None, killed)
    assert await agents.setup.metric("tinkerscript_gateway_restarts_total") == restarts + 1
    for uuid, messages in conversations.items():
        calls = results[uuid].calls
        assert [call.parent_id for call in calls] == [None, *(call.call_id for call in calls[:-1])]
        assert [json.loads(call.reply)["content"] for call in calls] == [
            message["content"] for message in messages if message["role"] == "assistant"
        ]
        assert len(full_prompts(calls)) == 3


async def test_a_claim_whose_process_died_expires_like_any_other(setup: Setup) -> None:
    sampler = setup.sampler
    assert isinstance(sampler, GatedSampler)
    await setup.link.register(new_episodes("mortal"))
    agents = Agents(setup, sampler, [await setup.claim(allow_discard_timeout=1.0)])
    sampler.go.clear()
    call = asyncio.create_task(agents.ask(agents.claims[0], [user("1+1")]))
    await until(lambda: sampler.waiting == 1)
    os.kill(pid_at(agents.claims[0].openai_base_url) or 0, signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        await call
    again = await setup.claim(client="d", wait_s=30.0)
    assert (again.success, again.attempt) == (True, 2)
    sampler.go.set()
    agents.claims = [again]
    await agents.turn(again, [])
    await agents.end(again)
    result = (await agents.results())["mortal"]
    assert [failure["kind"] for failure in result.retries] == ["lease_expired"]
    assert len(result.calls) == 1


async def test_calls_of_a_process_that_does_not_start_are_refused_with_the_reason(
    tmp_path: Path, byte_model: Path
) -> None:
    broken = {"PYTHONHOME": str(tmp_path)}
    async with serving(tmp_path, byte_model, environ=broken, processes=PROCESSES) as setup:
        await setup.link.register(new_episodes("e"))
        claim = await setup.claim()
        refused = await Agents(setup, GatedSampler(), [claim]).ask(claim, [user("1+1")])
        assert refused.status_code == 503
        assert "does not start: exit code 1" in refused.json()["error"]["message"]


async def test_the_server_stops_while_calls_wait(tmp_path: Path, byte_model: Path) -> None:
    """They are answered that they may come again, and the next server goes on at the same addresses."""
    sampler = GatedSampler()
    conversations: list[list[Any]] = [[], []]
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        async with serving(tmp_path, byte_model, sampler=sampler, processes=PROCESSES) as setup:
            await setup.link.register(new_episodes("e", "f"))
            agents = Agents(setup, sampler, [await setup.claim(), await setup.claim()])
            for claim, messages in zip(agents.claims, conversations, strict=True):
                await agents.turn(claim, messages)
            sampler.go.clear()
            setup.http = http
            calls = [
                asyncio.create_task(agents.ask(claim, [*messages, user("2+2")]))
                for claim, messages in zip(agents.claims, conversations, strict=True)
            ]
            await until(lambda: sampler.waiting == 2)
        assert [(await call).status_code for call in calls] == [503, 503]
    assert not any(pid_at(claim.openai_base_url) for claim in agents.claims)
    sampler.go.set()
    async with serving(tmp_path, byte_model, sampler=sampler, processes=PROCESSES) as agents.setup:
        for claim, messages in zip(agents.claims, conversations, strict=True):
            agents.setup.keys[claim.episode_uuid, 1] = claim.openai_api_key
            await agents.turn(claim, messages)
            await agents.end(claim)
        for result in (await agents.results()).values():
            assert [call.matched_by for call in result.calls] == [None, "equality"]

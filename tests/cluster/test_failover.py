"""Two servers on one database: one serves, the other takes over when it dies, ends, or is stopped."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from interchange_helpers import FAST, collect, eventually, new_episodes, run_config
from postgres_server import PostgresServer, running_postgres
from run_ledger import used
from stable_address import StableAddress, stable_address
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.config import dump_config
from tinkerscript.processes.launcher import free_port
from tinkerscript.server.process import running_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.keys import KEYS_DIR, load_trainer_keys, make_link_keys
from tinkerscript.trainer_link.messages import EpisodeAccepted
from tinkerscript.trainer_link.trainer_end import TrainerLink


@pytest.fixture(scope="module")
def database() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def url(database: PostgresServer) -> Iterator[str]:
    yield f"{database.url}?schema=tried"
    database.query("DROP SCHEMA IF EXISTS tried CASCADE")


@dataclass
class ServerProcess:
    """One of the servers, with a folder and ports of its own."""

    folder: Path
    http_port: int
    link_port: int
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(self.folder)]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Its exit code, once it has ended."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, 60)

    async def answers(self, status: int) -> bool:
        """Whether `/ready` answers so."""
        async with httpx.AsyncClient(timeout=2) as http:
            try:
                return (await http.get(f"{self.url}/ready")).status_code == status
            except httpx.HTTPError:
                return False

    def log(self) -> str:
        return (self.folder / "server.log").read_text()


@dataclass
class Pair:
    """Both servers, and their one address."""

    servers: list[ServerProcess]
    address: StableAddress

    async def leader(self) -> ServerProcess:
        found: list[ServerProcess] = []

        async def one_serves() -> bool:
            found[:] = [each for each in self.servers if await each.answers(200)]
            return bool(found)

        await eventually(one_serves, "a server that serves")
        assert len(found) == 1, "at most one serves"
        return found[0]

    def other(self, server: ServerProcess) -> ServerProcess:
        return next(each for each in self.servers if each is not server)


@asynccontextmanager
async def pair_of_servers(tmp_path: Path, model: Path, url: str, **more: Any) -> AsyncIterator[Pair]:
    ports = [(free_port(), free_port()) for _ in range(2)]
    async with stable_address(*ports) as address:
        servers = list[ServerProcess]()
        for name, (http_port, link_port) in zip(("one", "two"), ports, strict=True):
            tcp = {
                "interchange_method": "tcp",
                "link_port": link_port,
                "interchange_server_port": http_port,
                "public_base_url": address.url,
            }
            config = run_config(model, store=url, max_attempts=20, **tcp, **more)
            folder = tmp_path / name
            folder.mkdir()
            (folder / "config.yaml").write_text(dump_config(config))
            servers.append(ServerProcess(folder, http_port, link_port))
        one, two = (server.folder / KEYS_DIR for server in servers)
        make_link_keys(one)
        shutil.copytree(one, two)
        try:
            for server in servers:
                server.start()
            yield Pair(servers, address)
        finally:
            for server in servers:
                if server.process is not None:
                    server.process.kill()
                    await server.ended()


def trainer_of(pair: Pair) -> TrainerLink:
    sampler = ScriptedSampler(lambda prompt: [72, 105, prompt[-1]], policy_version=4)
    keys = load_trainer_keys(pair.servers[0].folder / KEYS_DIR)
    return TrainerLink(
        pair.address.link, trainer_id="t", model="fake", sampler=sampler.sample, keys=keys, times=FAST
    )


async def played(client: AsyncTinkerScriptClient) -> str:
    """One episode with a model call, ended; its uuid."""
    episode = await client.begin_episode(wait_s=20)
    await called(episode)
    await client.end_episode(episode, 0.5)
    return episode.episode_uuid


async def called(episode: Any) -> None:
    """A model call, repeated as agents do on 5xx and broken connections."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {episode.openai_api_key}"}

    async def answered() -> bool:
        async with httpx.AsyncClient(timeout=10) as http:
            try:
                reply = await http.post(
                    f"{episode.openai_base_url}/chat/completions", json=body, headers=headers
                )
            except httpx.HTTPError:
                return False
            assert reply.status_code in (200, 502, 503), reply.text
            return reply.status_code == 200

    await eventually(answered, "an answer of the model")


async def accepted(link: TrainerLink, number: int) -> dict[str, Any]:
    outcomes = await collect(link, number)
    await link.commit(used(outcomes.values()))
    assert all(isinstance(outcome, EpisodeAccepted) for outcome in outcomes.values())
    return outcomes


async def test_another_server_takes_over(
    url: str, database: PostgresServer, tmp_path: Path, byte_model: Path
) -> None:
    """The claim of before goes on: its key opens it at the other server, and its calls are there."""
    async with pair_of_servers(tmp_path, byte_model, url) as pair:
        leader = await pair.leader()
        await refuses_what_comes_to_it(pair.other(leader))
        async with (
            trainer_of(pair) as link,
            AsyncTinkerScriptClient(pair.address.url, client_uuid="c", timeout_s=60) as client,
        ):
            await link.resume([])
            names = [f"{number}" for number in range(6)]
            await link.register(new_episodes(*names))
            for way in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
                episode = await client.begin_episode(wait_s=20)
                await called(episode)
                leader.signal(way)
                other = pair.other(leader)
                await eventually(lambda other=other: other.answers(200), "the other server's term")
                await called(episode)
                await client.end_episode(episode, 1.0)
                following = await played(client)
                outcomes = await accepted(link, 2)
                assert set(outcomes) == {episode.episode_uuid, following}
                assert [len(outcomes[name].calls) for name in (episode.episode_uuid, following)] == [2, 1]
                if way == signal.SIGTERM:
                    assert await leader.ended() == 0
                    break
                if way == signal.SIGSTOP:
                    leader.signal(signal.SIGCONT)
                else:
                    await leader.ended()
                    leader.start()
                await eventually(lambda former=leader: former.answers(503), "the former leader waits")
                assert await other.answers(200)
                leader = other
        assert any("server.stepped_down" in server.log() for server in pair.servers)
    states = database.query("SELECT uuid, state, consumed FROM tried.episodes ORDER BY uuid")
    assert states == [(name, "ended", 1) for name in names]


async def refuses_what_comes_to_it(waiting: ServerProcess) -> None:
    """The server that waits for its turn says that it is healthy, and sends clients to the other one."""
    await eventually(lambda: waiting.answers(503), "the other waits")
    async with httpx.AsyncClient(timeout=5) as http:
        assert (await http.get(f"{waiting.url}/health")).json()["status"] == "ok"
        reply = await http.post(f"{waiting.url}/v1/chat/completions", json={})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert reply.headers["connection"] == "close", "the next request finds the one that serves"
    assert "another server" in reply.json()["error"]["message"]


async def test_no_split_brain_and_no_lost_database_harms_anything(
    url: str, database: PostgresServer, tmp_path: Path, byte_model: Path
) -> None:
    """Neither a server that goes on after the other's term has begun, with requests that it had not answered
    yet, nor a database that is away for a while."""
    async with pair_of_servers(tmp_path, byte_model, url) as pair:
        leader = await pair.leader()
        names = [f"e{number}" for number in range(12)]
        async with (
            trainer_of(pair) as link,
            AsyncTinkerScriptClient(pair.address.url, client_uuid="c", timeout_s=90) as client,
            AsyncTinkerScriptClient(leader.url, client_uuid="stubborn", timeout_s=90) as stubborn,
            AsyncTinkerScriptClient(pair.address.url, client_uuid="stubborn", timeout_s=60) as again,
        ):
            await link.resume([])
            await link.register(new_episodes(*names))
            held = await stubborn.begin_episode(wait_s=20)
            leader.signal(signal.SIGSTOP)
            # They wait in its socket until it goes on.
            late = asyncio.create_task(stubborn.end_episode(held, 7.0))
            more = [asyncio.create_task(_ask(leader, "/claim_episode", client_uuid="late")) for _ in range(5)]
            await eventually(lambda: pair.other(leader).answers(200), "the other server's term")
            for _ in range(len(names) - 3):
                await played(client)
            leader.signal(signal.SIGCONT)
            replies = await asyncio.gather(*more)
            assert {status for status, _ in replies} <= {503, 200}
            assert not any(body.get("success") for _, body in replies), "it gave nothing away"
            await eventually(lambda: leader.answers(503), "the former leader's retreat")
            late.cancel()
            await asyncio.gather(late, return_exceptions=True)
            await again.end_episode(held, 7.0)

            episode = await client.begin_episode(wait_s=20)
            await called(episode)
            await asyncio.to_thread(database.kill)
            for server in pair.servers:
                await eventually(lambda server=server: server.answers(503), "both refuse")
            assert (await _ask(leader, "/claim_episode", client_uuid="x"))[0] == 503
            await asyncio.to_thread(database.start)
            await pair.leader()
            await client.end_episode(episode, 1.0)
            await played(client)
            outcomes = await accepted(link, len(names))
            assert set(outcomes) == set(names)
            assert outcomes[held.episode_uuid].reward == 7.0
        waiting = pair.other(await pair.leader())
        waiting.signal(signal.SIGTERM)
        assert await waiting.ended() == 0, "one that waits for its turn ends when it is told, too"
    counts = database.query("SELECT state, consumed, count(*) FROM tried.episodes GROUP BY 1, 2")
    assert counts == [("ended", 1, len(names))]
    assert database.query("SELECT count(*) FROM tried.attempts") == [(len(names),)]
    assert database.query("SELECT epoch FROM tried.lease")[0][0] >= 3


async def _ask(server: ServerProcess, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    body |= {"episode_type": "train", "allow_discard_timeout": 60.0}
    async with httpx.AsyncClient(timeout=60) as http:
        reply = await http.post(f"{server.url}{path}", json=body)
    return reply.status_code, reply.json()


async def test_servers_share_the_keys_of_the_link(url: str, tmp_path: Path, byte_model: Path) -> None:
    """A trainer has those of one server, and connects with them to the other."""
    encrypted = {"interchange_method": "tcp", "store": url}
    for name in ("one", "two"):
        config = run_config(byte_model, **encrypted)
        (tmp_path / name).mkdir()
        async with running_server(config, tmp_path / name, environ={}, times=FAST) as (info, _):
            keys = load_trainer_keys(tmp_path / "one" / KEYS_DIR)
            async with TrainerLink(
                info.link_address, trainer_id=name, model="m", sampler=ScriptedSampler(list).sample, keys=keys
            ) as link:
                await link.register(new_episodes(name))
    secrets = [(tmp_path / name / KEYS_DIR / "server.key_secret").read_text() for name in ("one", "two")]
    assert secrets[0] == secrets[1]

"""Forged keys, malformed bodies and frames, whatever the OpenAPI schema allows: refused, and nothing breaks.

CHAOS_KEYS, CHAOS_BODIES, CHAOS_FRAMES and CHAOS_EXAMPLES change the numbers; the defaults are `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from hostile import malformed_bodies

from interchange_helpers import FAST, collect, eventually, new_episode, run_config, trainer
from tinkerscript.access_tokens import claim_key
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.server.process import running_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.framing import frames
from tinkerscript.trainer_link.messages import Cancel, Commit, Outcome, Register, ReleaseClient
from tinkerscript.trainer_link.trainer_end import TrainerLink

SEED = int(os.environ.get("CHAOS_SEED", "1"))
ENGINE = ("/stop_engine", "/start_engine")
"""Would end the trainer that the other requests need, or spawn one."""


def amount(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


def used(sequence: int) -> TrainedRow:
    return TrainedRow(episode=sequence, step=0, outcome=Use.EVALUATED)


@dataclass
class Target:
    """A live server with a trainer."""

    http: httpx.AsyncClient
    link: TrainerLink
    url: str
    link_address: str
    run_dir: Path

    async def claim(self, name: str, **more: Any) -> dict[str, Any]:
        await self.link.register([new_episode(name)])
        body = {"client_uuid": "c", "sends_key": True, "max_episodes": 256} | more
        while (reply := (await self.http.post("/claim_episode", json=body)).json())["success"]:
            for claim in [reply, *reply["more"]]:  # Others may have registered episodes too.
                if claim["episode_uuid"] == name:
                    return claim
            body["client_uuid"] += "'"  # More than one client may hold.
        raise AssertionError(f"{name} cannot be claimed: {reply}")

    async def end(self, claim: dict[str, Any]) -> None:
        reply = await self.post("/end_episode", claim, workflow_output={"reward": 1})
        assert reply.json()["success"], reply.text

    async def post(self, path: str, claim: dict[str, Any], **body: Any) -> httpx.Response:
        """A request of a claim, under its key."""
        headers = {"Authorization": f"Bearer {claim['openai_api_key']}"}
        return await self.http.post(path, json=body, headers=headers)

    async def models(self, key: str) -> int:
        headers = [(b"Authorization", b"Bearer " + key.encode("utf-8"))]
        return (await self.http.get("/v1/models", headers=headers)).status_code

    async def still_works(self, name: str) -> None:
        """A whole episode, from its registration to the commit that uses it."""
        claim = await self.claim(name, client_uuid=f"client of {name}")
        reply = await self.http.post(
            "/v1/chat/completions",
            json={"model": "policy", "messages": [{"role": "user", "content": "1+1"}]},
            headers={"Authorization": f"Bearer {claim['openai_api_key']}"},
        )
        assert reply.status_code == 200, reply.text
        await self.end(claim)
        found = dict[str, Outcome]()
        while name not in found:
            found |= await collect(self.link, 1)
        await self.link.commit([used(each.sequence) for each in found.values()])

    async def drops(self) -> float:
        """Frames and messages of the link that the server dropped, by its own count."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        counts = (
            line.rpartition(" ")[2] for line in lines if line.startswith("tinkerscript_link_drops_total")
        )
        return sum(map(float, counts))


@asynccontextmanager
async def target(tmp_path: Path, model: Path) -> AsyncGenerator[Target]:
    sampler = ScriptedSampler(lambda prompt: [72, 105])
    config = run_config(model)
    async with (
        running_server(config, tmp_path, environ={}, times=FAST) as (info, task),
        trainer(info.link_address, sampler.sample) as link,
        httpx.AsyncClient(base_url=info.url, timeout=60) as http,
    ):
        await link.resume([])
        yield Target(http, link, info.url, info.link_address, tmp_path)
        assert not task.done()


# Keys


def forged_keys(rng: random.Random, good: str, count: int) -> Iterator[str]:
    """Keys that this server did not make: a good one with a change, one of another secret, noise."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
    other_secret = rng.randbytes(32)
    while count:
        at = rng.randrange(len(good))
        letter = rng.choice(alphabet)
        name, attempt, mac = good.split(".")
        key = rng.choice(
            [
                good[:at] + letter + good[at + 1 :],
                good[:at],
                good + letter,
                f"{name}.{int(attempt) + rng.randrange(1, 99)}.{mac}",
                claim_key(other_secret, "victim", rng.randrange(1, 4)),
                "ts-" + "".join(rng.choices(alphabet, k=rng.randrange(200))),
                rng.choice(["ts-", "ts-..", "sk-1", "é" * 20, "ts-" + "A" * 5000 + ".1.x", good.upper()]),
            ]
        )
        if key != good and key.strip() == key and key:
            count -= 1
            yield key


@pytest.mark.timeout(300)
async def test_no_forged_expired_or_foreign_key_is_let_in(tmp_path: Path, byte_model: Path) -> None:
    rng = random.Random(SEED)
    async with target(tmp_path, byte_model) as server:
        victim = await server.claim("victim")
        good = victim["openai_api_key"]
        assert await server.models(good) == 200
        expired = [await _lost_key(server, number) for number in range(20)]
        keys = [*forged_keys(rng, good, amount("CHAOS_KEYS", 10_000)), *expired]
        for start in range(0, len(keys), 50):
            statuses = await asyncio.gather(*(server.models(key) for key in keys[start : start + 50]))
            assert set(statuses) <= {401, 409}, dict(zip(keys[start:], statuses, strict=False))
        for key in expired:
            assert await server.models(key) == 409
        assert await _foreign_uses(server, victim) == {401, 409}
        assert await server.models(good) == 200


async def _lost_key(server: Target, number: int) -> str:
    """The key of a claim that is over: ended, or aborted."""
    claim = await server.claim(f"over-{number}")
    if number % 2:
        await server.end(claim)
    else:
        reply = await server.post("/abort_episode", claim, failure={"kind": "aborted"})
        assert reply.json()["success"]
        await server.link.register([new_episode(f"after-{number}")])
        server.link.cancel([f"over-{number}", f"after-{number}"], "not needed")
        await server.link.flush()
    return claim["openai_api_key"]


async def _foreign_uses(server: Target, victim: dict[str, Any]) -> set[int]:
    """Statuses for others who would end, abort or use the victim's claim."""
    own = await server.claim("of another", client_uuid="other")
    body = {"workflow_output": {"reward": 9}, "failure": {"kind": "x"}}
    named = [
        {"client_uuid": "c", "episode_uuid": "victim"},
        {"client_uuid": "c", "episode_uuid": "victim~1~AAAAAAAAAAAAAAAAAAAAAA"},
        {"client_uuid": "other", "episode_uuid": "nobody's"},
    ]
    statuses = {await server.models(victim["openai_api_key"] + "x")}
    for path in ("/end_episode", "/abort_episode"):
        for names in named:
            without = await server.http.post(path, json=body | names)
            foreign = await server.post(path, own, **body, **names)
            statuses |= {without.status_code, foreign.status_code}
    return statuses


# Bodies


@pytest.mark.timeout(300)
async def test_no_malformed_body_breaks_the_server(tmp_path: Path, byte_model: Path) -> None:
    rng = random.Random(SEED)
    count = amount("CHAOS_BODIES", 400)
    async with target(tmp_path, byte_model) as server:
        key = (await server.claim("held", allow_discard_timeout=600))["openai_api_key"]
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        posts = [path for path, methods in paths.items() if "post" in methods and path not in ENGINE]
        assert {"/claim_episode", "/end_episode", "/v1/chat/completions"} <= set(posts)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for path in posts:
            for body in malformed_bodies(rng, count):
                reply = await server.http.post(path, content=body, headers=headers)
                assert reply.status_code < 500, f"{path} {body[:300]!r}: {reply.status_code} {reply.text}"
                assert reply.status_code == 200 or _says_why(reply), f"{path} {body[:300]!r}: {reply.text}"
        await server.still_works("afterwards")


def _says_why(reply: httpx.Response) -> bool:
    """Whether a refusal has its reason, in the interchange's form or OpenAI's."""
    body = reply.json()
    reason = body.get("failure_reason") or body.get("error")
    return bool(reason if isinstance(reason, str) else reason and reason["message"])


# Frames


def malformed_frames(rng: random.Random, count: int) -> Iterator[list[bytes]]:
    """Multipart messages that no trainer would send; none of them is a Hello."""
    (good,) = frames(
        [
            Register(episodes=[new_episode(f"never-{number}") for number in range(3)]),
            Commit(number=1, rows=[used(1), used(10**6)]),
            Cancel(episode_uuids=["held"], reason="?"),
            ReleaseClient(client_uuid="c", reason="?"),
        ]
    )
    for _ in range(count):
        kind = rng.randrange(5)
        if kind == 0:
            yield [rng.randbytes(rng.randrange(400))]
        elif kind == 1:
            yield [good[: rng.randrange(len(good))]]
        elif kind == 2:
            at = rng.randrange(len(good))
            yield [good[:at] + rng.randbytes(3) + good[at + 1 :]]
        elif kind == 3:
            value: Any = rng.choice([None, 1, "x", {"type": "Register"}, [{"type": "Nothing"}], [[]] * 50])
            yield [msgspec.msgpack.encode(value)]
        else:
            yield [good] * rng.randrange(2, 5)


@pytest.mark.timeout(300)
async def test_no_strange_frame_breaks_the_link(tmp_path: Path, byte_model: Path) -> None:
    rng = random.Random(SEED)
    count = amount("CHAOS_FRAMES", 5000)
    async with target(tmp_path, byte_model) as server:
        held = await server.claim("held", allow_discard_timeout=600)
        before = await server.drops()
        context = zmq.asyncio.Context()
        stranger: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        stranger.connect(server.link_address)
        for parts in malformed_frames(rng, count):
            await stranger.send_multipart(parts)
        # Well-formed frames hold several messages, so that the drops are at least as many as the frames.
        await eventually(lambda: _dropped(server, before + count), "every frame counted")
        stranger.close(linger=0)
        context.term()
        await server.still_works("afterwards")
        await server.end(held)


async def _dropped(server: Target, number: float) -> bool:
    return await server.drops() >= number


# The schema

HOOKS = """
import schemathesis

@schemathesis.hook
def map_body(context, body):
    '''A long poll is held for as long as it asks: ask for none.'''
    if isinstance(body, dict) and isinstance(body.get("wait_s"), (int, float)) and body["wait_s"] > 0:
        body["wait_s"] = 0
    return body
"""


@pytest.mark.timeout(590)
async def test_schemathesis_finds_no_server_error(tmp_path: Path, byte_model: Path) -> None:
    async with target(tmp_path, byte_model) as server:
        key = (await server.claim("held", allow_discard_timeout=3600))["openai_api_key"]
        command = [
            *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"),
            *("--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(amount("CHAOS_EXAMPLES", 30)), "--seed", str(SEED), "--no-color"),
            *(
                "--header",
                f"Authorization: Bearer {key}",
                "--exclude-path",
                ENGINE[0],
                "--exclude-path",
                ENGINE[1],
                "--request-timeout",
                "70",
            ),
            # One thread: Python 3.11 may raise a SystemError when two threads compile source at once.
            *("--suppress-health-check", "all", "--workers", "1"),
        ]
        (tmp_path / "hooks.py").write_text(HOOKS)
        environ = os.environ | {"SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path, env=environ
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-20000:]
        await server.still_works("afterwards")

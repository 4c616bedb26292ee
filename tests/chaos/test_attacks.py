"""Forged keys, malformed bodies and frames, whatever the OpenAPI schema allows: refused, and nothing breaks.

CHAOS_KEYS, CHAOS_BODIES, CHAOS_FRAMES and CHAOS_EXAMPLES change the numbers; the defaults are `make chaos`.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from hostile import malformed_bodies

from interchange_helpers import collect, eventually, new_episode
from interchange_setup import Setup, serving
from run_ledger import used
from tinkerscript.access_tokens import claim_key
from tinkerscript.addresses import read_server_info
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.trainer_link.framing import frames
from tinkerscript.trainer_link.messages import Cancel, Commit, Outcome, Register, ReleaseClient

SEED = int(os.environ.get("CHAOS_SEED", "1"))
ENGINE = ("/stop_engine", "/start_engine")
"""Would end the trainer that the other requests need, or spawn one."""


def amount(name: str, default: int) -> int:
    return int(os.environ.get(name, default))


async def claimed(server: Setup, name: str, client: str = "c", **more: Any) -> Any:
    """The claim of a new episode. Others may have registered episodes too, and they are claimed before it."""
    await server.link.register([new_episode(name)])
    while (reply := await server.claim(client, max_episodes=256, **more)).success:
        for claim in (reply, *reply.more):
            if claim.episode_uuid == name:
                return claim
        client += "'"  # More than one client may hold.
    raise AssertionError(f"{name} cannot be claimed: {reply}")


async def status_of(server: Setup, key: str) -> int:
    headers = [(b"Authorization", b"Bearer " + key.encode("utf-8"))]
    return (await server.http.get("/v1/models", headers=headers)).status_code


async def still_works(server: Setup) -> None:
    """A whole episode, from its registration to the commit that uses it."""
    claim = await claimed(server, "afterwards", "client of afterwards")
    reply = await server.call(claim.openai_api_key)
    assert reply.status_code == 200, reply.text
    await server.end(claim)
    found = dict[str, Outcome]()
    while claim.episode_uuid not in found:
        found |= await collect(server.link, 1)
    await server.link.commit(used(found.values()))


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
    async with serving(tmp_path, byte_model) as server:
        good = (await claimed(server, "victim")).openai_api_key
        assert await status_of(server, good) == 200
        expired = [await _lost_key(server, number) for number in range(20)]
        keys = [*forged_keys(rng, good, amount("CHAOS_KEYS", 10_000)), *expired]
        for start in range(0, len(keys), 50):
            some = keys[start : start + 50]
            statuses = await asyncio.gather(*(status_of(server, key) for key in some))
            assert set(statuses) <= {401, 409}, dict(zip(some, statuses, strict=True))
        for key in expired:
            assert await status_of(server, key) == 409
        assert await _foreign_uses(server, good) == {401, 409}
        assert await status_of(server, good) == 200


async def _lost_key(server: Setup, number: int) -> str:
    """The key of a claim that is over: ended, or aborted."""
    claim = await claimed(server, f"over-{number}")
    if number % 2:
        await server.end(claim)
    else:
        names: dict[str, Any] = {"episode_uuid": claim.episode_uuid, "attempt": claim.attempt}
        assert (await server.post("/abort_episode", **names, failure={"kind": "aborted"}))["success"]
        server.link.cancel([claim.episode_uuid], "not needed")
        await server.link.flush()
    return claim.openai_api_key


async def _foreign_uses(server: Setup, good: str) -> set[int]:
    """Statuses for others who would end, abort or use the victim's claim."""
    own = (await claimed(server, "of another", "other")).openai_api_key
    body = {"workflow_output": {"reward": 9}, "failure": {"kind": "x"}}
    named = [
        {"client_uuid": "c", "episode_uuid": "victim"},
        {"client_uuid": "c", "episode_uuid": "victim~1~AAAAAAAAAAAAAAAAAAAAAA"},
        {"client_uuid": "other", "episode_uuid": "nobody's"},
    ]
    statuses = {await status_of(server, good + "x")}
    for path in ("/end_episode", "/abort_episode"):
        for names in named:
            for headers in ({}, {"Authorization": f"Bearer {own}"}):
                reply = await server.http.post(path, json=body | names, headers=headers)
                statuses.add(reply.status_code)
    return statuses


# Bodies


@pytest.mark.timeout(300)
async def test_no_malformed_body_breaks_the_server(tmp_path: Path, byte_model: Path) -> None:
    rng = random.Random(SEED)
    count = amount("CHAOS_BODIES", 400)
    async with serving(tmp_path, byte_model) as server:
        key = (await claimed(server, "held", allow_discard_timeout=600)).openai_api_key
        paths = (await server.http.get("/openapi.json")).json()["paths"]
        posts = [path for path, methods in paths.items() if "post" in methods and path not in ENGINE]
        assert {"/claim_episode", "/end_episode", "/v1/chat/completions"} <= set(posts)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for path in posts:
            for body in malformed_bodies(rng, count):
                reply = await server.http.post(path, content=body, headers=headers)
                assert reply.status_code < 500, f"{path} {body[:300]!r}: {reply.status_code} {reply.text}"
                assert reply.status_code == 200 or _says_why(reply), f"{path} {body[:300]!r}: {reply.text}"
        await still_works(server)


def _says_why(reply: httpx.Response) -> bool:
    """Whether a refusal has its reason, in the interchange's form or OpenAI's."""
    body = reply.json()
    reason = body.get("failure_reason") or body.get("error")
    return bool(reason if isinstance(reason, str) else reason and reason["message"])


# Frames


def trained(sequence: int) -> TrainedRow:
    return TrainedRow(episode=sequence, step=0, outcome=Use.EVALUATED)


def malformed_frames(rng: random.Random, count: int) -> Iterator[list[bytes]]:
    """Multipart messages that no trainer would send; none of them is a Hello."""
    (good,) = frames(
        [
            Register(episodes=[new_episode(f"never-{number}") for number in range(3)]),
            Commit(number=1, rows=[trained(1), trained(10**6)]),
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
    async with serving(tmp_path, byte_model) as server:
        held = await claimed(server, "held", allow_discard_timeout=600)
        before, info = await drops(server), read_server_info(tmp_path)
        assert info is not None
        context = zmq.asyncio.Context()
        stranger: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        stranger.connect(info.link_address)
        for parts in malformed_frames(rng, count):
            await stranger.send_multipart(parts)
        # Well-formed frames hold several messages, so that the drops are at least as many as the frames.
        await eventually(lambda: _dropped(server, before + count), "every frame counted")
        stranger.close(linger=0)
        context.term()
        await still_works(server)
        await server.end(held)


async def _dropped(server: Setup, number: float) -> bool:
    return await drops(server) >= number


async def drops(server: Setup) -> float:
    """Frames and messages of the link that the server dropped, by its own count."""
    lines = (await server.http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tinkerscript_link_drops_total"))


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
    async with serving(tmp_path, byte_model) as server:
        key = (await claimed(server, "held", allow_discard_timeout=3600)).openai_api_key
        command = [
            *(str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"),
            *("--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(amount("CHAOS_EXAMPLES", 30)), "--seed", str(SEED), "--no-color"),
            *("--header", f"Authorization: Bearer {key}", "--request-timeout", "70"),
            *("--exclude-path", ENGINE[0], "--exclude-path", ENGINE[1]),
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
        await still_works(server)

"""Clients that hold valid tokens and misbehave: they claim episodes like anybody, and each does its worst.

    python tests/chaos/hostile.py --run-dir DIR --seed S --as thief --as liar ...

They talk to the server itself, wherever its `server.json` says that it is, until they are stopped. Each
writes down what it claims, registers, fails and hands in, and every request that must be refused with its
reply. Their pace leaves work to others: what they could take by speed alone is what their limits are for.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from evidence import HOSTILE, Lines
from processes import serving_info

from tinkerscript.access_tokens import CLIENT_TOKEN
from tinkerscript.errors import MAX_REWARD

AWAY_S = 0.2
"""Between attempts to reach a server that is down."""

REPLY_S = 60.0
"""A request without an answer after so long, from a server that is up, is a fault."""

SOCKETS = 300

TASK = f"{Path(__file__).parents[2]}/examples/arithmetic.py@arithmetic"
"""A task without a sandbox, which has a sample `12+34`."""

MAX_LIES = 40
"""Results, wrong but within the protocol's bounds, that a liar hands in for its own claims."""

Claim = dict[str, Any]


def token_variable(who: str) -> str:
    """The environment variable of a hostile client's token; the impostor has the shared one."""
    return CLIENT_TOKEN if who == "impostor" else f"TOKEN_OF_{who.upper()}"


class Hostile:
    """What all of them do: ask, and write down what came of it."""

    def __init__(self, who: str, options: argparse.Namespace, log: Lines) -> None:
        self.who = who
        self.rng = random.Random(f"{options.seed} {who}")
        self.max_reward: float = options.max_reward
        self.run_dir: Path = options.run_dir
        self._log = log
        self.token = os.environ[token_variable(who)]
        self._http = httpx.AsyncClient(timeout=REPLY_S)
        self.seen = deque(["e1-1-0"], maxlen=50)
        """Episodes that it has held: others hold them by now."""

        self.lies = 0

    def note(self, event: str, **fields: Any) -> None:
        self._log.write(event=event, who=self.who, **fields)

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(self.rng.uniform(0.3, 1.7) * seconds)

    def address(self) -> str:
        """The server's URL; empty before its first start."""
        info = serving_info(self.run_dir)
        return "" if info is None else info.url

    def port(self) -> int:
        """The server's port; 1 before its first start."""
        return int(self.address().rpartition(":")[2] or 1)

    async def ask(self, path: str, body: Any, *, key: str | None = None) -> httpx.Response | None:
        """The reply, or None if the server went down or is down."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if key != "":
            headers["Authorization"] = f"Bearer {self.token if key is None else key}"
        try:
            reply = await self._http.post(self.address() + path, content=content, headers=headers)
        except httpx.ReadTimeout:
            self.note("unanswered", path=path, body=content[:200].decode("latin-1"))
            return None
        except (httpx.TransportError, httpx.UnsupportedProtocol):
            await asyncio.sleep(AWAY_S)
            return None
        if reply.status_code >= 500:
            self.note("error", path=path, status=reply.status_code, reason=reason_of(reply))
        if path == "/claim_episode" and reply.status_code == 200 and (first := reply.json())["success"]:
            for claim in (first, *first["more"]):
                self.note("claimed", **_named(claim), client=claim["client_uuid"])
                self.seen.append(claim["episode_uuid"])
        return reply

    async def attack(self, what: str, path: str, body: Any, *, key: str | None = None) -> None:
        """A request that must be refused, with the reason."""
        reply = await self.ask(path, body, key=key)
        if reply is not None and reply.status_code != 503:  # The server is stopping.
            accepted = reply.status_code < 400 and not refused(reply)
            reason = reason_of(reply)
            about = {"what": what, "path": path, "status": reply.status_code}
            self.note("attack", **about, accepted=accepted, reason=reason)

    async def knock(self) -> None:
        """What anybody else gets meanwhile: whether the server lets in who comes now, and after how long.

        While as many connections as there may be are being answered, one more gets 503 and when to try again,
        as our client does.
        """
        began = time.monotonic()
        try:
            async with httpx.AsyncClient(timeout=REPLY_S) as stranger:
                reply = await stranger.get(self.address() + "/health")
                while not reply.content and time.monotonic() - began < REPLY_S:
                    await asyncio.sleep(float(reply.headers["retry-after"]))
                    reply = await stranger.get(self.address() + "/health")
        except httpx.ReadTimeout:
            self.note("unanswered", path="/health", body="")
        except (httpx.TransportError, httpx.UnsupportedProtocol):
            await asyncio.sleep(AWAY_S)
        else:
            seconds = round(time.monotonic() - began, 2)
            self.note("knock", status=reply.status_code, let_in=bool(reply.content), seconds=seconds)

    async def claim(self, *, lease_s: float, number: int = 1, pool: str = "") -> list[Claim]:
        """The claims that it got, if any."""
        body = {"client_uuid": self.who, "claim_request_id": self.rng.randbytes(8).hex(), "pool": pool}
        body |= {"allow_discard_timeout": lease_s, "max_episodes": number, "wait_s": 2.0, "sends_key": True}
        reply = await self.ask("/claim_episode", body)
        if reply is None or reply.status_code != 200 or not (first := reply.json())["success"]:
            return []
        return [first, *first["more"]]

    async def call(self, claim: Claim) -> httpx.Response | None:
        """A model call of its own claim, marked as its own."""
        return await self.ask("/v1/chat/completions", self.prompt(claim), key=claim["openai_api_key"])

    def prompt(self, claim: Claim) -> dict[str, Any]:
        mark = f"[{claim['client_uuid']} {claim['episode_uuid']} turn 0]"
        return {"model": "policy", "messages": [{"role": "user", "content": mark}], "max_tokens": 8}

    async def hand_in(self, claim: Claim, reward: float) -> bool:
        """A result of its own claim; whether it was confirmed."""
        self.note("handed in", **_named(claim), reward=reward)
        body = {"workflow_output": {"reward": reward}}
        reply = await self.ask("/end_episode", body, key=claim["openai_api_key"])
        return reply is not None and reply.status_code == 200

    async def fail(self, claim: Claim) -> bool:
        """Abort its own claim; whether that was confirmed."""
        self.note("failed", **_named(claim))
        body = {"failure": {"kind": "task_error", "message": "I fail everything"}}
        reply = await self.ask("/abort_episode", body, key=claim["openai_api_key"])
        return reply is not None and reply.status_code == 200

    async def use_what_is_over(self, claim: Claim) -> None:
        """Every use of the key of a claim that is over."""
        key, result = claim["openai_api_key"], {"workflow_output": {"reward": 0.5}}
        for path, body in (
            ("/end_episode", result),
            ("/abort_episode", {"failure": {"kind": "other", "message": "again"}}),
            ("/v1/chat/completions", self.prompt(claim)),
            ("/heartbeat_episode", {}),
            ("/can_continue_episode", {}),
        ):
            await self.attack("a claim that is over", path, body, key=key)


def _named(claim: Claim) -> dict[str, Any]:
    return {"episode": claim["episode_uuid"], "attempt": claim["attempt"]}


def refused(reply: httpx.Response) -> bool:
    """Whether a reply with status 200 says no."""
    body = reply.json()
    return body.get("success") is False or body.get("can_continue") is False


def reason_of(reply: httpx.Response) -> str:
    """Why it was refused, in the interchange's form or the model providers'; empty if it does not say."""
    try:
        body = reply.json()
    except ValueError:
        return ""
    for name in ("failure_reason", "fail_cause", "reason", "error"):
        if said := body.get(name):
            return str(said["message"] if isinstance(said, dict) else said)
    refusals = body.get("refused")
    return str(next(iter(refusals.values()))) if refusals else ""


# Rewards and payloads

BAD_REWARDS = (
    *("1e7", "-1e300", "1e400", "NaN", "-Infinity", "[1e6, 1e6]", "[1e308, 1e308]", '"much"', "null", "{}"),
    "9" * 400,
)
DEEP = '{"a":' * 300 + "1" + "}" * 300
BAD_PARTS = (
    f'"metadata": {DEEP}',
    '"metadata": ' + "[" * 50_000 + "]" * 50_000,
    '"metadata": {"text": "\\ud800"}',
    '"log_metrics": {"a": ["x"]}',
)


async def liar(me: Hostile) -> None:
    """Huge and impossible rewards, deep metadata and metrics; sometimes a wrong result within the bounds."""
    for claim in await me.claim(lease_s=10.0):
        key = claim["openai_api_key"]
        outputs = [f'"reward": {reward}' for reward in BAD_REWARDS]
        outputs += [f'"reward": 1, {part}' for part in BAD_PARTS]
        for output in me.rng.sample(outputs, 6):
            body = f'{{"workflow_output": {{{output}}}}}'.encode()
            await me.attack(f"a result with {output[:30]}", "/end_episode", body, key=key)
        if me.rng.random() < 0.05:
            await me.attack("a body of 17 MB", "/end_episode", b" " * 17_000_000, key=key)
        await me.call(claim)
        if me.lies < MAX_LIES and me.rng.random() < 0.3:
            me.lies += 1
            reward = me.rng.choice([me.max_reward, -me.max_reward])
            if await me.hand_in(claim, reward):
                await me.hand_in(claim, reward)  # Repeated, it changes nothing.
                await me.use_what_is_over(claim)
        elif await me.fail(claim):
            await me.use_what_is_over(claim)
    await me.pause(0.3)


# Others' claims


def guessed_keys(rng: random.Random, good: str, uuid: str) -> Iterator[str]:
    """Keys for the claims of others that can be made from one's own."""
    name, attempt, mac = good.split(".")
    other = "ts-" + base64.urlsafe_b64encode(uuid.encode()).rstrip(b"=").decode()
    for number in range(1, 4):
        yield f"{other}.{number}.{mac}"
    yield f"{other}.1.{base64.urlsafe_b64encode(rng.randbytes(32)).rstrip(b'=').decode()}"
    yield f"{name}.{int(attempt) + 1}.{mac}"
    yield f"{name}.{int(attempt) + 1}."
    yield good[:-1]
    yield f"{uuid}~1~{mac[:22]}"


async def thief(me: Hostile) -> None:
    """Ends, aborts, renews and calls the model for the claims of others."""
    for claim in await me.claim(lease_s=5.0):
        own = claim["openai_api_key"]
        uuid = me.rng.choice([uuid for uuid in me.seen if uuid != claim["episode_uuid"]] or ["e"])
        result = {"workflow_output": {"reward": 0.25}, "failure": {"kind": "x"}, "client_uuid": "worker-1"}
        for path in ("/end_episode", "/abort_episode", "/heartbeat_episode", "/replay_latest_llm_call"):
            await me.attack("own key, other episode", path, result | {"episode_uuid": uuid}, key=own)
        foreign = list(guessed_keys(me.rng, own, uuid))
        for key in [*me.rng.sample(foreign, 3), "", os.environ[token_variable(me.who)]]:
            paths = ("/end_episode", "/abort_episode", "/heartbeat_episode", "/can_continue_episode")
            path = me.rng.choice([*paths, "/replay_latest_llm_call"])
            await me.attack("guessed key", path, result | {"episode_uuid": uuid}, key=key)
            path = me.rng.choice(["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
            await me.attack("guessed key", path, me.prompt(claim), key=key)
        body = {"model": "policy", "input": "x", "previous_response_id": "resp_of_another"}
        await me.attack("another's response", "/v1/responses", body, key=own)
        if await me.fail(claim):
            await me.use_what_is_over(claim)
    await me.pause(0.3)


async def impostor(me: Hostile) -> None:
    """Has the shared token, and so no limit of its own; claims in the name of a client that has."""
    body = {"client_uuid": "thief/thief", "sends_key": True}
    await me.attack("claim in another's name", "/claim_episode", body)
    for claim in await me.claim(lease_s=5.0):
        key = claim["openai_api_key"]
        await me.attack("own key, no episode", "/end_episode", {"episode_uuid": "e"}, key=key)
        if me.lies < MAX_LIES // 4:
            me.lies += 1
            await me.hand_in(claim, -me.max_reward)
        else:
            await me.fail(claim)
    await me.pause(1.0)


# Claims that are of no use to anybody


async def failer(me: Hostile) -> None:
    """Fails what it claims: at once, by a lease too short to work in, or by a result that comes too late."""
    for claim in await me.claim(lease_s=me.rng.choice([0.05, 0.3])):
        way = me.rng.randrange(3)
        if way == 0:
            await me.fail(claim)
            continue
        if way == 1:
            await me.call(claim)
        await asyncio.sleep(1.5 * claim["allow_discard_timeout"])
        await me.hand_in(claim, 0.125)
    await me.pause(0.3)


async def hoarder(me: Hostile) -> None:
    """Holds as many claims as it gets for as long as it can, and asks for more."""
    more = [me.claim(lease_s=86_400.0, number=256) for _ in range(4)]
    for claims in await asyncio.gather(*more):
        for claim in claims:
            await me.ask("/heartbeat_episode", {}, key=claim["openai_api_key"])
    await me.pause(1.0)


# Registrations


def wrong_registrations(me: Hostile) -> Iterator[tuple[str, bytes]]:
    """What must not be registered, with its path."""
    fresh = f"{me.who}-{me.rng.randbytes(4).hex()}"
    good = {"episode_uuid": fresh, "client_uuid": me.who, "task_id": "t", "payload": {"a": 1}}
    for wrong in (
        *({"client_uuid": name} for name in ("", "worker-0", "a/b")),
        *({"group_id": name} for name in ("g0", "worker-0/t")),
        *({"episode_uuid": name} for name in ("", "x" * 300, me.rng.choice(me.seen))),
        *({"payload": [1]}, {"copies": 5000}, {"group_size": -1}, {"episode_type": "both"}),
    ):
        yield "/register_episode", json.dumps(good | wrong).encode()
    for payload in (DEEP, '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"):
        yield "/register_episode", json.dumps(good).replace('{"a": 1}', payload).encode()
    yield "/register_episodes", json.dumps({"episodes": [good] * 1001}).encode()
    yield "/register_episodes", json.dumps({"episodes": [good | {"client_uuid": "worker-0"}]}).encode()


async def registrar(me: Hostile) -> None:
    """Wrong registrations; and in its own pool groups that never fill, copies, and results for them."""
    for path, body in me.rng.sample(list(wrong_registrations(me)), 5):
        await me.attack("wrong registration", path, body)
    fresh = f"{me.who}-{me.rng.randbytes(4).hex()}"
    me.note("registered", episode=fresh)
    group = {"client_uuid": me.who, "task_id": fresh, "group_size": 50_000, "copies": 3, "payload": {}}
    await me.ask("/register_episode", group | {"episode_uuid": fresh})
    for claim in await me.claim(lease_s=5.0, pool=me.who):
        if me.rng.random() < 0.5:
            await me.call(claim)
        await me.hand_in(claim, me.rng.choice([-1.0, me.max_reward]))
    await me.pause(0.5)


WORKER_S = 150.0
"""A worker that has not refused the samples by then works on them. A dead trainer has none for it."""


async def smuggler(me: Hostile) -> None:
    """Samples with a sandbox, a setup script and files of its own, for a worker of a task that has none.

    It starts the worker too: what the product's own worker would execute, the script and the files betray.
    """
    marks = [str(me.run_dir / f"smuggled-{what}") for what in ("by-setup", "as-file")]
    for id_ in ("x", "12+34"):
        sample = {"id": id_, "input": "12+34=", "target": "46", "sandbox": {"type": "local"}}
        sample |= {"setup": f"#!/bin/sh\ntouch {marks[0]}\n", "files": {marks[1]: "here"}}
        payload = {"task": TASK, "sample": sample}
        episode = {"episode_uuid": f"{me.who}-{me.rng.randbytes(4).hex()}", "client_uuid": me.who}
        episode |= {"payload": payload, "episode_type": "eval"}
        await me.attack("a sample for others' workers", "/register_episode", episode | {"client_uuid": "w"})
        me.note("registered", episode=episode["episode_uuid"])
        await me.ask("/register_episode", episode)
    options = ("--task", TASK, "--pool", me.who, "--client-uuid", me.who, "--server", me.address())
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinkerscript", "worker", *options, "--wait", "20"),
        env=os.environ | {CLIENT_TOKEN: me.token},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = b"it goes on"
    with suppress(TimeoutError):
        said, _ = await asyncio.wait_for(worker.communicate(), WORKER_S)
    if worker.returncode is None:
        worker.kill()
        await worker.wait()
    executed = [mark for mark in marks if Path(mark).exists()]
    me.note("worker", code=worker.returncode, said=said[-500:].decode(), executed=executed)
    await me.pause(20.0)


# Bodies

VALUES = (
    *("null", "[]", "{}", "-1", "1.5", "1e400", "NaN", "-Infinity", "true", '""', '"\\ud800"', "9" * 400),
    *('"' + "x" * 10_000 + '"', "[" * 500 + "]" * 500, '{"a":' * 200 + "1" + "}" * 200, '"ENGINE.ROLLING"'),
)
FIELDS = (
    *("client_uuid", "episode_uuid", "attempt", "workflow_output", "episode_type", "wait_s", "max_episodes"),
    *("allow_discard_timeout", "failure", "payload", "messages", "model", "n", "max_tokens", "temperature"),
    *("tools", "stop", "yaml_as_string", "episode_uuids", "limit", "after", "claim_request_id", "pool"),
)


def malformed_bodies(rng: random.Random, count: int) -> Iterator[bytes]:
    """Bodies that no careful client would send."""
    known = {
        **{"client_uuid": '"c"', "episode_uuid": '"e"', "attempt": "1", "model": '"policy"'},
        "workflow_output": '{"reward": 1.0, "metadata": {"a": [1, {"b": null}]}}',
        "messages": '[{"role": "user", "content": "x"}]',
    }
    good = _json(known)
    for _ in range(count):
        kind, at = rng.randrange(6), rng.randrange(len(good))
        data = {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.randrange(1, 6))}
        match kind:
            case 0:
                yield rng.randbytes(rng.randrange(300))
            case 1:
                yield good[:at]
            case 2:
                yield good[:at] + rng.randbytes(2) + good[at + 1 :]
            case 3:
                yield rng.choice(VALUES).encode()
            case 4:
                yield _json(data)
            case _:
                yield _json(known | data)


def _json(values: dict[str, str]) -> bytes:
    """An object of values that are JSON, or hardly so."""
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}").encode()


PATHS = (
    *("/claim_episode", "/end_episode", "/abort_episode", "/heartbeat_episode", "/can_continue_episode"),
    *("/register_episode", "/register_episodes", "/is_episode_claimed", "/replay_latest_llm_call"),
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
)
FOR_ADMINS = (
    *("/sync_train_config", "/start_engine", "/stop_engine", "/update_engine_status", "/get_episode_buffer"),
    *("/failed_episodes/retry", "/failed_episodes/drop"),
)


async def babbler(me: Hostile) -> None:
    """Garbage for every endpoint, and what only the admin may."""
    for body in malformed_bodies(me.rng, 8):
        await me.ask(me.rng.choice(PATHS), body)
    await me.attack("the admin's", me.rng.choice(FOR_ADMINS), {"episode_uuids": list(me.seen)})
    await me.pause(0.4)


# Sockets

HEAD = b"POST /claim_episode HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


async def slow(me: Hostile) -> None:
    """Hundreds of connections whose requests do not arrive: none, heads that trickle, bodies that stop."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SOCKETS):
            tasks.create_task(_socket(me))


async def _socket(me: Hostile) -> None:
    bodies = b"Content-Length: 1000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"
    sent = me.rng.choice([b"", HEAD[:20], HEAD, *(HEAD + body for body in bodies)])
    trickles = me.rng.random() < 0.5
    while True:
        async with _connected(me) as connection:
            if connection is not None:
                with suppress(OSError):
                    await _dawdle(*connection, sent, trickles=trickles)
        await me.pause(1.0)


async def _dawdle(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes, *, trickles: bool
) -> None:
    """Until the server closes the connection."""
    if not trickles:
        writer.write(sent)
    closed = asyncio.ensure_future(reader.read())
    for byte in sent if trickles else b"":
        writer.write(bytes([byte]))
        await asyncio.wait({closed}, timeout=0.5)
        if closed.done():
            break
    await closed


@asynccontextmanager
async def _connected(me: Hostile) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter] | None]:
    """A connection; None if the server is down."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", me.port())
    except OSError:
        yield None
        return
    began = time.monotonic()
    try:
        yield reader, writer
    finally:
        writer.close()
        me.note("socket", seconds=round(time.monotonic() - began, 2))


UNREAD = 210
"""More than there may be connections."""


async def silent(me: Hostile) -> None:
    """Connections that ask for more than the kernel keeps, and read nothing of it."""
    asked = f"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {me.token}\r\n\r\n"
    loop, began = asyncio.get_running_loop(), time.monotonic()
    with ExitStack() as connections:
        for _ in range(UNREAD):
            client = connections.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            with suppress(OSError):  # The server is down, or does not want it.
                await loop.sock_connect(client, ("127.0.0.1", me.port()))
                await loop.sock_sendall(client, 64 * asked.encode())
        for _ in range(4):
            await me.knock()
            await me.pause(1.0)
    me.note("socket", seconds=round(time.monotonic() - began, 2))


HEAD_BYTES = 2**21
"""More than the server and the kernel may take of a head."""


async def endless(me: Hostile) -> None:
    """Heads of requests without an end: one header, or many."""
    async with asyncio.TaskGroup() as tasks:
        for piece in (b"x" * 2**14, b"X: x\r\n" * 2**11):
            for _ in range(2):
                tasks.create_task(_endless_head(me, piece))
        tasks.create_task(me.knock())
    await me.pause(0.5)


async def _endless_head(me: Hostile, piece: bytes) -> None:
    async with _connected(me) as connection:
        if connection is None:
            return
        reader, writer = connection
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
        sent, answer = 0, b""
        with suppress(OSError):
            writer.write(HEAD + b"X: ")
            while sent < HEAD_BYTES and not reader.at_eof():
                writer.write(piece)
                await writer.drain()
                sent += len(piece)
            answer = await reader.read()
        me.note("head", sent=sent, whole=sent >= HEAD_BYTES, status=answer[9:12].decode("latin-1"))


WAYS: dict[str, Callable[[Hostile], Awaitable[None]]] = {
    way.__name__: way
    for way in (
        *(liar, thief, impostor, failer, hoarder, registrar, smuggler, babbler),
        *(slow, silent, endless),
    )
}
"""Name -> what such a client does again and again. Another one is a function here, and its name in one of the
conductor's `PROCESSES`: the runs start it, give it a token, and check what it noted."""


async def misbehave(options: argparse.Namespace) -> None:
    log = Lines(options.run_dir / HOSTILE)

    async def forever(who: str) -> None:
        me = Hostile(who, options, log)
        while True:
            await WAYS[who](me)

    async with asyncio.TaskGroup() as tasks:
        for who in options.ways:
            tasks.create_task(forever(who))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-reward", type=float, default=MAX_REWARD, help="what the server accepts")
    parser.add_argument("--as", dest="ways", action="append", choices=WAYS, required=True)
    asyncio.run(misbehave(parser.parse_args()))


if __name__ == "__main__":
    main()

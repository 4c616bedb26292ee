"""The whole server against a naive model: random requests over its HTTP, with its trainer on the link.

What `test_episodes.py` does to the book alone, this does to the server as clients, trainer and operator meet
it: routes, keys, ledger, gateway and link. The server's clock is the test's, and it restarts from its files.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from interchange_helpers import DEADLINE_S, consumed, run_config
from tinkerscript.access_tokens import Roles
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.server.app import InterchangeServer, create_server
from tinkerscript.testing import ScriptedSampler
from tinkerscript.trainer_link.framing import LinkTimes
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome
from tinkerscript.trainer_link.trainer_end import TrainerLink
from tiny_tokenizer import write_model_folder

CLIENTS = st.sampled_from(["ann", "bob"])
UUIDS = st.sampled_from([f"e{number}" for number in range(4)])
POOLS = st.sampled_from(["", "ann"])
CLAIM_PATHS = ("/end_episode", "/abort_episode", "/can_continue_episode", "/heartbeat_episode")
MAX_ATTEMPTS = 3
LEASE_S = 10.0
PATIENT = LinkTimes(heartbeat_s=0.05, silence_s=1e6, grace_s=1e6, resend_s=0.1)
"""The machine's clock is not the loop's: between two steps any time may pass, and no trainer is missed."""

MODELS = tempfile.TemporaryDirectory(prefix="model-")
MODEL = write_model_folder(Path(MODELS.name))


@dataclass
class Held:
    """A claim that some client was given, as the client remembers it."""

    uuid: str
    attempt: int
    client: str
    key: str
    renewed: float
    alias: str = ""
    """The name that stands for the key, if the claim was made the first version's way."""

    calls: int = 0
    """Model calls that were answered."""


@dataclass
class Modelled:
    """What a reader of docs/protocol.md expects of one episode."""

    pool: str
    order: int
    state: str = "registered"
    holder: Held | None = None
    attempts: int = 0
    answer: str = ""
    consumed: bool = False
    failures: list[str] = field(default_factory=list[str])

    def holds(self, claim: Held) -> bool:
        return self.state == "claimed" and self.holder is claim


class ServerLikeTheModel(RuleBasedStateMachine):
    """Every reply of the server is what the model expects, and every outcome reaches the trainer once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.model: dict[str, Modelled] = {}
        self.claims: list[Held] = []
        self.requests: dict[tuple[str, str], list[Held]] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="api-")
        self.runner = asyncio.Runner()
        self.runner.run(self.start())

    def teardown(self) -> None:
        self.runner.run(self.stop())
        self.runner.close()
        self.folder.cleanup()

    # The server, its trainer and its clients

    async def start(self) -> None:
        self.server_up = AsyncExitStack()
        self.trainer_up = AsyncExitStack()
        sampler = ScriptedSampler(lambda prompt: [72, 105, prompt[-1]])
        await self.start_server()
        self.link = await self.trainer_up.enter_async_context(
            TrainerLink(self.address, trainer_id="t", model="m", sampler=sampler.sample, times=PATIENT)
        )
        await self.link.resume([])

    @property
    def address(self) -> str:
        return f"ipc://{self.folder.name}/link"

    async def start_server(self) -> None:
        run_dir = Path(self.folder.name)
        ledger = SqliteLedger(run_dir / LEDGER_FILE)
        self.server_up.push_async_callback(ledger.close)
        self.server: InterchangeServer = await create_server(
            run_config(MODEL, max_attempts=MAX_ATTEMPTS, max_claim_s=1e6),
            run_dir,
            ledger=ledger,
            roles=Roles(),
            times=PATIENT,
            clock=lambda: self.now,
            wall=lambda: self.now,
        )
        self.server.link.bind(self.address)
        running = asyncio.create_task(self.server.run())
        self.server_up.push_async_callback(self.end_of, running)
        transport = httpx.ASGITransport(self.server.app, raise_app_exceptions=False)
        self.http = await self.server_up.enter_async_context(
            httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=DEADLINE_S)
        )

    async def end_of(self, running: asyncio.Task[None]) -> None:
        self.server.stop_waiting()
        running.cancel()
        (end,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(end, asyncio.CancelledError), end

    async def stop(self) -> None:
        await self.trainer_up.aclose()
        await self.server_up.aclose()

    def post(self, path: str, status: int = 200, key: str = "", **body: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        reply = self.runner.run(self.http.post(path, json=body, headers=headers))
        assert reply.status_code == status, (path, body, reply.text)
        return reply.json()

    def get(self, path: str) -> dict[str, Any]:
        reply = self.runner.run(self.http.get(path))
        assert reply.status_code == 200, reply.text
        return reply.json()

    # What clients ask for

    @rule(uuid=UUIDS, pool=POOLS)
    def register(self, uuid: str, pool: str) -> None:
        known = self.model.get(uuid)
        other = known is not None and known.pool != pool
        reply = self.post(
            "/register_episode", 409 if other else 200, episode_uuid=uuid, client_uuid=pool, payload={"n": 1}
        )
        assert reply["success"] is not other
        self.model.setdefault(uuid, Modelled(pool, order=len(self.model)))

    @rule(
        client=CLIENTS,
        pool=POOLS,
        request=st.sampled_from(["", "r1", "r2", "r3"]),
        number=st.integers(1, 2),
        first_version=st.booleans(),
    )
    def claim(self, client: str, pool: str, request: str, number: int, first_version: bool) -> None:
        reply = self.post(
            "/claim_episode",
            client_uuid=client,
            pool=pool,
            claim_request_id=request,
            max_episodes=number,
            sends_key=not first_version,
            allow_discard_timeout=LEASE_S,
        )
        got = [reply, *reply["more"]] if reply["success"] else []
        known = self.requests.get((client, request)) if request else None
        if known is None:
            known = self.expect_claims(client, pool, got[:number], number)
            if request and known:
                self.requests[client, request] = known
        held = [claim for claim in known if self.model[claim.uuid].holds(claim)]
        for claim in held:
            claim.renewed = self.now
        assert [(claim.uuid, claim.attempt, claim.key) for claim in held] == [
            (real(each["episode_uuid"]), each["attempt"], each["openai_api_key"]) for each in got
        ]
        assert all(("~" in each["episode_uuid"]) is first_version for each in got)

    def expect_claims(self, client: str, pool: str, got: list[dict[str, Any]], number: int) -> list[Held]:
        """The claims of a new request; keys are the server's to choose, and new."""
        oldest = sorted(
            (each.order, uuid)
            for uuid, each in self.model.items()
            if each.state == "registered" and each.pool == pool
        )
        assert [real(each["episode_uuid"]) for each in got] == [uuid for _, uuid in oldest[:number]]
        made = list[Held]()
        for each in got:
            episode = self.model[real(each["episode_uuid"])]
            episode.attempts += 1
            claim = Held(
                real(each["episode_uuid"]), episode.attempts, client, each["openai_api_key"], self.now
            )
            claim.alias = each["episode_uuid"] if "~" in each["episode_uuid"] else ""
            assert claim.key not in {known.key for known in self.claims}
            episode.state, episode.holder = "claimed", claim
            made.append(claim)
            self.claims.append(claim)
        return made

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), answer=st.sampled_from(["x", "y"]))
    def end(self, data: st.DataObject, answer: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        each = self.model[claim.uuid]
        if each.holds(claim):
            each.state, each.answer = "ended", answer
            status = 200
        else:
            counted = each.holder is claim and each.state in ("ended", "accepted")
            status = 200 if counted and each.answer == answer else 409
        self.post("/end_episode", status, workflow_output=output(claim, answer), **named(claim))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), path=st.sampled_from(CLAIM_PATHS), how=st.sampled_from(["none", "forged", "other"]))
    def meddle(self, data: st.DataObject, path: str, how: str) -> None:
        """Somebody names a claim, without its key or with that of a claim of another episode."""
        claim = data.draw(st.sampled_from(self.claims))
        other = data.draw(st.sampled_from(self.claims))
        if how == "other" and other.uuid == claim.uuid:
            return
        keys = {"none": "", "forged": forged_key(claim.key), "other": other.key}
        body: dict[str, Any] = {"failure": {"kind": "no"}, "workflow_output": output(claim, "forged")}
        named_by_id = {"client_uuid": claim.client, "episode_uuid": claim.uuid, "attempt": claim.attempt}
        self.post(path, 409 if how == "other" else 401, key=keys[how], **(body | named_by_id))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        each = self.model[claim.uuid]
        repeated = len(each.failures) >= claim.attempt and each.failures[claim.attempt - 1] == "mine"
        if each.holds(claim):
            self.lose(each, "mine")
            repeated = True
        self.post("/abort_episode", 200 if repeated else 409, failure={"kind": "mine"}, **named(claim))

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), path=st.sampled_from(["/can_continue_episode", "/heartbeat_episode"]))
    def ask(self, data: st.DataObject, path: str) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        holds = self.model[claim.uuid].holds(claim)
        reply = self.post(path, **named(claim))
        assert reply["can_continue"] is holds
        assert bool(reply["reason"]) is not holds
        claim.renewed = self.now if holds else claim.renewed

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), forged=st.booleans())
    def call(self, data: st.DataObject, forged: bool) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        holds = self.model[claim.uuid].holds(claim)
        key = forged_key(claim.key) if forged else claim.key
        status = 401 if forged else 200 if holds else 409
        messages = [{"role": "user", "content": "1+1"}]
        self.post("/v1/chat/completions", status, key=key, model="policy", messages=messages)
        if status == 200:
            claim.calls += 1
            claim.renewed = self.now

    # What the trainer and an operator do

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uuid = data.draw(st.sampled_from([*self.model]))
        self.link.cancel([uuid], "enough")
        self.runner.run(self.link.flush())
        each = self.model[uuid]
        if each.state in ("registered", "claimed"):
            each.state = "failed"
            each.failures.append("cancelled")

    @precondition(lambda self: self.waits_for_the_trainer)
    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        uuid = data.draw(st.sampled_from(self.waits_for_the_trainer))
        outcome = self.runner.run(self.outcome_of(uuid))
        each = self.model[uuid]
        if each.state == "ended":
            assert isinstance(outcome, EpisodeAccepted)
            assert each.holder is not None
            assert (outcome.attempt, outcome.client_uuid) == (each.attempts, each.holder.client)
            assert outcome.reward == reward_of(each.holder.attempt, each.answer)
            assert len(outcome.calls) == each.holder.calls
            each.state = "accepted"
        else:
            assert isinstance(outcome, EpisodeFailed)
        each.consumed = True
        self.runner.run(self.link.commit(consumed({uuid: outcome})))

    @property
    def waits_for_the_trainer(self) -> list[str]:
        return [
            uuid
            for uuid, each in self.model.items()
            if each.state in ("ended", "failed") and not each.consumed
        ]

    async def outcome_of(self, uuid: str) -> Outcome:
        async with asyncio.timeout(DEADLINE_S):
            while uuid not in self.outcomes:
                self.outcomes |= {outcome.episode_uuid: outcome for outcome in await self.link.outcomes()}
        return self.outcomes[uuid]

    @precondition(lambda self: any(each.state == "failed" for each in self.model.values()))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """The trainer is there, so it was told of every failure: none is tried again behind its back."""
        uuid = data.draw(st.sampled_from([u for u, each in self.model.items() if each.state == "failed"]))
        self.runner.run(self.outcome_of(uuid))
        reply = self.post("/failed_episodes/retry", episode_uuids=[uuid, "nobody"])
        assert not reply["done"]
        assert reply["refused"].keys() == {uuid, "nobody"}

    @rule(client=CLIENTS)
    def a_client_dies(self, client: str) -> None:
        self.link.release_client(client, "killed")
        self.runner.run(self.link.flush())
        for each in self.model.values():
            if each.state == "claimed" and each.holder is not None and each.holder.client == client:
                self.lose(each, "worker_died")

    @rule(seconds=st.sampled_from([1.0, 6.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.runner.run(self.expire())
        for each in self.model.values():
            if each.state == "claimed" and each.holder and each.holder.renewed + LEASE_S <= self.now:
                self.lose(each, "lease_expired")

    async def expire(self) -> None:
        self.server.interchange.expire()
        await self.server.interchange.commit()

    @rule(now=st.integers(0, 3))
    def the_server_restarts(self, now: int) -> None:
        """Seldom: to start is the dearest step."""
        if now != 3:
            return

        async def restart() -> None:
            await self.server_up.aclose()
            await self.start_server()
            await self.link.flush()

        self.runner.run(restart())
        for each in self.model.values():
            if each.state == "claimed" and each.holder:
                each.holder.renewed = self.now

    def lose(self, each: Modelled, kind: str) -> None:
        each.failures.append(kind)
        each.state = "registered" if each.attempts < MAX_ATTEMPTS else "failed"

    # What is to be seen at any time

    @invariant()
    def the_buffer_equals_the_model(self) -> None:
        shown = {each["episode_uuid"]: each for each in self.post("/get_episode_buffer")["buffer"]}
        assert shown.keys() == {uuid for uuid, each in self.model.items() if not each.consumed}
        for uuid, status in shown.items():
            each = self.model[uuid]
            assert (status["episode_status"], status["attempt"]) == (each.state, each.attempts)
            assert [failure["kind"] for failure in status["failures"]] == each.failures

    @invariant()
    def the_counts_equal_the_model(self) -> None:
        counts = self.get("/get_engine_status")["episodes"]["train"]
        for state, number in counts.items():
            assert number == sum(each.state == state for each in self.model.values()), state


def named(claim: Held) -> dict[str, Any]:
    """A request of the claim: under its alias and no key, or under its key and nothing else."""
    return {"client_uuid": claim.client, "episode_uuid": claim.alias} if claim.alias else {"key": claim.key}


def real(name: str) -> str:
    """The episode that a uuid or an alias names."""
    return name.split("~")[0]


def forged_key(key: str) -> str:
    return key[:-2] + ("AA" if key[-2:] != "AA" else "BB")


def output(claim: Held, answer: str) -> dict[str, Any]:
    return {"reward": reward_of(claim.attempt, answer), "metadata": {"answer": answer}}


def reward_of(attempt: int, answer: str) -> float:
    return attempt + (0.5 if answer == "y" else 0.0)


CHAOS = settings.get_current_profile_name() == "chaos"
TestServerLikeTheModel = ServerLikeTheModel.TestCase
TestServerLikeTheModel.settings = settings(
    max_examples=210 if CHAOS else 10,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestServerLikeTheModel = pytest.mark.timeout(500)(TestServerLikeTheModel)

"""The client without I/O: requests, retries, refusals, rewards."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from clock import Clock
from interchange_helpers import until
from tinkerscript.client.async_client import AsyncTinkerScriptClient
from tinkerscript.client.episode import MAX_IN_FLIGHT, Episode, Heartbeats, Lease, as_output, renewed_by_task
from tinkerscript.client.exchange import WARN_AFTER_S, HttpRequest, Operation, Reply, Response, Timing, Wait
from tinkerscript.client.operations import Operations, workflow_output
from tinkerscript.client.runner import Runner
from tinkerscript.client.settings import ClientSettings, make_settings
from tinkerscript.client.sync_client import TinkerScriptClient
from tinkerscript.errors import ClaimLostError, NoEpisodeError, RequestRefusedError, ServerUnreachableError
from tinkerscript.protocol import WorkflowOutput

EPISODE = Episode("e1", 2, {}, "train", "g", "http://x/v1", "secret-key", "me", 3)


@dataclass(frozen=True)
class Done:
    """What an operation returned."""

    value: Any


class Driven:
    """An operation, driven by hand: `request` is what it sends next."""

    def __init__(self, operation: Operation[Any]) -> None:
        self._operation = operation
        self.request = self._next_request()

    def answered(self, status: int, headers: dict[str, str], body: bytes) -> Wait | Done:
        return self._reply(Response(status, headers, body))

    def unreachable(self, error: Exception) -> Wait:
        step = self._reply(error)
        assert isinstance(step, Wait)
        return step

    def _reply(self, reply: Reply) -> Wait | Done:
        try:
            step = self._operation.send(reply)
        except StopIteration as done:
            return Done(done.value)
        assert isinstance(step, Wait)
        self.request = self._next_request()
        return step

    def _next_request(self) -> HttpRequest:
        request = next(self._operation)
        assert isinstance(request, HttpRequest)
        return request


@pytest.fixture
def core(clock: Clock) -> Operations:
    settings = ClientSettings("http://server", "me", "token", timeout_s=10.0)
    return Operations(settings, Timing(clock, lambda low, high: high))


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


EMPTY = body(success=False, fail_cause="No available episodes to claim.")


def sent(exchange: Driven) -> dict[str, Any]:
    assert exchange.request.body is not None
    return json.loads(exchange.request.body)


def test_both_clients_have_the_same_operations() -> None:
    def names(client: type) -> set[str]:
        return {name for name in vars(client) if not name.startswith("_")}

    differ = names(AsyncTinkerScriptClient) ^ names(TinkerScriptClient)
    assert differ == {"claim", "finish_block", "reopen", "run", "send", "with_timeout"}, "what runs them"


def test_secrets_are_not_shown(core: Operations) -> None:
    assert "secret-key" not in repr(EPISODE)
    assert "token'" not in repr(core.settings)
    assert core.settings.headers()["Authorization"] == "Bearer token"


def test_a_claim_is_asked_for_until_there_is_one(core: Operations, clock: Clock) -> None:
    exchange = Driven(core.begin_episodes(1, "train", None))
    assert exchange.request.path == "/claim_episode"
    assert sent(exchange)["wait_s"] == 30.0
    assert sent(exchange)["client_uuid"] == "me"
    assert exchange.request.timeout_s > 30
    for delay_s in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0):
        clock.now += 1000
        assert exchange.answered(200, {}, EMPTY) == Wait(delay_s)
    told = exchange.answered(200, {}, body(success=False, fail_cause="booting", retry_after_s=2))
    assert told == Wait(2.5)
    syncing = body(success=False, fail_cause="Engine is syncing weights")
    assert isinstance(exchange.answered(200, {}, syncing), Wait)
    done = exchange.answered(200, {}, body(success=True, episode_uuid="e", attempt=1))
    assert isinstance(done, Done)
    assert [claim.episode_uuid for claim in done.value] == ["e"]


def test_a_claim_request_keeps_its_id_until_it_is_answered(core: Operations) -> None:
    exchange = Driven(core.begin_episodes(1, "any", 40.0))
    first = sent(exchange)
    assert len(first["claim_request_id"]) == 32
    exchange.unreachable(OSError("reset"))
    exchange.answered(503, {}, b"")
    exchange.answered(429, {"retry-after": "1"}, b"")
    assert sent(exchange) == first
    exchange.answered(200, {}, EMPTY)
    second = sent(exchange)["claim_request_id"]
    exchange.unreachable(OSError("reset"))
    assert sent(exchange)["claim_request_id"] == second
    for_ever = Driven(core.begin_episodes(1, "any", None))
    third = sent(for_ever)["claim_request_id"]
    for_ever.answered(200, {}, EMPTY)
    assert len({first["claim_request_id"], second, third, sent(for_ever)["claim_request_id"]}) == 4


def test_a_claim_waits_no_longer_than_asked(core: Operations, clock: Clock) -> None:
    exchange = Driven(core.begin_episodes(1, "any", 40.0))
    empty = body(success=False, fail_cause="No available episodes to claim.", retry_after_s=4)
    clock.now += 30
    assert exchange.answered(200, {}, empty) == Wait(5.0)
    assert sent(exchange)["wait_s"] == 5.0
    clock.now += 10
    with pytest.raises(NoEpisodeError, match="within 40 s"):
        exchange.answered(200, {}, empty)
    with pytest.raises(ValueError, match="wait_s"):
        Driven(core.begin_episodes(1, "any", -1))


def test_a_claim_that_cannot_succeed_is_refused(core: Operations) -> None:
    def claim() -> Driven:
        return Driven(core.begin_episodes(1, "any", None))

    with pytest.raises(RequestRefusedError, match="no such pool"):
        claim().answered(200, {}, body(success=False, fail_cause="no such pool"))
    with pytest.raises(RequestRefusedError, match="wrong token") as refused:
        claim().answered(401, {}, body(success=False, failure_reason="wrong token"))
    assert refused.value.status == 401
    with pytest.raises(RequestRefusedError, match="unexpected reply"):
        claim().answered(200, {}, b"<html>")
    with pytest.raises(RequestRefusedError, match="an HTML page, which no interchange server sends") as page:
        claim().answered(404, {"content-type": "text/html"}, b"<html>Not here</html>")
    assert "Not here" not in str(page.value)


def test_an_outage_is_bounded_and_forgotten_when_it_ends(core: Operations, clock: Clock) -> None:
    exchange = Driven(core.can_continue_episode(EPISODE))
    for _ in range(3):
        assert exchange.unreachable(OSError("reset")).delay_s <= 5
        clock.now += 4
    with pytest.raises(ServerUnreachableError, match="reset"):
        exchange.unreachable(OSError("reset"))
    claim = Driven(core.begin_episodes(1, "any", None))
    claim.unreachable(OSError("reset"))
    clock.now += 9
    claim.answered(200, {}, EMPTY)
    clock.now += 9
    assert claim.unreachable(OSError("reset")) == Wait(0.1)


def test_a_long_wait_is_explained(core: Operations, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    claim = Driven(core.begin_episodes(1, "any", None))
    clock.now += claim.unreachable(OSError("reset")).delay_s
    assert not caplog.messages, "it may be a moment"
    began = clock.now
    while (delay_s := claim.unreachable(ConnectionError("refused")).delay_s) and not caplog.messages:
        clock.now += delay_s
    assert clock.now - began <= WARN_AFTER_S
    assert caplog.messages == ["waiting for the server: refused; giving up after 10 s"]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again_when_it_says(core: Operations, status: int) -> None:
    exchange = Driven(core.end_episode(EPISODE, WorkflowOutput(reward=1.0)))
    assert exchange.answered(status, {"retry-after": "4"}, b"") == Wait(5.0)
    assert isinstance(exchange.answered(status, {"retry-after": "Wed, 21 Oct 2015"}, b""), Wait)


def test_no_time_limit_means_none(clock: Clock) -> None:
    core = Operations(ClientSettings("http://s", "me", timeout_s=None), Timing(clock))
    exchange = Driven(core.get_engine_status())
    for _ in range(2000):
        clock.now += 1e6
        assert exchange.unreachable(OSError()).delay_s <= 5


def test_an_end_names_its_claim_and_may_lose_it(core: Operations) -> None:
    def end() -> Driven:
        output = WorkflowOutput(reward=0.5, metadata={"a": 1})
        return Driven(core.end_episode(EPISODE, output, role_rewards={"rival": -0.5}))

    result = {"reward": 0.5, "is_success": None, "metadata": {"a": 1}, "role_rewards": {"rival": -0.5}}
    nothing = {"call_rewards": {}, "log_metrics": {}}
    assert sent(end()) == {
        **{"client_uuid": "me", "episode_uuid": "e1", "task_id": ""},
        "workflow_output": result | nothing,
    }
    assert end().request.key == "secret-key"
    for status in (401, 403, 404, 409, 410):
        with pytest.raises(ClaimLostError, match="expired"):
            end().answered(status, {}, body(success=False, failure_reason="the lease expired"))
    with pytest.raises(RequestRefusedError, match="too large"):
        end().answered(413, {}, body(success=False, failure_reason="too large"))
    with pytest.raises(RequestRefusedError, match="not stored"):
        end().answered(200, {}, body(success=False, failure_reason="not stored"))
    assert end().answered(200, {}, body(success=True)) == Done(None)


def test_rewards_of_single_calls_travel_with_the_result(core: Operations) -> None:
    """Those that the episode was told add up, under the call's id, with those of the end."""
    episode = replace(EPISODE, call_rewards={})
    episode.reward("chatcmpl-a", 0.5)
    episode.reward("a", 0.25)
    episode.reward("msg_b", -1.0)
    output = sent(Driven(core.end_episode(episode, rewards={"b": 0.5, "resp_c": 2.0})))["workflow_output"]
    assert (output["reward"], output["call_rewards"]) == (None, {"a": 0.75, "b": -0.5, "c": 2.0})
    result = WorkflowOutput(reward=1.0, call_rewards={"chatcmpl-a": 0.25, "d": 1.0})
    output = sent(Driven(core.end_episode(episode, result)))["workflow_output"]
    assert (output["reward"], output["call_rewards"]) == (1.0, {"a": 1.0, "b": -1.0, "d": 1.0})


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1.1e6])
def test_a_call_has_a_usable_reward(core: Operations, reward: float) -> None:
    episode = replace(EPISODE, call_rewards={})
    with pytest.raises(ValueError, match="'a'"):
        episode.reward("a", reward)
    assert not episode.call_rewards
    with pytest.raises(ValueError, match=r"call_rewards\.a"):
        Driven(core.end_episode(episode, 0.0, rewards={"a": reward}))


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), [1.0, float("nan")]])
def test_an_end_without_a_usable_reward_is_refused_here(core: Operations, reward: Any) -> None:
    with pytest.raises(ValueError, match="reward"):
        Driven(core.end_episode(EPISODE, WorkflowOutput(reward=reward)))


def test_a_stale_claim_is_no_lost_one(core: Operations) -> None:
    episode = replace(EPISODE, lease=Lease())
    stale = body(can_continue=False, reason="stale: too old", stale=True)
    reply = Driven(core.can_continue_episode(episode)).answered(200, {}, stale)
    assert isinstance(reply, Done)
    assert (reply.value.can_continue, reply.value.stale) == (False, True)
    assert not episode.lease.is_over, "it can be given back"
    Driven(core.can_continue_episode(episode)).answered(200, {}, body(can_continue=False, reason="gone"))
    assert episode.lost


def test_an_abort_carries_its_reason(core: Operations) -> None:
    exchange = Driven(core.abort_episode(EPISODE, "ValueError: x", "task_error"))
    failure = {"kind": "task_error", "message": "ValueError: x", "attempt": 2}
    assert sent(exchange)["failure"].items() >= failure.items()


def test_arguments_replace_what_an_output_holds() -> None:
    output = WorkflowOutput(reward=1.0, is_success=False, metadata={"a": 1})
    merged = workflow_output(output, is_success=True, metadata=None, log_metrics={"m": 2.0})
    assert (merged.reward, merged.is_success, merged.metadata) == (1.0, True, {"a": 1})
    assert merged.log_metrics == {"m": 2.0}


@pytest.mark.parametrize(
    ("given", "flat"),
    [
        ({"turns": [1, 2, 6], "empty": [], "none": None, "right": True}, {"turns": 3.0, "right": 1.0}),
        ({"score": {"a": 0.5, "b": {"c": [1, 2]}}}, {"score/a": 0.5, "score/b/c": 1.5}),
        ([0.5, {"x": 1}], {"0": 0.5, "1/x": 1.0}),
        (None, {}),
    ],
)
def test_metrics_as_lists_and_objects_become_numbers(given: Any, flat: dict[str, float]) -> None:
    assert WorkflowOutput(reward=1.0, log_metrics=given).log_metrics == flat
    merged = workflow_output(WorkflowOutput(reward=1.0), is_success=None, metadata=None, log_metrics=given)
    assert merged.log_metrics == flat


@pytest.mark.parametrize(
    "metrics", [{str(n): 1 for n in range(257)}, {"a": {"b": {"c": {"d": {"e": {"f": {}}}}}}}, {"a": "high"}]
)
def test_metrics_that_nobody_can_log_are_refused(metrics: Any) -> None:
    with pytest.raises(ValidationError, match="log_metrics"):
        WorkflowOutput(reward=1.0, log_metrics=metrics)


def test_what_a_rollout_may_return() -> None:
    assert as_output(1) == as_output(True) == WorkflowOutput(reward=1.0)
    assert as_output((0.5, {"a": "b"})) == WorkflowOutput(reward=0.5, metadata={"a": "b"})
    output = WorkflowOutput(reward=[1.0, 2.0])
    assert as_output(output) is output
    for wrong in (None, "1", (1.0,), ("a", {})):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            as_output(wrong)


def test_settings_are_checked() -> None:
    assert make_settings("http://s/", None, None, 1.0, 60.0).server_url == "http://s"
    assert len(make_settings("http://s", None, None, 1.0, 60.0).client_uuid) == 32
    with pytest.raises(ValueError, match="must start with http"):
        TinkerScriptClient("localhost:1")
    with TinkerScriptClient("http://localhost:1") as client, pytest.raises(ValueError, match="concurrency=0"):
        Runner(lambda episode: 1.0, client=client, concurrency=0)


def test_a_client_without_a_token_finds_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TINKERSCRIPT_CLIENT_TOKEN", raising=False)
    assert TinkerScriptClient("http://h").settings.token is None
    file = tmp_path / "token"
    monkeypatch.setenv("TINKERSCRIPT_CLIENT_TOKEN_FILE", str(file))
    for text, problem in ((None, "cannot read"), (" \n", "is empty")):
        if text:
            file.write_text(text)
        with pytest.raises(ValueError, match=problem):
            TinkerScriptClient("http://h")
    file.write_text("from-a-file\n")
    assert TinkerScriptClient("http://h").settings.token == "from-a-file"
    monkeypatch.setenv("TINKERSCRIPT_CLIENT_TOKEN", "of the environment")
    tokens = {None: "of the environment", "": "", "given": "given"}
    assert {given: TinkerScriptClient("http://h", token=given).settings.token for given in tokens} == tokens


def test_the_ready_made_client_is_imported_without_reading_the_environment() -> None:
    program = (
        "import os; os.environ['TINKERSCRIPT_SERVER_URL'] = 'no-url';"
        "from tinkerscript.client import TinkerScriptClient, tinkerjet_remote;"
        "assert type(tinkerjet_remote) is TinkerScriptClient;"
        "os.environ['TINKERSCRIPT_SERVER_URL'] = 'http://late/';"
        "print(tinkerjet_remote.settings.server_url)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "http://late\n"


def test_a_heartbeat_waits_no_longer_than_its_lease_allows(clock: Clock) -> None:
    """A third of the lease, whatever the server asks for and however often it failed."""
    core = Operations(ClientSettings("http://s", "me", timeout_s=None), Timing(clock, lambda low, high: high))
    episode = replace(EPISODE, allow_discard_timeout=12.0)
    busy = {"retry-after": "60"}
    assert Driven(core.can_continue_episode(episode)).answered(503, busy, b"") == Wait(75.0)
    beat = Driven(core.heartbeat_episode(episode))
    assert beat.answered(503, busy, b"") == Wait(4.0)
    assert max(beat.unreachable(OSError("reset")).delay_s for _ in range(20)) == 4.0


async def test_a_task_goes_on_renewing_after_a_failure_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    episode = replace(EPISODE, allow_discard_timeout=0.01, lease=Lease())
    beats: list[int] = []

    async def heartbeat(episode: Episode) -> None:
        beats.append(len(beats))
        if len(beats) == 1:
            raise ServerUnreachableError("no server")

    async with renewed_by_task(episode, heartbeat):
        await until(lambda: len(beats) == 2)
    assert "could not be renewed; trying again: no server" in caplog.text


def test_a_server_may_ask_for_a_minute_at_most() -> None:
    timing = Timing(lambda: 0.0, lambda low, high: low)
    assert [timing.delay(0, asked) for asked in (0.0, 59.0, 60.0, 3600.0)] == [0.0, 59.0, 60.0, 60.0]
    assert [timing.delay(failures) for failures in (0, 1, 5, 6, 999)] == [0.05, 0.1, 1.6, 2.5, 2.5]


async def test_a_claim_that_is_closed_leaves_its_place_to_the_next() -> None:
    begun: list[str] = []

    async def heartbeat(episode: Episode) -> None:
        begun.append(episode.episode_uuid)
        if episode.episode_uuid != "last":
            await asyncio.get_running_loop().create_future()

    heartbeats = Heartbeats(heartbeat)
    short = replace(EPISODE, allow_discard_timeout=0.01)
    running = asyncio.create_task(heartbeats.run())
    async with asyncio.timeout(20):
        with ExitStack() as held:
            for _ in range(MAX_IN_FLIGHT + 1):
                held.enter_context(heartbeats.holding(short))
            await until(lambda: len(begun) == MAX_IN_FLIGHT)
        with heartbeats.holding(replace(short, episode_uuid="last")):
            await until(lambda: "last" in begun)
    running.cancel()
    await asyncio.wait([running])

"""Every endpoint over real HTTP, with a real trainer's link, and the gateway in between."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from gated_sampler import GatedSampler

from interchange_helpers import (
    FAST,
    collect,
    consumed,
    eventually,
    new_episode,
    new_episodes,
    run_config,
    stored_outcomes,
    trainer,
    until,
)
from interchange_setup import OUTPUT, Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.addresses import read_server_info
from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.protocol import NO_EPISODES, RUN_FINISHED, WEIGHT_SYNCING
from tinkerscript.server.episodes.record import SERVER_KINDS
from tinkerscript.server.process import running_server
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed


async def test_the_path_of_one_episode(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="tinkerscript")
    await setup.link.register([new_episode("e", "eval", b'{"input": "1+1"}')])
    claim = await setup.claim(episode_type="eval")
    assert claim.success
    assert (claim.episode_uuid, claim.attempt, claim.payload) == ("e", 1, {"input": "1+1"})
    assert claim.openai_base_url == f"{setup.url}/v1"
    reply = await setup.call(claim.openai_api_key)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["finish_reason"] == "stop"
    assert (await setup.status()).episodes["eval"].claimed == 1
    await setup.post("/end_episode", client_uuid="c", episode_uuid="e", attempt=1, workflow_output=OUTPUT)
    outcomes = await collect(setup.link, 1)
    outcome = outcomes["e"]
    assert isinstance(outcome, EpisodeAccepted)
    assert (outcome.reward, outcome.client_uuid, len(outcome.calls)) == (1.0, "c", 1)
    assert outcome.calls[0].policy_version == 4
    assert outcome.calls[0].sampled_ids[:2].tolist() == [72, 105]
    assert outcome.metadata == {"answer": "2"}
    assert (await setup.status()).episodes["eval"].ended == 1
    await setup.link.commit(consumed(outcomes, step=0))
    assert (await setup.status()).episodes["eval"].accepted == 1
    assert await setup.metric('tinkerscript_results_accepted_total{type="eval"}') == 1
    assert await setup.metric("tinkerscript_model_calls_total") == 1
    assert await setup.metric("tinkerscript_sampled_tokens_total") == 3
    assert await setup.metric("tinkerscript_claims_total") == 1
    assert stored_outcomes(setup.run_dir / LEDGER_FILE) == {"e": "accepted"}
    assert "ts-" in claim.openai_api_key
    assert "ts-" not in caplog.text, "no key is in the log"


async def test_a_result_rewards_single_calls_of_its_claim(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The total is the episode's reward, and the trainer gets what each call earned.

    Forged ids read no calls again: a claim's calls may be 128 MiB, and reading them holds up everybody.
    """
    await setup.link.register([new_episode("e", "train", b"{}"), new_episode("f", "train", b"{}")])
    claim, other = await setup.claim(), await setup.claim()
    replies = [(await setup.call(claim.openai_api_key, text)).json()["id"] for text in ("1+1", "2+2")]
    foreign = (await setup.call(other.openai_api_key)).json()["id"]
    end: dict[str, Any] = {"client_uuid": "c", "episode_uuid": "e", "attempt": 1}
    with monkeypatch.context() as patched:
        patched.delattr(SqliteLedger, "calls")
        for unknown in (foreign, "chatcmpl-none"):
            output = {"call_rewards": {unknown: 1}}
            reason = (await setup.post("/end_episode", 422, **end, workflow_output=output))["failure_reason"]
            assert f"{unknown.removeprefix('chatcmpl-')!r} is not a model call of this claim" in reason
            assert replies[-1].removeprefix("chatcmpl-") in reason, "it names some that are"
    output = {"reward": 1.0, "call_rewards": {replies[0]: 0.25, replies[1]: -0.5}}
    for _ in range(2):
        await setup.post("/end_episode", **end, workflow_output=output)
    again = await setup.post(
        "/end_episode", 409, **end, workflow_output=output | {"call_rewards": {replies[0]: 0.5}}
    )
    assert "another result" in again["failure_reason"]
    outcome = (await collect(setup.link, 1))["e"]
    assert isinstance(outcome, EpisodeAccepted)
    assert outcome.reward == 0.75
    assert outcome.call_rewards == dict(
        zip((call.call_id for call in outcome.calls), (0.25, -0.5), strict=True)
    )


async def test_only_the_key_of_a_claim_ends_aborts_and_renews_it(tmp_path: Path, byte_model: Path) -> None:
    """Names are public, and every client has the same token."""
    tokens = {CLIENT_TOKEN: "client-secret-of-many", ADMIN_TOKEN: "admin-secret-of-many"}
    url = "https://train.example.org/"
    async with serving(tmp_path, byte_model, environ=tokens, public_base_url=url) as setup:
        await setup.link.register(new_episodes("e", "f"))
        setup.http.headers["Authorization"] = "Bearer client-secret-of-many"
        claim = await setup.claim()
        assert claim.openai_base_url == "https://train.example.org/v1"
        other = await setup.post("/claim_episode", client_uuid="thief", sends_key=False)
        assert (claim.episode_uuid, other["episode_uuid"]) == ("e", "f"), "no alias where tokens are needed"
        body = {
            "client_uuid": "c",
            "episode_uuid": "e",
            "workflow_output": OUTPUT,
            "failure": {"kind": "theft"},
        }
        for path in ("/end_episode", "/abort_episode", "/can_continue_episode", "/heartbeat_episode"):
            for key, status, reason in (
                (tokens[CLIENT_TOKEN], 403, "does not open a claim"),
                (tokens[ADMIN_TOKEN], 403, "does not open a claim"),
                ("wrong", 401, "no claim of this server has this key"),
                (claim.openai_api_key[:-1], 401, "no claim of this server has this key"),
                (other["openai_api_key"], 409, "the request names episode 'e'"),
            ):
                headers = {"Authorization": f"Bearer {key}"}
                reply = await setup.http.post(path, json=body, headers=headers)
                assert (reply.status_code, reason in reply.text) == (status, True), reply.text
        headers = {"Authorization": f"Bearer {claim.openai_api_key}"}
        more = await setup.http.post("/can_continue_episode", json={}, headers=headers)
        assert more.json()["can_continue"] is True, "the key suffices on its own"
        end = {"workflow_output": OUTPUT}
        assert (await setup.http.post("/end_episode", json=end, headers=headers)).status_code == 200
        assert set(await collect(setup.link, 1)) == {"e"}


async def test_a_model_call_of_a_claim_that_is_lost_meanwhile_is_not_recorded(
    tmp_path: Path, byte_model: Path
) -> None:
    sampler = GatedSampler()
    async with serving(tmp_path, byte_model, sampler=sampler) as setup:
        await setup.link.register(new_episodes("e"))
        claim = await setup.claim()
        sampler.go.clear()
        calling = asyncio.create_task(setup.call(claim.openai_api_key))
        await until(lambda: sampler.waiting == 1)
        setup.link.cancel(["e"], "enough")
        await collect(setup.link, 1)
        sampler.go.set()
        reply = await calling
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "claim_lost")
        assert await setup.metric("tinkerscript_model_calls_total") == 0


DEEP = b"[" * 64 + b"]" * 64
ENDS = {
    b'"is_success": true': "/abort_episode",
    b'"reward": 1e999': "workflow_output.reward",
    b'"reward": "high"': "workflow_output.reward",
    b'"reward": [9e5, 2e5]': "workflow_output.reward: must be a finite number from -1e+06 to 1e+06",
    b'"reward": 1, "role_rewards": {"policy": NaN}': "role_rewards.policy",
    b'"reward": 1, "role_rewards": {"rival": 1}': "'rival' is not a role that trains; this run trains policy",
    b'"reward": 1, "call_rewards": {"c": 1e999}': "call_rewards.c: must be a finite number",
    b'"reward": 1, "call_rewards": {"c": 9e5, "d": 9e5}': "workflow_output.reward: must be a finite number",
    b'"reward": 1, "call_rewards": {"c": 1, "msg_c": 1}': "two of the ids are of the same model call",
    b'"reward": 1, "call_rewards": {"c": 1}, "role_rewards": {"policy": 1}': "give one of them",
    b'"reward": 1, "log_metrics": {"a": NaN}': "log_metrics.a",
    b'"reward": 1, "log_metrics": {"a": [1e15, 9e15]}': "log_metrics.a: must be a finite number from -1e+15",
    b'"reward": 1, "log_metrics": {"a": ["high"]}': "log_metrics: Value error, a: a list holds",
    b'"reward": 1, "log_metrics": {"a": [1' + b"0" * 400 + b"]}": "a: the mean of the list is at most 1e+15",
    b'"reward": 1, "metadata": {"a": "\\ud800"}': "hex escape",
}
"""What is in a result -> what is said about it."""

MALFORMED: list[tuple[str, bytes, int, str]] = [
    ("/claim_episode", b"{}", 422, "client_uuid"),
    ("/claim_episode", b'{"client_uuid": "c", "allow_discard_timeout": NaN}', 422, "allow_discard_timeout"),
    ("/claim_episode", b'{"client_uuid": "\\ud800"}', 422, "hex escape"),
    ("/claim_episode", b"[]", 422, "the body"),
    ("/claim_episode", b"\xff\xfe", 422, "JSON"),
    ("/claim_episode", b"[" * 100_000, 422, "recursion"),
    ("/end_episode", b'{"client_uuid": "c", "episode_uuid": "e"}', 422, "workflow_output"),
    *(
        ("/abort_episode", b'{"episode_uuid": "e", "failure": {"kind": "%s"}}' % kind.encode(), 422, "own")
        for kind in SERVER_KINDS  # The trainer would take a cancellation for its own doing.
    ),
    *(
        ("/end_episode", b'{"episode_uuid": "e", "workflow_output": {%s}}' % body, 422, said)
        for body, said in ENDS.items()
    ),
    ("/register_episode", b'{"episode_uuid": "e", "payload": {"a": "\\ud800"}}', 422, "payload"),
    ("/register_episode", b'{"episode_uuid": "e", "payload": {"a": NaN}}', 422, "payload"),
    ("/register_episode", b'{"episode_uuid": "e", "payload": {"a": %s}}' % DEEP, 422, "more than 64 deep"),
    ("/update_engine_status", b'{"engine_status": "ENGINE.ON"}', 422, "engine_status"),
    ("/nowhere", b"{}", 404, "Not Found"),
    ("/health", b"{}", 405, "Method Not Allowed"),
]


async def test_malformed_requests_are_refused_by_name(setup: Setup) -> None:
    for path, body, status, named in MALFORMED:
        reply = await setup.http.post(path, content=body, headers={"Content-Type": "application/json"})
        case = f"{path} {body[:100]!r}: {reply.text}"
        assert reply.status_code == status, case
        assert reply.json()["success"] is False, case
        assert named in reply.json()["failure_reason"], case
    assert (await setup.http.get("/health")).json()["status"] == "ok"
    nowhere = await setup.http.post("/v1/nowhere", json={})
    assert (nowhere.status_code, nowhere.json()["error"]["message"]) == (404, "Not Found")
    batches = await setup.http.post("/v1/messages/batches", json={})
    error = {"type": "not_found_error", "message": "Not Found"}
    assert (batches.status_code, batches.json()) == (404, {"type": "error", "error": error})


async def test_can_continue_says_what_the_lag_rule_will_do(setup: Setup) -> None:
    await setup.link.register([*new_episodes("called", "uncalled", "later"), new_episode("score", "eval")])
    setup.link.set_status(policy_version=4, usable_versions=[3, 4])
    await setup.link.flush()
    first = await setup.claim(max_episodes=2, episode_type="train")
    assert (await setup.call(first.openai_api_key)).status_code == 200
    called = {"episode_uuid": "called", "attempt": 1}

    async def may_continue(name: str) -> dict[str, Any]:
        return await setup.post("/can_continue_episode", episode_uuid=name, attempt=1)

    setup.link.set_status(engine_status="ENGINE.WEIGHT_SYNCING")
    await setup.link.flush()
    refused = await setup.claim(episode_type="train")
    assert (refused.success, refused.fail_cause) == (False, WEIGHT_SYNCING)
    assert (await setup.call(first.openai_api_key)).status_code == 200, "running episodes go on"
    assert await may_continue("called") == {
        "can_continue": True,
        "reason": "",
        "stale": False,
        "policy_version_at_claim": 4,
        "policy_version": 4,
    }
    setup.link.set_status(policy_version=5, usable_versions=[5], engine_status="ENGINE.ROLLING")
    await setup.link.flush()
    reply = await may_continue("called")
    assert (reply["can_continue"], reply["stale"], reply["policy_version"]) == (False, True, 5)
    assert "policy version 4 sampled a part of it" in reply["reason"]
    assert (await may_continue("uncalled"))["can_continue"], "its calls will be of the newest weights"
    assert (await setup.post("/heartbeat_episode", **called))["can_continue"], "its lease holds"
    await setup.post("/abort_episode", **called, failure={"kind": "stale"})
    assert (await setup.claim("next", episode_type="train")).episode_uuid == "called", (
        "to be sampled by weights that count"
    )
    setup.link.set_status(policy_version=5, usable_versions=[6])
    await setup.link.flush()
    held = await setup.claim(episode_type="train")
    assert held.fail_cause.startswith(WEIGHT_SYNCING)
    assert (await setup.claim(episode_type="any")).episode_uuid == "score", "evaluations never train"
    waiting = asyncio.create_task(setup.claim("waiting", wait_s=20))
    await setup.metric_becomes("tinkerscript_waiting_clients", 1)
    setup.link.set_status(policy_version=6)
    assert (await waiting).episode_uuid == "later"


async def test_samples_that_would_not_train_are_not_registered(setup: Setup) -> None:
    setup.link.set_status(client_samples=False)
    await setup.link.flush()
    refused = await setup.post("/register_episode", 409, episode_uuid="e", client_uuid="me")
    assert "samples of its task" in refused["failure_reason"]
    await setup.post("/register_episode", episode_uuid="e", client_uuid="me", episode_type="eval")
    await setup.post("/register_episode", episode_uuid="t")


async def test_a_finished_run_answers_every_claim_at_once(setup: Setup) -> None:
    await setup.link.register(new_episodes("a"))
    assert (await setup.claim("busy")).success
    polls = [asyncio.create_task(setup.claim(name, wait_s=60)) for name in ("busy", "idle")]
    await setup.metric_becomes("tinkerscript_waiting_clients", 2)
    fleet = (await setup.http.get("/fleet")).json()
    assert fleet["waiting_clients"] == 1, "a worker with claims that asks for more is not idle"
    setup.link.set_status(engine_status="ENGINE.OFFLINE", run_finished=True)
    for reply in await asyncio.gather(*polls):
        assert (reply.success, reply.run_finished, reply.fail_cause) == (False, True, RUN_FINISHED)
    assert (await setup.claim(wait_s=60)).run_finished
    assert (await setup.status()).run_finished
    async with trainer(link_address_of(setup)) as resumed:
        await resumed.flush()
        assert not (await setup.status()).run_finished
        assert not (await setup.claim()).run_finished


def link_address_of(setup: Setup) -> str:
    info = read_server_info(setup.run_dir)
    assert info is not None
    return info.link_address


async def test_a_resumed_run_gives_up_what_no_step_can_use_also_while_it_is_claimed(setup: Setup) -> None:
    source = EpisodeSource(setup.link, group_size=2)
    for step, group, names in ((1, "g", "ab"), (2, "h", "cd")):
        places = enumerate(names)
        planned = [PlannedEpisode("train", group, {}, position=at, episode_uuid=name) for at, name in places]
        await source.start(planned, step=step)
    await source.start([PlannedEpisode("eval", "v", {}, episode_uuid="v")], step=0)
    kinds = [*["train"] * 4, "eval"]
    claims = [await setup.claim(episode_type=kind) for kind in kinds]
    await setup.end(claims[2])
    async with trainer(link_address_of(setup)) as successor:
        history = await successor.resume([])
        assert [(each.episode_uuid, each.group_id, each.position) for each in history.planned] == [
            ("a", "g", 0),
            ("b", "g", 1),
        ]
        assert (history.planned_groups, history.next_position) == (1, 2)
        for claim in claims[3:]:
            refused = await setup.call(claim.openai_api_key)
            assert refused.status_code == 409
            assert "the run was resumed" in refused.text
        for claim in claims[:2]:
            assert (await setup.call(claim.openai_api_key)).status_code == 200
            await setup.end(claim)
        found = await collect(successor, 2)
        assert [*found] == ["a", "b"]
        assert all(isinstance(each, EpisodeAccepted) for each in found.values())
        assert (await successor.tally()).cancelled == 2


async def test_without_a_trainer_the_engine_is_offline_and_takes_a_config(
    tmp_path: Path, byte_model: Path
) -> None:
    text = "task: {name: examples/arithmetic.py@arithmetic}\nseed: 7\n"
    update = {"engine_status": "ENGINE.ROLLING"}
    async with (
        running_server(run_config(byte_model), tmp_path, environ={}, times=FAST) as (info, _),
        httpx.AsyncClient(base_url=info.url) as http,
    ):

        async def claim() -> dict[str, Any]:
            return (await http.post("/claim_episode", json={"client_uuid": "c"})).json()

        async def sync(text: str) -> tuple[int, str]:
            reply = await http.post("/sync_train_config", json={"yaml_as_string": text})
            assert reply.json()["success"] is (reply.status_code == 200)
            return reply.status_code, reply.json()["error"]

        async def offline() -> bool:
            status = (await http.get("/get_engine_status")).json()
            return not status["trainer_connected"] and status["engine_status"] == "ENGINE.OFFLINE"

        assert await sync(text) == (200, "")
        for bad, named in (
            (text + "ajet: {project_name: x}\n", "'ajet'"),
            ("a: !!python/object/apply:os.system ['true']", "YAML"),
            ("- 1", "mapping"),
        ):
            status, error = await sync(bad)
            assert (status, named in error) == (422, True), error
        assert (tmp_path / "synced_config.yaml").read_text() == text
        await http.post("/register_episode", json={"episode_uuid": "e"})
        refused = (await claim())["fail_cause"]
        assert refused.startswith(NO_EPISODES)
        assert "ENGINE.OFFLINE" in refused
        assert (await http.post("/update_engine_status", json=update)).json()["success"]
        assert (await claim())["success"]
        async with trainer(info.link_address) as link:
            await link.flush()
            assert (await http.post("/update_engine_status", json=update)).status_code == 409
            status, error = await sync(text)
            assert (status, "ENGINE.ROLLING" in error) == (409, True)
        await eventually(offline)


async def test_an_episode_that_no_reply_can_hold_fails_by_itself(tmp_path: Path, byte_model: Path) -> None:
    """As a server without a limit on nesting may have stored it."""
    deep = b'{"a": ' + b"[" * 250 + b"]" * 250 + b"}"
    async with serving(tmp_path, byte_model) as setup:
        await setup.link.register([new_episode("poisoned"), new_episode("whole", payload=b'{"input": 2}')])
    with closing(sqlite3.connect(tmp_path / LEDGER_FILE)) as connection, connection:
        poisoned = "(SELECT sample FROM episodes WHERE uuid = 'poisoned')"
        connection.execute(f"UPDATE samples SET payload = ? WHERE digest = {poisoned}", (deep,))
    async with serving(tmp_path, byte_model) as setup:
        nothing = await setup.claim(wait_s=20)
        assert "has failed; ask again" in nothing.fail_cause
        assert (await setup.claim(max_episodes=2, wait_s=20)).episode_uuid == "whole"
        outcome = (await collect(setup.link, 1))["poisoned"]
        assert isinstance(outcome, EpisodeFailed)
        assert outcome.failures[-1]["kind"] == "bad_payload"


async def test_one_server_for_a_run_folder(tmp_path: Path, byte_model: Path, setup: Setup) -> None:
    with pytest.raises(ConfigError, match="another interchange server"):
        async with running_server(run_config(byte_model), tmp_path, environ={}):
            raise AssertionError

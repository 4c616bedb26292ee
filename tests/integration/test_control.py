"""`tinkerscript control` and the client's methods for operators, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from interchange_helpers import collect, consumed, new_episodes
from interchange_setup import Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.cli import app
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.errors import RequestRefusedError, ServerUnreachableError
from tinkerscript.limits import Totals
from tinkerscript.trainer_link.messages import BatchProgress

TOKENS = {CLIENT_TOKEN: "client-token-of-tests", ADMIN_TOKEN: "admin-token-of-tests"}


@pytest.fixture
async def setup(tmp_path: Path, byte_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Setup]:
    for name, token in TOKENS.items():
        monkeypatch.setenv(name, token)
    async with serving(
        tmp_path, byte_model, environ=TOKENS, max_attempts=1, totals=Totals(pool_episodes=6)
    ) as made:
        yield made


async def control(setup: Setup, *arguments: str) -> Result:
    command = [*arguments, "--server", setup.url]
    return await asyncio.to_thread(CliRunner().invoke, app, command)


async def test_dead_letters_from_the_command_line(setup: Setup) -> None:
    setup.http.headers["Authorization"] = f"Bearer {TOKENS[CLIENT_TOKEN]}"
    await setup.post("/register_episode", episode_uuid="p", client_uuid="me")
    await setup.claim(pool="me")
    failure = {"kind": "task_error", "message": "boom\x1b[2J\r\nq  1 failures"}
    await setup.post("/abort_episode", episode_uuid="p", attempt=1, failure=failure)
    listed = await control(setup, "control", "failed")
    assert listed.stdout == r"p  1 failure  task_error: boom\x1b[2J q 1 failures" + "\n"
    retried = await control(setup, "control", "retry", "p", "nobody")
    assert (retried.exit_code, "nobody  refused: " in retried.stdout) == (1, True)
    dropped = await control(setup, "control", "drop", "p")
    assert (dropped.exit_code, dropped.stdout) == (0, "p  done\n"), dropped.stdout
    none = await control(setup, "control", "failed")
    assert (none.stdout, none.stderr) == ("", "no failed episodes\n")


async def test_the_engine_from_the_command_line(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = await control(setup, "control", "start")
    assert (refused.exit_code, "a trainer is connected already" in refused.stderr) == (2, True)
    stopped = await control(setup, "control", "stop")
    assert stopped.exit_code == 0, stopped.stderr
    await setup.link.stop_requested.wait()
    setup.link.set_status(engine_status="ENGINE.OFFLINE", failure="ConfigError: no such\x1b[2J model")
    await setup.link.flush()
    told = await control(setup, "status")
    assert r"ConfigError: no such\x1b[2J model" in told.stdout
    bad = tmp_path / "bad.yaml"
    bad.write_text("trainning: {}\n")
    unknown = await control(setup, "control", "start", str(bad), "--force")
    assert (unknown.exit_code, "trainning" in unknown.stderr) == (2, True)
    monkeypatch.setenv(ADMIN_TOKEN, TOKENS[CLIENT_TOKEN])
    barred = await control(setup, "control", "stop")
    assert (barred.exit_code, "admin token" in barred.stderr) == (2, True)


async def test_samples_and_the_batch_from_the_command_line(setup: Setup, tmp_path: Path) -> None:
    lines = [{"task_id": f"t{number}", "payload": {"n": number}} for number in range(2)]
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        made = await control(setup, "control", "register", str(file), "--pool", "me", "--group-size", "2")
        assert made.stdout == "4 episodes of 2 samples are in the pool 'me'\n"
    assert (await setup.status()).pools["me"].registered == 4
    file.write_text('{"task_id": "t"}\n')
    broken = await control(setup, "control", "register", str(file), "--pool", "me")
    assert (broken.exit_code, f"{file}, line 1: needs an object with" in broken.stderr) == (2, True)
    assert (await control(setup, "control", "batch")).stdout == "no batch is in progress\n"
    batch = BatchProgress(
        label="step 2",
        rule="groups",
        needed=4,
        have=1,
        episodes_ended=3,
        episodes_expected=8,
        groups_ahead={"me": 2},
    )
    setup.link.set_batch(batch, at_once=True)
    await setup.link.flush()
    shown = (await control(setup, "control", "batch")).stdout
    assert shown == "step 2: 1 of 4 groups\nme: 2 groups ahead (at most 4)\n"


async def test_a_client_registers_in_bulk_within_its_quota_and_looks_at_its_own(setup: Setup) -> None:
    token = TOKENS[CLIENT_TOKEN]
    samples = {f"t{number}": {"n": number} for number in range(4)}
    async with AsyncTinkerScriptClient(setup.url, client_uuid="me", token=token) as client:
        registering = asyncio.create_task(client.register_episodes(samples, group_size=2))
        episode = await client.begin_episode(pool="me", wait_s=20)
        assert await client.is_episode_claimed(episode.episode_uuid)
        assert (await setup.call(episode.openai_api_key)).status_code == 200
        call = await client.replay_latest_llm_call(episode)
        assert call.input["messages"] == [{"role": "user", "content": "1+1"}]
        for each in (episode, await client.begin_episode(pool="me", wait_s=20)):
            await client.end_episode(each, 1.0)
        assert not registering.done(), "two episodes are beyond the quota"
        await setup.link.commit(consumed(await collect(setup.link, 2)))
        made = await registering
        assert [len(uuids) for uuids in made.values()] == [2, 2, 2, 2]
        assert not await client.is_episode_claimed(made["t3"][1])
        assert not (await client.get_batch_progress()).collecting
        with pytest.raises(RequestRefusedError, match="other content"):
            await client.register_episodes({"t0": {"n": 9}}, group_size=2)
    more = {f"u{number}": {"n": number} for number in range(4)}
    async with AsyncTinkerScriptClient(setup.url, client_uuid="me", token=token, timeout_s=0.0) as hasty:
        with pytest.raises(ServerUnreachableError, match="holds 6 unfinished episodes"):
            await hasty.register_episodes(more, group_size=2)


async def test_a_finished_run_is_shown(setup: Setup) -> None:
    await setup.link.register(new_episodes("e"))
    setup.link.set_status(engine_status="ENGINE.OFFLINE", run_finished=True)
    await setup.link.flush()
    assert "the run is finished" in (await control(setup, "status")).stdout

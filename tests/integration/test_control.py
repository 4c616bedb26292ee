"""`tinkerscript control` and the client's methods for operators, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from interchange_helpers import collect, consumed
from interchange_setup import Setup, serving
from tinkerscript.access_tokens import ADMIN_TOKEN, CLIENT_TOKEN
from tinkerscript.cli import app
from tinkerscript.client import AsyncTinkerScriptClient
from tinkerscript.errors import RequestRefusedError, ServerUnreachableError
from tinkerscript.limits import Totals

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
    setup.link.set_status(failure="", run_finished=True)
    await setup.link.flush()
    assert "the run is finished" in (await control(setup, "status")).stdout
    bad = tmp_path / "bad.yaml"
    bad.write_text("trainning: {}\n")
    unknown = await control(setup, "control", "start", str(bad), "--force")
    assert (unknown.exit_code, "trainning" in unknown.stderr) == (2, True)
    monkeypatch.setenv(ADMIN_TOKEN, TOKENS[CLIENT_TOKEN])
    barred = await control(setup, "control", "stop")
    assert (barred.exit_code, "admin token" in barred.stderr) == (2, True)


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
        assert await client.register_episode({"n": 0}, task_id="t0", group_size=2) == made["t0"]
        assert not await client.is_episode_claimed(made["t3"][1])
        assert not (await client.get_batch_progress()).collecting
        with pytest.raises(RequestRefusedError, match="other content"):
            await client.register_episodes({"t0": {"n": 9}}, group_size=2)
    more = {f"u{number}": {"n": number} for number in range(4)}
    async with AsyncTinkerScriptClient(setup.url, client_uuid="me", token=token, timeout_s=0.0) as hasty:
        with pytest.raises(ServerUnreachableError, match="holds 6 unfinished episodes"):
            await hasty.register_episodes(more, group_size=2)

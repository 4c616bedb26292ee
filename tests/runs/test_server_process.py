"""The server as a process: ports, SIGKILL and restart, the parent's end, a clean shutdown."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from interchange_helpers import (
    DEADLINE_S,
    collect,
    consumed,
    eventually,
    new_episodes,
    run_config,
    trainer,
    until,
)
from tinkerscript.config import dump_config
from tinkerscript.trainer_link.keys import load_trainer_keys
from tinkerscript.trainer_link.messages import EpisodeAccepted

OUTPUT = {"reward": 1.0}


def write_config(folder: Path, model: Path, **interchange: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(run_config(model, **interchange)))
    return folder


@contextmanager
def server_process(run_dir: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "tinkerscript", "server", "--run-dir", str(run_dir), *options]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


async def listening(run_dir: Path, process: subprocess.Popen[str]) -> dict[str, Any]:
    """The server's addresses, once this process has written them."""

    def written() -> bool:
        assert process.poll() is None, process.communicate()[1]
        path = run_dir / "server.json"
        return path.exists() and json.loads(path.read_text())["pid"] == process.pid

    await until(written, "server.json")
    return json.loads((run_dir / "server.json").read_text())


async def claim(http: httpx.AsyncClient, client: str) -> dict[str, Any]:
    """Claim an episode; one may have to wait until the trainer has said Hello."""
    reply = await http.post("/claim_episode", json={"client_uuid": client, "sends_key": True, "wait_s": 20})
    assert reply.json()["success"], reply.text
    return reply.json()


async def end(http: httpx.AsyncClient, claimed: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {claimed['openai_api_key']}"}
    return await http.post("/end_episode", json={"workflow_output": OUTPUT}, headers=headers)


async def call(http: httpx.AsyncClient, claimed: dict[str, Any], *texts: str) -> httpx.Response:
    messages: list[dict[str, str]] = []
    for text in texts:
        messages.append({"role": "user" if len(messages) % 2 == 0 else "assistant", "content": text})
    return await http.post(
        "/v1/chat/completions",
        json={"model": "policy", "messages": messages},
        headers={"Authorization": f"Bearer {claimed['openai_api_key']}"},
    )


@pytest.mark.parametrize("method", ["ipc", "tcp"])
async def test_a_run_goes_on_over_a_kill_of_the_server(tmp_path: Path, byte_model: Path, method: str) -> None:
    """Over TCP with keys, which outlive the server. The path of the run is too long for that of a socket."""
    run_dir = write_config(tmp_path / ("long" * 30), byte_model, interchange_method=method)
    with server_process(run_dir) as first:
        info = await listening(run_dir, first)
        keys = load_trainer_keys(Path(info["link_keys"])) if method == "tcp" else None
        if method == "ipc":
            socket_path = Path(info["link_address"].removeprefix("ipc://"))
            assert not socket_path.is_relative_to(run_dir)
            assert socket_path.parent.stat().st_mode & 0o077 == 0
        assert first.stdin is not None
        first.stdin.close()  # It was not asked to watch its parent.
        async with (
            trainer(info["link_address"], keys=keys) as link,
            httpx.AsyncClient(base_url=info["url"]) as http,
        ):
            await link.resume([])
            await link.register(new_episodes("ended", "running", "waiting"))
            done, running = await claim(http, "c"), await claim(http, "d")
            assert (await call(http, done, "1+1")).status_code == 200
            reply = (await call(http, running, "1+1")).json()["choices"][0]["message"]["content"]
            assert (await end(http, done)).status_code == 200
            first.send_signal(signal.SIGKILL)
            assert await asyncio.to_thread(first.wait, DEADLINE_S) == -signal.SIGKILL
            with server_process(run_dir, "--exit-with-parent") as second:
                again = await listening(run_dir, second)
                assert (again["url"], again["link_address"]) == (info["url"], info["link_address"])
                assert again["server_id"] != info["server_id"]
                assert (await end(http, done)).status_code == 200, "the retry of an answered end"
                assert (await call(http, running, "1+1", reply, "2+2")).status_code == 200
                assert (await end(http, running)).status_code == 200
                assert (await claim(http, "e"))["episode_uuid"] == "waiting"
                outcomes = await collect(link, 2)
                await link.commit(consumed(outcomes))
                metrics = (await http.get("/metrics")).text
                assert 'tinkerscript_results_accepted_total{type="train"} 2.0' in metrics
                await ends_with_its_parent(second, http)
                assert second.stderr is not None
                log = await asyncio.to_thread(second.stderr.read)
                assert await asyncio.to_thread(second.wait, DEADLINE_S) == 0, log
    assert "Traceback" not in log
    assert done["openai_api_key"] not in log
    result = outcomes["running"]
    assert isinstance(result, EpisodeAccepted)
    assert [each.parent_id for each in result.calls] == [None, result.calls[0].call_id], (
        "its buffer was restored"
    )


async def ends_with_its_parent(process: subprocess.Popen[str], http: httpx.AsyncClient) -> None:
    polling = asyncio.create_task(
        http.post("/claim_episode", json={"client_uuid": "c", "wait_s": 60}, timeout=70)
    )

    async def in_line() -> bool:
        return "tinkerscript_waiting_clients 1.0" in (await http.get("/metrics")).text

    await eventually(in_line, "the long poll")
    assert process.stdin is not None
    process.stdin.close()
    assert (await polling).json()["success"] is False, "those who wait are answered"

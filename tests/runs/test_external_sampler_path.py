"""Episodes against an inference server and no trainer: what is recorded is that server's own log."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rich.console import Console

from fake_vllm import FakeVllm
from inference_fakes import Distribution, Faults
from interchange_helpers import collect, run_config, trainer, until
from interchange_setup import OUTPUT
from serving import serving
from tinkerscript.addresses import read_server_info
from tinkerscript.commands.serve import serve_run
from tinkerscript.commands.train import open_run
from tinkerscript.config import InferenceConfig, dump_config
from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.rollouts.alignment import find_errors
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.trainer_link.messages import EpisodeAccepted

TURNS = 4
LETTERS = "abcdefgh "


@pytest.fixture(scope="module")
def words(byte_model: Path) -> Distribution:
    """Letters, one by one: no canonical tokenisation, and text that a conversation can hold."""
    tokenizer = LightTokenizer(byte_model)
    assert tokenizer.eos_token_id is not None
    letters = tuple(tokenizer.encode(letter)[0] for letter in LETTERS)
    return Distribution(tokenizer.vocab_size, tokenizer.eos_token_id, letters)


async def asked(
    http: httpx.AsyncClient, claim: dict[str, Any], messages: list[dict[str, str]], **more: Any
) -> httpx.Response:
    reply = await http.post(
        f"{claim['openai_base_url']}/chat/completions",
        json={"model": "policy", "messages": messages, "max_tokens": 20} | more,
        headers={"Authorization": f"Bearer {claim['openai_api_key']}"},
    )
    assert reply.status_code == 200, reply.text
    return reply


def said(reply: httpx.Response) -> list[str]:
    return [choice["message"]["content"] for choice in reply.json()["choices"]]


def heard(reply: httpx.Response) -> str:
    """The content of a streamed reply."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", reply.text
    deltas = [choice["delta"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def run_episode(http: httpx.AsyncClient, uuid: str) -> dict[str, Any]:
    """By a client that brings its own sample: turns, a streamed one, one question asked twice at once."""
    registered = await http.post(
        "/register_episode", json={"episode_uuid": uuid, "client_uuid": "c", "payload": {"input": "talk"}}
    )
    assert registered.json() == {"success": True, "failure_reason": ""}
    body = {"client_uuid": "c", "pool": "c", "sends_key": True, "wait_s": 10}
    claim = (await http.post("/claim_episode", json=body)).json()
    assert claim["success"], claim
    messages = [{"role": "user", "content": "hello"}]
    for turn in range(TURNS):
        (content,) = said(await asked(http, claim, messages))
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"and {turn}?"}]
    streamed = heard(await asked(http, claim, messages, stream=True))
    messages += [{"role": "assistant", "content": streamed}, {"role": "user", "content": "and?"}]
    assert len(said(await asked(http, claim, messages, n=2))) == 2
    return claim


def write_config(folder: Path, url: str, model: Path) -> Path:
    """Of a server with two gateway processes."""
    inference = InferenceConfig.model_validate({"backend": "vllm", "base_url": url})
    changes = {"inference": inference, "experiment_dir": str(folder / "run")}
    path = folder / "config.yaml"
    path.write_text(dump_config(run_config(model, processes=2).model_copy(update=changes)), encoding="utf-8")
    return path


async def test_what_tinkerscript_serve_records_is_the_inference_servers_own_log(
    words: Distribution, byte_model: Path, tmp_path: Path
) -> None:
    fake, terminal = FakeVllm(words, Faults()), io.StringIO()
    with serving(fake.app) as url:
        path = write_config(tmp_path, url, byte_model)
        command = asyncio.create_task(serve_run(path, None, Console(file=terminal, width=200)))
        await until(lambda: command.done() or "run episodes" in terminal.getvalue())
        assert not command.done(), command.exception()
        assert f"samples from     vllm at {url}; log: " in terminal.getvalue()
        info = read_server_info(tmp_path / "run")
        assert info is not None
        async with httpx.AsyncClient(base_url=info.url, timeout=30) as http:
            for number, port in enumerate(info.gateway_ports, 1):
                ready = await http.get(f"http://127.0.0.1:{port}/g/{number}/v1/models")  # Waits for it.
                assert ready.status_code == 401
            fake.log.clear()
            status = (await http.get("/get_engine_status")).json()
            assert (status["engine_status"], status["policy_version"]) == ("ENGINE.ROLLING", -1)
            claim = await run_episode(http, "e")
            headers = {"Authorization": f"Bearer {claim['openai_api_key']}"}
            ended = await http.post("/end_episode", json={"workflow_output": OUTPUT}, headers=headers)
            assert ended.json()["success"]
            async with trainer(info.link_address) as link:
                await link.resume([])
                outcome = (await collect(link, 1))["e"]
            recorded = list(fake.log)
            await run_episode(http, "later")  # A trainer that goes does not take the sampler away.
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
    assert "logprobs raw" in (tmp_path / "run" / "logs" / "server.log").read_text()
    assert isinstance(outcome, EpisodeAccepted)
    rollouts = merge_calls(outcome.calls, episode_uuid="e")
    segments = [(rollout, segment) for rollout in rollouts for segment in rollout.segments]
    assert len(recorded) == len(segments) == TURNS + 3
    for entry in recorded:
        rollout, segment = next(
            (r, s) for r, s in segments if r.tokens[: s.end].tolist() == entry.prompt + entry.ids
        )
        assert rollout.tokens[: segment.start].tolist() == entry.prompt
        assert np.abs(rollout.logprobs[segment.start : segment.end] - entry.raw).max() < 1e-5
    assert len(rollouts) == 2, "one sequence, and the fork of the question that was asked twice"
    assert {call.policy_version for call in outcome.calls} == {-1}
    assert not [error for rollout in rollouts for error in find_errors(rollout, vocabulary=words.size)]


async def test_tinkerscript_serve_ends_with_the_reason(
    words: Distribution, byte_model: Path, tmp_path: Path
) -> None:
    fake = FakeVllm(words, Faults(cut_stop_token=True))
    with serving(fake.app) as url:
        path = write_config(tmp_path, url, byte_model)
        with pytest.raises(WorkerError, match=r"the stop token \d+ is not among the ids|it sampled nothing"):
            await serve_run(path, None, Console(file=io.StringIO()))


def test_a_trainer_does_not_sample_from_weights_that_do_not_train(byte_model: Path, tmp_path: Path) -> None:
    path = write_config(tmp_path, "http://127.0.0.1:8000", byte_model)
    with pytest.raises(ConfigError, match="a server with fixed weights, which only `tinkerscript serve`"):
        open_run(path, [], resume=None, join=None)
    assert not (tmp_path / "run").exists()

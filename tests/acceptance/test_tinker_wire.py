"""`tinkerscript engine --port` as a user starts it: many clients, a kill, and tinker_cookbook's own loops."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from command_line import ROOT, Command, start
from small_models import sft_datum
from tinkerscript.model_folder import TINY_MODEL

pytestmark = [
    pytest.mark.xdist_group("wire"),  # Several use one server.
    pytest.mark.filterwarnings(
        # Of the SDK's own: the connection of its first request is left to the garbage collector.
        r"ignore:Exception ignored in. <(socket|function _Sel):pytest.PytestUnraisableExceptionWarning"
    ),
]


KEY = "tml-local"
SERVED = "Qwen/Qwen3-4B-Instruct-2507"
"""A name that the recipes know a chat format for; the weights behind it are our tiny ones."""

PROMPT = tinker.ModelInput.from_ints([5, 9, 13, 21, 34])
PROGRAMS = Path(__file__).with_name("cookbook_programs.py")


@pytest.fixture(autouse=True)
def quiet_sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its sockets are collected while the filter of its warnings holds."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    yield
    gc.collect()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server for several tests."""
    command, url = start_engine(tmp_path_factory.mktemp("engine"), lasts=True)
    yield url
    command.process.terminate()
    command.wait(seconds=60)


def start_engine(
    folder: Path, *options: str, model: Path = TINY_MODEL, port: int = 0, lasts: bool = False
) -> tuple[Command, str]:
    """The running command and its URL; sessions and checkpoints are in `folder`/state."""
    folder.mkdir(exist_ok=True)
    given = ("engine", "--checkpoint", str(model), "--port", str(port), "--state-dir", "state", *options)
    command = start(folder, *given, lasts=lasts)
    command.until(lambda: "use it" in command.text())
    found = re.search(r"at (http://\S+),", command.text())
    assert found is not None
    return command, found.group(1)


def train(client: Any, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        output = client.forward_backward([sft_datum([5, 9, 13, 21, 34])], "cross_entropy")
        client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        losses.append(output.result().metrics["loss:sum"])
    return losses


@pytest.mark.timeout(180)
async def test_64_samplers_at_once_while_a_run_trains(url: str) -> None:
    """64 sampling clients of one session with 4 requests each; every one gets its own answer."""
    service = await asyncio.to_thread(tinker.ServiceClient, base_url=url, api_key=KEY)
    run = await service.create_lora_training_client(str(TINY_MODEL))
    samplers = await asyncio.gather(
        *(service.create_sampling_client(base_model=str(TINY_MODEL)) for _ in range(64))
    )
    training = asyncio.create_task(asyncio.to_thread(train, run, 20))
    began = time.monotonic()
    params = [tinker.SamplingParams(max_tokens=16, seed=seed, stop=[]) for seed in range(4)]
    replies = await asyncio.gather(*(s.sample(PROMPT, 2, p) for s in samplers for p in params))
    print(f"256 requests from 64 samplers in {time.monotonic() - began:.1f} s")
    losses = await training
    assert losses[-1] < losses[0]
    # Seeded requests of the same weights: whoever asks, and in whatever crowd, gets the same tokens.
    first = [[s.tokens for s in reply.sequences] for reply in replies[:4]]
    assert len({str(tokens) for tokens in first}) == 4
    same = [[s.tokens for s in r.sequences] == first[i % 4] for i, r in enumerate(replies)]
    assert sum(same) >= 250  # Log probabilities round differently in other batches: a token may flip.
    assert all(len(s.tokens) == len(s.logprobs) == 16 for r in replies for s in r.sequences)
    await service.close("success")


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_killed_server_comes_back_with_its_checkpoints(tmp_path: Path) -> None:
    """SIGKILL in the middle: a waiting sample gets its answer of the next server, the run resumes exactly."""
    command, url = start_engine(tmp_path)
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    run = service.create_lora_training_client(str(TINY_MODEL)).result()
    train(run, 5)
    path = run.save_state("five").result().path
    saved = run.save_weights_for_sampler("five").result().path
    sampler = service.create_sampling_client(model_path=saved).result()
    expected = sampler.compute_logprobs(PROMPT).result()
    went_on = train(run, 3)
    waiting = sampler.sample(PROMPT, 16, tinker.SamplingParams(max_tokens=400, stop=[]))
    command.process.kill()
    command.process.wait()
    _, again = start_engine(tmp_path, port=int(url.rpartition(":")[2]))
    assert again == url
    assert len(waiting.result(timeout=120).sequences) == 16
    assert sampler.compute_logprobs(PROMPT).result()[1:] == pytest.approx(expected[1:], abs=1e-5)
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    assert train(resumed, 3) == pytest.approx(went_on, rel=1e-4)
    service.close("success").result()


def run_program(name: str, url: str, model: str, folder: Path, *, seconds: float) -> list[dict[str, float]]:
    """A program of cookbook_programs in `folder`; its metrics, a line each."""
    environment = os.environ | {
        "TINKER_API_KEY": KEY,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    with (folder / "output.txt").open("wb") as output:
        command = [sys.executable, str(PROGRAMS), name, url, model]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=seconds, check=False
        )
    assert done.returncode == 0, (folder / "output.txt").read_text(errors="replace")[-3000:]
    return [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]


def values(metrics: list[dict[str, float]], name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_cookbook_rl_train_learns_the_example(url: str, tmp_path: Path) -> None:
    """rl.train.main on examples/arithmetic.py through inspect_tinker_bridge."""
    folder = tmp_path / "client"
    folder.mkdir()
    began = time.monotonic()
    metrics = run_program("rl_train", url, str(TINY_MODEL), folder, seconds=570)
    held_out = values(metrics, "test/env/all/reward/total")
    print(f"held out {held_out} in {time.monotonic() - began:.0f} s")
    assert held_out[-1] > held_out[0] + 0.2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_cookbook_recipes_run_one_after_the_other(tmp_path: Path) -> None:
    """recipes.sl_loop trains all weights of a model to answer in rl_loop's format; rl_loop starts from it."""
    pytest.importorskip("math_verify", reason="rl_loop needs the dependency group recipes")
    command, url = start_engine(tmp_path / "first", "--name", SERVED, "--full")
    supervised = tmp_path / "sl"
    likelihoods = values(run_in_place("sl_loop", url, TINY_MODEL, supervised), "train_mean_nll")
    assert likelihoods[-1] < 0.2 * likelihoods[0]
    [weights] = (tmp_path / "first" / "state" / "checkpoints").glob("*/sampler_weights/final")
    command.process.terminate()
    command.wait()
    _, url = start_engine(tmp_path / "second", "--name", SERVED, "--full", model=weights)
    rewards = values(run_in_place("rl_loop", url, weights, tmp_path / "rl"), "reward/total")
    print(f"sl_loop {likelihoods[0]:.2f} -> {likelihoods[-1]:.2f}, rl_loop {rewards}")
    assert rewards[-1] > rewards[0] + 0.2


def run_in_place(name: str, url: str, model: Path, folder: Path) -> list[dict[str, float]]:
    """Run a recipe where `SERVED` is a folder with the model's tokenizer."""
    link = folder / SERVED
    link.parent.mkdir(parents=True)
    link.symlink_to(model)
    return run_program(name, url, SERVED, folder, seconds=400)

"""Runs of a vision-language model: images through server, gateway, ledger and trainer."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from run_ledger import ask
from short_runs import curve
from tinkerscript.config import RunConfig
from tinkerscript.engine.weights import load_model
from tinkerscript.errors import ConfigError
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.rollout import Rollout
from tinkerscript.testing import QuietReporter
from tinkerscript.train.policy_loss import check_images
from tinkerscript.train.run import run_training
from vision_model import data_url, make_vision_model, own_processor, picture

FILES = [picture(number, (40, 30)) for number in range(4)]

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, GenerateConfig
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate


@scorer(metrics=[accuracy()])
def even_length():
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=len(state.output.completion) % 2)
    return score


@task
def pictures():
    def asked(name: str) -> ChatMessageUser:
        return ChatMessageUser(content=[ContentImage(image=name), ContentText(text="What is it?")])

    samples = [Sample(id=name, input=[asked(name)], target="x") for name in NAMES]
    return Task(
        dataset=samples, solver=[generate()], scorer=even_length(), config=GenerateConfig(max_tokens=6)
    )
"""

SCRIPT = '''
from pathlib import Path

from openai import AsyncOpenAI


async def rollout(episode):
    """Two questions, each about an image."""
    place = int(Path(episode.payload["sample"]["id"]).stem)
    messages = []
    async with AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as client:
        for turn in range(2):
            image = {"type": "image_url", "image_url": {"url": URLS[(place + turn) % len(URLS)]}}
            messages.append({"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]})
            made = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            messages.append(made.choices[0].message.model_dump(exclude_none=True))
    return int(episode.episode_uuid, 16) % 1009 / 1009
'''


REFUSED = '''
from openai import AsyncOpenAI, BadRequestError


async def rollout(episode):
    """An image, and after its refusal the question alone."""
    image = {"type": "image_url", "image_url": {"url": URLS[0]}}
    question = {"type": "text", "text": "What is it?"}
    async with AsyncOpenAI(base_url=episode.openai_base_url, api_key=episode.openai_api_key) as client:
        for model in MODELS:
            for content in ([image, question], [question]):
                messages = [{"role": "user", "content": content}]
                try:
                    await client.chat.completions.create(model=model, messages=messages, max_tokens=6)
                except BadRequestError as error:
                    assert "because training.kl_penalty_coef does not work with images" in str(error)
                    assert content[0] is image
    return int(episode.episode_uuid, 16) % 1009 / 1009
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: list[str] = []
    for number, data in enumerate(FILES):
        (tmp_path / f"{number}.png").write_bytes(data)
        names.append(str(tmp_path / f"{number}.png"))
    (tmp_path / "tasks.py").write_text(TASKS.replace("NAMES", repr(names)))
    (tmp_path / "agent.py").write_text(SCRIPT.replace("URLS", repr(list(map(data_url, FILES)))))


def config(folder: Path, model: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "experiment_dir": str(folder / "run"),
            "enable_tinkerscript_mode": False,
            "interchange_server": {"interchange_server_port": 0},
            "task": {"name": f"{folder / 'tasks.py'}@pictures"},
            "engine": {"model": str(model), "lora": {"rank": 4, "targets": ["attn", "mlp"]}},
            "training": {"steps": 2, "groups_per_step": 2, "group_size": 4, "learning_rate": 1e-3},
            "evaluation": {"episodes": 0},
            **sections,
        }
    )


def own_logprobs(network: Any, model: Path, rollout: Rollout) -> torch.Tensor:
    """(R,): the sampled tokens', in transformers' forward pass over the processor's tensors."""
    images = [Image.open(io.BytesIO(image.data)) for image in rollout.images]
    pixels: Any = own_processor(model).image_processor([images], return_tensors="pt")
    ids = torch.from_numpy(rollout.tokens.astype(np.int64))[None]
    logits = network(input_ids=ids, **pixels).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[torch.from_numpy(rollout.sampled[1:])]


def check(run: Path, model: Path, *, turns: int) -> None:
    report = json.loads((run / "alignment.json").read_text())
    assert report["tokens_trained"] > 0
    assert report["max_abs_dlogp"] <= 1e-4
    assert [line["step"] for line in curve(run)] == [1, 2]
    assert all(line["train/grad_norm"] > 0 for line in curve(run))

    network = load_model(model)
    compared = 0
    for episode in (each for group in recorded_groups(run) for each in group.episodes):
        (whole,) = episode.rollouts
        assert [len(call.images) for call in episode.calls] == [1] * turns
        assert len(whole.images) == turns
        assert {image.data for image in whole.images} <= set(FILES)
        # Transformers would take a sampled placeholder for an image.
        has_placeholder = network.config.image_token_id in whole.tokens[whole.sampled]
        if has_placeholder or episode.calls[-1].policy_versions != (0,):
            continue
        with torch.no_grad():
            expected = own_logprobs(network, model, whole).numpy()
        assert whole.logprobs[whole.sampled] == pytest.approx(expected, abs=1e-5)
        compared += 1
    assert compared
    # Each file is stored once, and no call has a second copy.
    stored = [bytes(file) for (file,) in ask(run, "SELECT file FROM images")]
    assert len(stored) == len(set(stored)) <= len(FILES)
    assert set(stored) <= set(FILES)
    sizes = [size for (size,) in ask(run, "SELECT length(call) FROM calls")]
    assert max(sizes) < min(map(len, FILES))


async def test_an_inspect_task_with_images_trains_as_it_sampled(tmp_path: Path, model: Path) -> None:
    """In two parts, of which the second reads what the first recorded."""
    training = config(tmp_path, model).training.model_copy(update={"steps": 1})
    first = config(tmp_path, model).model_copy(update={"training": training})
    await run_training(first, QuietReporter())
    folder = await run_training(config(tmp_path, model), QuietReporter(), path=tmp_path / "run")
    check(folder.path, model, turns=1)


async def test_a_script_with_two_images_trains_as_it_sampled(tmp_path: Path, model: Path) -> None:
    """Through gateway processes, which keep the conversations apart from the server."""
    workers = {"script": "agent.py", "count": 1, "concurrency": 4}
    server = {"interchange_server_port": 0, "processes": 2}
    script = config(
        tmp_path, model, enable_tinkerscript_mode=True, workers=workers, interchange_server=server
    )
    folder = await run_training(script, QuietReporter())
    check(folder.path, model, turns=2)


async def test_an_image_does_not_end_a_run_that_cannot_train_on_it(tmp_path: Path, model: Path) -> None:
    """Neither its own policy's nor a role's."""
    text = REFUSED.replace("URLS", repr([data_url(FILES[0])])).replace("MODELS", "('policy', 'writer')")
    (tmp_path / "agent.py").write_text(text)
    steps = {"steps": 1, "groups_per_step": 1, "group_size": 4, "learning_rate": 1e-3, "kl_penalty_coef": 0.1}
    script = config(
        tmp_path,
        model,
        workers={"script": "agent.py", "concurrency": 4},
        roles={"writer": {"kind": "trained"}},
        training=steps,
    )
    reporter = QuietReporter()
    folder = await run_training(script, reporter)
    assert any(note.startswith("model calls with images are refused: this run") for note in reporter.notes)
    assert [line["step"] for line in curve(folder.path)] == [1]
    assert ask(folder.path, "SELECT count(*) FROM images") == [(0,)]
    assert ask(folder.path, "SELECT DISTINCT role FROM calls ORDER BY role") == [("",), ("writer",)]


def test_a_loss_of_the_start_policy_needs_a_model_of_text(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(
        "from tinkerscript.engine.losses import Loss\n"
        "inputs = {'target_tokens', 'logprobs', 'advantages', 'start_logprobs'}\n"
        "loss = Loss(lambda logprobs, inputs, settings: -logprobs, inputs=inputs)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    check_images(config(tmp_path, model), model)
    own = config(tmp_path, model, training={"loss_fn": "own:loss"})
    with pytest.raises(ConfigError, match=r"training\.loss_fn: 'own:loss' takes start_logprobs, which seq"):
        check_images(own, model)
    check_images(own, TINY_MODEL)

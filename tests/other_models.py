"""Tiny models that are no Qwen3: random weights, the tokenizers of two chat families, and a run on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from chat_families import FAMILIES
from run_ledger import results
from tinkerscript.config import RunConfig
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.testing import QuietReporter
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.run import run_training

SHAPES = {"llama3.2": LlamaConfig, "qwen2.5": Qwen2Config}
"""Chat family -> the architecture of its models."""

TEMPLATE_KWARGS = {"llama3.2": {"date_string": "1 Jan 2026"}, "qwen2.5": {}}
"""Chat family -> arguments of its template that runs train with."""

TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer
from inspect_ai.solver import generate, solver


@scorer(metrics=[accuracy()])
def long_answer():
    async def score(state, target):
        return Score(value=CORRECT if len(state.output.completion) % 2 else INCORRECT)
    return score


@solver
def twice():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="and now, hello?"))
        return await generate(state)
    return solve


@task
def words():
    samples = [Sample(id=str(i), input=f"hello {i}", target="x") for i in range(6)]
    return Task(dataset=samples, solver=[twice()], scorer=long_answer())
"""


def write_model(name: str, folder: Path) -> Path:
    """A model of a chat family with random weights, which samples any bytes at all."""
    family = FAMILIES[name]
    family.write(folder)
    torch.manual_seed(3)
    config = SHAPES[name](
        vocab_size=LightTokenizer(folder).vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=LightTokenizer(folder).added_tokens[family.end],
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "weights")
    for file in (folder / "weights").iterdir():
        if file.name != "generation_config.json":
            file.rename(folder / file.name)
    return folder


async def train(name: str, tmp_path: Path, **config: Any) -> None:
    """Train for two steps, in episodes of two turns; all of it is exact, and each turn extends the last."""
    model = write_model(name, tmp_path / name)
    (tmp_path / "words.py").write_text(TASK)
    folder = await run_training(
        RunConfig.model_validate(
            {
                "experiment_dir": "run",
                "engine": {"model": str(model), "chat_template_kwargs": TEMPLATE_KWARGS[name]},
                "task": {"name": f"{tmp_path / 'words.py'}@words"},
                "sampling": {"max_tokens": 12},
                "training": {"steps": 2, "groups_per_step": 4, "group_size": 4},
                "evaluation": {"episodes": 0},
                **config,
            }
        ),
        QuietReporter(),
    )
    report = json.loads((folder.path / "alignment.json").read_text())
    assert (report["errors"], report["findings"]) == ({}, [])
    assert report["max_abs_dlogp"] <= 1e-4
    episodes = results(folder.path)
    calls = [call for episode in episodes for call in episode.calls]
    assert (len(episodes), len(calls)) == (32, 64)
    assert {call.fork_reason for call in calls} == {None}
    assert report["sequences"] == 32, "an episode of two turns is one sequence"
    trained, served = (
        ChatRenderer(model, TEMPLATE_KWARGS[name]),
        ChatRenderer(folder.path / "checkpoints/final"),
    )
    texts = {
        trained.tokenizer.decode(unpack_ids(call.new_prompt)) for call in calls if call.parent_id is None
    }
    question = [{"role": "user", "content": "hello 3"}]
    prompt = trained.tokenizer.decode(trained.render(question, []))
    assert prompt in texts
    assert served.tokenizer.decode(served.render(question, [])) == prompt
    assert name != "llama3.2" or "1 Jan 2026" in prompt

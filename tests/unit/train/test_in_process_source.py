"""Episodes in the trainer's process: every one that was started has an outcome, or ends the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tinker
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Transition

from tinkerscript.config import RunConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.page.transcript_view import parsed, unpacked_text
from tinkerscript.rollouts.call import full_prompts, pack_ids
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.in_process import InProcessSource, ModelExchange, calls_of
from tinkerscript.train.journal import Journal
from tinkerscript.train.policy import Policy
from tinkerscript.train.samples import TaskSamples
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

TASKS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, includes, scorer
from inspect_ai.model import GenerateConfig
from inspect_ai.solver import generate

@scorer(metrics=[accuracy()])
def generous():
    async def score(state, target):
        return Score(value=1.7e308)
    return score

@task
def rich():
    return Task(dataset=[Sample(id="s", input="Hi", target="x")], solver=generate(), scorer=generous())

@task
def tuned(temperature=0.5):
    config = GenerateConfig(temperature=temperature, top_p=0.9, max_tokens=3)
    sample = Sample(id="s", input="Hi", target="x")
    return Task(dataset=[sample], solver=generate(), scorer=includes(), config=config)

@task
def talk():
    long = Sample(id="long", input="word " * 2000, target="x")
    return Task(dataset=[long], solver=generate(), scorer=includes())
"""


@asynccontextmanager
async def opened(
    tmp_path: Path, task: str = "talk", **settings: Any
) -> AsyncGenerator[tuple[InProcessSource, TaskSamples]]:
    (tmp_path / "tasks.py").write_text(TASKS)
    config = RunConfig.model_validate({"task": {"name": f"{tmp_path}/tasks.py@{task}"}, **settings})
    with (
        EmbeddedEngine(TINY_MODEL, checkpoint_dir=tmp_path / "checkpoints", seed=1) as engine,
        Journal(tmp_path / "journal.jsonl") as journal,
    ):
        policy = Policy(EmbeddedBackend(engine), journal)
        await policy.publish()
        async with asyncio.timeout(60), InProcessSource(config, policy, TINY_MODEL) as source:
            yield source, TaskSamples(config.all_tasks, seed=1)


async def test_an_episode_that_is_cancelled_before_its_first_step_has_an_outcome(tmp_path: Path) -> None:
    async with opened(tmp_path) as (source, samples):
        [[episode]] = samples.train_groups(step=1, groups=1, group_size=1)
        await source.start([episode])
        source.cancel([episode.episode_uuid], "the step has enough")
        async with asyncio.timeout(5):
            (ended,) = await source.outcomes()
    assert isinstance(ended, EpisodeFailed)
    assert ended.is_cancelled
    assert ended.failures[0]["message"] == "the step has enough"


async def test_a_prompt_beyond_the_context_fails_its_episode_alone(tmp_path: Path) -> None:
    async with opened(tmp_path) as (source, samples):
        [[episode]] = samples.train_groups(step=1, groups=1, group_size=1)
        await source.start([episode])
        (ended,) = await source.outcomes()
    assert isinstance(ended, EpisodeFailed)
    assert ended.failures[0]["kind"] == "context_length_exceeded"
    assert "the engine's context holds" in str(ended.failures[0]["message"])


@pytest.mark.parametrize(("precedence", "expected"), [("program", (0.5, 0.9)), ("run", (0.7, 1.0))])
async def test_a_task_chooses_how_it_is_sampled_unless_the_run_does(
    tmp_path: Path, precedence: str, expected: tuple[float, float], caplog: pytest.LogCaptureFixture
) -> None:
    sampling = {"temperature": 0.7, "precedence": precedence, "max_tokens": 9}
    async with opened(tmp_path, "tuned", sampling=sampling) as (source, samples):
        [[episode]] = samples.train_groups(step=1, groups=1, group_size=1)
        await source.start([episode])
        (ended,) = await source.outcomes()
    assert isinstance(ended, EpisodeAccepted)
    calls = ended.all_calls
    assert [(call.temperature, call.top_p, call.logprob_kind) for call in calls] == [(*expected, "processed")]
    assert calls[0].reply_tokens <= 3, "its limit of tokens is its own"
    assert "in a Tinker environment the trainer decides" not in caplog.text


def test_a_task_that_asks_for_the_most_probable_token_is_known_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    for temperature, greedy in ((0, ["tasks.py@tuned"]), (0.5, [])):
        task = {"name": f"{tmp_path}/tasks.py@tuned", "train_args": {"temperature": temperature}}
        config = RunConfig.model_validate({"task": task})
        assert TaskSamples(config.all_tasks, seed=1).greedy == greedy


async def test_a_reward_out_of_bounds_fails_its_episode_alone(tmp_path: Path) -> None:
    async with opened(tmp_path, "rich") as (source, samples):
        [[episode]] = samples.train_groups(step=1, groups=1, group_size=1)
        await source.start([episode])
        (ended,) = await source.outcomes()
    transcript = parsed(unpacked_text(ended.transcripts[1]))
    assert any(b'"event":"score"' in bytes(event) for event in transcript.events)
    assert isinstance(ended, EpisodeFailed)
    assert ended.failures[0]["kind"] == "reward_out_of_bounds"


async def test_transcripts_that_nobody_records_are_not_made(tmp_path: Path) -> None:
    async with opened(tmp_path, "rich", recording="off") as (source, samples):
        [[episode]] = samples.train_groups(step=1, groups=1, group_size=1)
        await source.start([episode])
        (ended,) = await source.outcomes()
        assert ended.transcripts == {}


def transition(prompt: list[int], sampled: list[int]) -> Transition:
    action = TokensWithLogprobs(tokens=sampled, maybe_logprobs=[-0.5] * len(sampled))
    return Transition(
        ob=tinker.ModelInput.from_ints(prompt), ac=action, reward=0.0, episode_done=False, metrics={}
    )


def said(*texts: str) -> ModelExchange:
    """Users and the assistant in turn; the last text is the reply."""
    messages: list[Any] = [
        ChatMessageAssistant(content=text) if place % 2 else ChatMessageUser(content=text)
        for place, text in enumerate(texts)
    ]
    return messages[:-1], messages[-1]


def test_calls_continue_the_call_whose_tokens_they_repeat_and_say_why_else() -> None:
    """Two conversations in turn, an edit, a repetition, and a format that cannot continue."""
    steps: list[tuple[list[int], list[int], ModelExchange, int | None, str | None]] = [
        ([1, 2], [3], said("a", "b"), None, None),
        ([1, 7], [8], said("other", "c"), None, "new_conversation"),
        ([1, 2, 3, 4], [5], said("a", "b", "more", "d"), 0, None),
        ([1, 7, 8, 4], [6], said("other", "c", "more", "e"), 1, None),
        ([1, 2], [9], said("a", "f"), None, "sampled_again"),
        ([1, 2, 30, 4], [5], said("a", "B", "more", "g"), None, "history_edited"),
        ([1, 2, 3, 40], [5], said("a", "b", "again", "h"), 0, None),
        ([1, 99], [5], said("a", "b", "refused", "i"), None, "renderer_refused"),
    ]
    calls = calls_of(
        [transition(prompt, sampled) for prompt, sampled, *_ in steps],
        [exchange for _, _, exchange, *_ in steps],
        policy_version=3,
    )
    names = [call.call_id for call in calls]
    assert [names.index(call.parent_id) if call.parent_id else None for call in calls] == [
        parent for *_, parent, _ in steps
    ]
    assert [call.fork_reason for call in calls] == [reason for *_, reason in steps]
    prompts = full_prompts(calls)
    assert [prompts[call.call_id] for call in calls] == [pack_ids(prompt) for prompt, *_ in steps]
    assert [message["content"] for message in json.loads(calls[2].messages)] == ["more"]
    assert len(merge_calls(calls, episode_uuid="e")) == 6

"""Five tasks of reasoning-gym: the rewards are the package's own."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import reasoning_gym
from claims import run_all
from reasoning_gym.utils import extract_answer

from outside_chat import Message, scripted_chat
from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.workers.base_task import load_task

TASKS = ["basic_arithmetic", "spell_backward", "number_sorting", "leg_counting", "mini_sudoku"]


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_is_scored_as_the_package_scores_it(name: str) -> None:
    task = load_task(f"reasoning_gym:{name}", {"size": 8, "seed": 3})
    samples = task.samples(held_out=False)
    dataset = reasoning_gym.create_dataset(name, size=8, seed=3)
    assert [sample["input"] for sample in samples] == [entry["question"] for entry in dataset]
    replies = {
        str(entry["question"]): reply_to(entry["answer"], number) for number, entry in enumerate(dataset)
    }

    def script(messages: list[Message]) -> str:
        assert messages[0]["role"] == "system"
        return replies[messages[-1]["content"]]

    async with scripted_chat(script) as server:
        # As over the network: JSON.
        ours = await run_all(task, server.url, [json.loads(json.dumps(dict(sample))) for sample in samples])
    theirs = [dataset.score_answer(extract_answer(replies[entry["question"]]), entry) for entry in dataset]
    assert [output.reward for output in ours] == theirs
    assert [output.metadata["scores"] for output in ours] == [{"score": score} for score in theirs]
    assert max(theirs) == 1.0
    assert min(theirs) < 1.0


def reply_to(answer: Any, number: int) -> str:
    """Right, wrong, and without an answer, in turn."""
    wrong = "".join(random.Random(number).sample(str(answer), len(str(answer)))) + "7"
    return [f"So <answer>{answer}</answer>", f"<answer>{wrong}</answer>", f"It is {answer}", "?"][number % 4]


async def test_a_whole_reply_can_be_the_answer() -> None:
    options = {"size": 2, "answer_tag": "", "system_prompt": ""}
    task = load_task("reasoning_gym:spell_backward", options)
    sample = task.samples(held_out=False)[0]
    async with scripted_chat(lambda _: f" {sample['target']}\n") as server:
        (output,) = await run_all(task, server.url, [sample])
    assert output.reward == 1.0
    assert [message["role"] for message in server.asked[0][1]] == ["user"]


def test_held_out_problems_are_others() -> None:
    task = load_task("reasoning_gym:basic_arithmetic", {"size": 50})
    train, held_out = ({sample["id"] for sample in task.samples(held_out=each)} for each in (False, True))
    assert len(train | held_out) == 100


async def test_another_version_of_the_package_is_refused() -> None:
    task = load_task("reasoning_gym:basic_arithmetic", {"size": 2})
    sample = {**task.samples(held_out=False)[0], "input": "Calculate what the newer version asks."}
    async with scripted_chat(lambda _: "0") as server:
        with pytest.raises(WorkerError, match="is another problem"):
            await run_all(task, server.url, [sample])
    assert server.asked == []


def test_what_cannot_be_loaded_says_what_helps() -> None:
    with pytest.raises(ConfigError, match=r"no task 'basic_arithmetics'; near it are basic_arithmetic"):
        load_task("reasoning_gym:basic_arithmetics", {})
    with pytest.raises(ConfigError, match=r"reasoning_gym:leg_counting: .*'legs'"):
        load_task("reasoning_gym:leg_counting", {"legs": 3})

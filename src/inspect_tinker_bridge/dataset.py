"""Convert an Inspect dataset to a Hugging Face dataset: one row per sample with the model's prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypedDict

from datasets import Dataset, Features, Value
from inspect_ai import Task
from inspect_ai.dataset import Sample

from inspect_tinker_bridge.conversion import MessageDict, sample_to_json, text_of, to_dicts
from inspect_tinker_bridge.ground_truth import ground_truth_of, silent_roles
from inspect_tinker_bridge.runner import TaskRunner
from inspect_tinker_bridge.tasks import InspectTaskInfo, load_inspect_task

__all__ = ["FEATURES", "DatasetRow", "inspect_dataset_to_hf"]


class DatasetRow(TypedDict):
    prompt: list[MessageDict]
    """The first call's messages: `role`, `content` (text), and `message` (all of it as JSON)."""

    answer: str | None
    """One line per target."""

    info: str
    """JSON with the task's name and the whole sample, for `conversion.sample_of_row`."""

    id: str


FEATURES = Features(
    {
        "prompt": [{"role": Value("string"), "content": Value("string"), "message": Value("string")}],
        "answer": Value("string"),
        "info": Value("string"),
        "id": Value("string"),
    }
)


def inspect_dataset_to_hf(
    task: Task | InspectTaskInfo,
    task_name: str | None = None,
    max_samples: int | None = None,
    additional_system_content: str | None = None,
) -> Dataset:
    """Convert a task's samples to a dataset with the columns of `DatasetRow`.

    Solvers run up to their first model call; no other eval may run meanwhile. `additional_system_content` is
    appended to the system message, or becomes one. Raises UnsupportedError for content other than text,
    reasoning and images, TaskFailedError if a solver raises or first asks a role's model, and RunnerError.
    """
    info = task if isinstance(task, InspectTaskInfo) else load_inspect_task(task)
    samples = info.samples[:max_samples]
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspect-prompts") as thread:
        prompts = thread.submit(_run_prompts, info, samples).result()
    rows = [
        _row(sample, _instructed(prompt, additional_system_content), task_name or info.name)
        for sample, prompt in zip(samples, prompts, strict=True)
    ]
    return Dataset.from_list([dict(row) for row in rows], features=FEATURES)


def _run_prompts(info: InspectTaskInfo, samples: Sequence[Sample]) -> list[list[MessageDict]]:
    # In notebooks, Inspect's asyncio.run leaves its loop open.
    with asyncio.Runner() as loop:
        return loop.run(_prompts(info, samples))


async def _prompts(info: InspectTaskInfo, samples: Sequence[Sample]) -> list[list[MessageDict]]:
    async with TaskRunner(info, silent_roles(info)) as runner:
        found = await asyncio.gather(*(ground_truth_of(runner, info, sample) for sample in samples))
    return [to_dicts(messages) for messages in found]


def _row(sample: Sample, prompt: list[MessageDict], task_name: str) -> DatasetRow:
    target = sample.target if isinstance(sample.target, str) else "\n".join(sample.target)
    messages = [
        {"role": message["role"], "content": text_of(message), "message": json.dumps(message)}
        for message in prompt
    ]
    return DatasetRow(
        prompt=messages,
        answer=target or None,
        info=json.dumps({"task": task_name, "sample": sample_to_json(sample)}),
        id=str(sample.id),
    )


def _instructed(prompt: list[MessageDict], content: str | None) -> list[MessageDict]:
    if not content:
        return prompt
    if prompt and prompt[0]["role"] == "system":
        first = prompt[0]
        return [{**first, "content": f"{text_of(first)}\n\n{content}"}, *prompt[1:]]
    return [{"role": "system", "content": content}, *prompt]

"""`reasoning_gym:TASK`: problems that reasoning-gym generates and scores."""

# Types are checked without reasoning-gym.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import difflib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from tinkerscript.errors import ConfigError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import HELD_OUT_SEED, EpisodeModel, Task, TaskSample, named_scores


class ReasoningGymTask(Task):
    def __init__(
        self,
        name: str,
        /,
        *,
        size: int = 500,
        seed: int = 0,
        system_prompt: str = "default",
        answer_tag: str = "answer",
        **config: Any,
    ) -> None:
        """`system_prompt` is the name of one of the package's prompts, a text, or empty for none.

        Without an `answer_tag` the whole reply is the answer. `config` has the dataset's settings.
        """
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4)
            raise ConfigError(f"reasoning_gym has no task {name!r}; near it are {', '.join(near) or 'none'}")
        self._config = {"name": name, "size": size, **config}
        self._seed = seed
        self._system = SYSTEM_PROMPTS.get(system_prompt, system_prompt)
        self._tag = answer_tag
        try:
            _dataset(json.dumps({**self._config, "seed": seed}, sort_keys=True))
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"reasoning_gym:{name}: {error or 'its settings contradict each other'}"
            ) from error

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        config = {**self._config, "seed": self._seed + HELD_OUT_SEED * held_out}
        dataset = _dataset(json.dumps(config, sort_keys=True))
        return [
            {
                "id": f"{config['seed']}/{number}",
                "input": entry["question"],
                "target": str(entry["answer"]),
                "dataset": config,
                "number": number,
            }
            for number, entry in enumerate(dataset)
        ]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        dataset = _dataset(json.dumps(sample["dataset"], sort_keys=True))
        entry = dataset[sample["number"]]
        messages = [{"role": "system", "content": self._system}] if self._system else []
        said = await model.ask([*messages, {"role": "user", "content": entry["question"]}])
        answer = extract_answer(said, tag_name=self._tag) if self._tag else said.strip()
        score = float(await asyncio.to_thread(dataset.score_answer, answer, entry))
        return named_scores(
            score, {"score": score}, metrics={"answered": float(answer is not None)}, answer=answer or ""
        )


@lru_cache(maxsize=16)
def _dataset(config: str) -> Any:
    return reasoning_gym.create_dataset(**json.loads(config))

"""Tasks and a sampling client that other processes can load."""

from __future__ import annotations

from typing import Any

import numpy as np
import tinker
from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match

from bridge_parts import END, add, call


@task
def adding() -> Task:
    """Three sums with an agent and a tool."""
    samples = [Sample(input=f"{n}+1?", target=str(n + 1), id=n) for n in range(3)]
    return Task(dataset=samples, solver=react(tools=[add()]), scorer=match())


class ScriptedSampling:
    """The part of a Tinker SamplingClient that rollouts use: says the same turns in every episode.

    Pickles. Which turn it is it finds in the prompt, by counting what it said.
    """

    TURNS = (call("add", '{"a": 0, "b": 1}') + END, call("submit", '{"answer": "1"}') + END)

    def __init__(self, turns: list[list[int]], end: int) -> None:
        self.turns = turns
        self.end = end

    async def sample_async(
        self, prompt: tinker.ModelInput, num_samples: int, sampling_params: tinker.SamplingParams, **_: Any
    ) -> tinker.SampleResponse:
        ids = list(prompt.to_ints())
        turn = min(count(ids, self.turns[0]), len(self.turns) - 1)
        tokens = self.turns[turn]
        logprobs = [-0.25 * (index + 1) for index in range(len(tokens))]
        sequence = tinker.SampledSequence(
            stop_reason="stop",
            sequence_id="0",
            tokens_np=np.asarray(tokens),
            logprobs_np=np.asarray(logprobs, dtype=np.float32),
        )
        return tinker.SampleResponse(sequences=[sequence])


def count(ids: list[int], part: list[int]) -> int:
    """How often `part` is in `ids`."""
    return sum(ids[at : at + len(part)] == part for at in range(len(ids)))

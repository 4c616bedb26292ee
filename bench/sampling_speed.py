"""Sampling workloads of `bench/engine.py`: the engine and `transformers.generate` over the same requests."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import tinker
import torch

from tinkerscript.engine.sampling_client import EmbeddedSamplingClient

NEW_TOKENS = 64


@dataclass(frozen=True)
class Job:
    """One request: when it arrives (seconds from the start), its prompt, and how many tokens it wants."""

    arrives_s: float
    prompt: list[int]
    max_tokens: int


def uniform_jobs(count: int, vocabulary: int, rng: random.Random) -> list[Job]:
    return [Job(0.0, [rng.randrange(vocabulary) for _ in range(24)], NEW_TOKENS) for _ in range(count)]


def mixed_jobs(count: int, vocabulary: int, rng: random.Random) -> list[Job]:
    """Prompts of 8 to 64 ids, answers of 4 to 128, arriving over a quarter of a second."""
    jobs = [
        Job(
            arrives_s=rng.random() * 0.25,
            prompt=[rng.randrange(vocabulary) for _ in range(rng.randint(8, 64))],
            max_tokens=rng.randint(4, 128),
        )
        for _ in range(count)
    ]
    return sorted(jobs, key=lambda job: job.arrives_s)


def group_jobs(groups: int, vocabulary: int, rng: random.Random, *, same_prompt: bool) -> list[Job]:
    """Groups of 16 with prompts of 256 ids and answers of 16; `same_prompt`: one prompt a group."""
    jobs: list[Job] = []
    for _ in range(groups):
        prompt = [rng.randrange(vocabulary) for _ in range(256)]
        for _ in range(16):
            own = prompt if same_prompt else [rng.randrange(vocabulary) for _ in range(256)]
            jobs.append(Job(0.0, own, 16))
    return jobs


def run_engine(client: EmbeddedSamplingClient, jobs: list[Job]) -> float:
    """Tokens per second from the first arrival to the last answer."""
    began = time.perf_counter()
    futures = []
    for job in jobs:
        _wait_until(began + job.arrives_s)
        params = tinker.SamplingParams(max_tokens=job.max_tokens, stop=[])
        futures.append(client.sample(tinker.ModelInput.from_ints(job.prompt), 1, params))
    tokens = sum(len(future.result().sequences[0].tokens) for future in futures)
    return tokens / (time.perf_counter() - began)


def run_generate(model: Any, jobs: list[Job]) -> float:
    """The same jobs through `generate`: each batch is what has arrived when the one before it ends."""
    began = time.perf_counter()
    waiting = list(jobs)
    tokens = 0
    while waiting:
        _wait_until(began + waiting[0].arrives_s)
        now = time.perf_counter() - began
        batch = [job for job in waiting if job.arrives_s <= now]
        waiting = waiting[len(batch) :]
        _generate(model, batch)
        tokens += sum(job.max_tokens for job in batch)
    return tokens / (time.perf_counter() - began)


@torch.inference_mode()
def _generate(model: Any, batch: list[Job]) -> None:
    width = max(len(job.prompt) for job in batch)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in batch])
    mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch])
    longest = max(job.max_tokens for job in batch)
    model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        min_new_tokens=longest,
        max_new_tokens=longest,
        pad_token_id=0,
    )


def _wait_until(moment: float) -> None:
    remaining = moment - time.perf_counter()
    if remaining > 0:
        time.sleep(remaining)

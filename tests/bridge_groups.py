"""Groups of episodes, environments, a policy that waits, solvers and scorers, for tests of the bridge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Scorer, accuracy, scorer
from inspect_ai.solver import Solver, solver
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, TrajectoryGroup

from bridge_parts import END, Says, Scripted
from inspect_tinker_bridge import GenerateRequest, load_environment


async def group_of(task: Any, renderer: Renderer | str, policy: Says, **options: Any) -> TrajectoryGroup:
    """The group of the task's first sample, with `load_environment`'s options."""
    return await do_group_rollout(load_environment(task, renderer, **options).get_batch(0)[0], policy)


async def group_that_says(task: Any, renderer: Renderer, *texts: str, **options: Any) -> TrajectoryGroup:
    """The same, with a policy that says `texts`, each closed by END."""
    return await group_of(task, renderer, Says(renderer, *(text + END for text in texts)), **options)


@asynccontextmanager
async def environments(
    task: Any, renderer: Renderer, **options: Any
) -> AsyncGenerator[tuple[EnvGroupBuilder, Sequence[Env]]]:
    """The first sample's builder, and the environments that it makes."""
    builder = load_environment(task, renderer, **options).get_batch(0)[0]
    envs = await builder.make_envs()
    try:
        yield builder, envs
    finally:
        await builder.cleanup()


class Held(Scripted):
    """Answers once it may."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.asked, self.go, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().generate(request)


def solving(solve: Solver) -> Callable[[], Solver]:
    """Makes a registered solver of its function."""

    @solver(name=getattr(solve, "__name__", ""))
    def make() -> Solver:
        return solve

    return make


def scoring(score: Scorer) -> Callable[[], Scorer]:
    """Makes a registered scorer of its function."""

    @scorer(metrics=[accuracy()], name=getattr(score, "__name__", ""))
    def make() -> Scorer:
        return score

    return make

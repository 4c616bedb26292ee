"""Environments of verifiers' older API: packages with a `load_environment`, which verifiers 0.3 still runs.

Invariant: verifiers' handlers of SIGTERM and SIGINT, which every environment installs, do not replace the
process's.
"""

# verifiers is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.legacy.clients import OpenAIChatCompletionsClient

from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample, named_scores

CALL_TIMEOUT_S = 900.0
RETRIES = 6
"""Of a model call that the server could not answer."""

logger = logging.getLogger(__name__)


class LegacyEnvironment(Task):
    """An environment of verifiers 0.3 and before. Its arguments are those of the package's
    `load_environment`."""

    def __init__(self, environment: str, /, **args: Any) -> None:
        """Raises ConfigError for a rubric that compares the rollouts of a group, and what verifiers
        raises."""
        with _own_signal_handlers():
            self.env: Any = vf.load_environment(environment, **args)
        if self.env.requires_group_rollouts:
            raise ConfigError(
                f"verifiers:{environment}: its rubric compares the rollouts of a group; here each episode is "
                "scored alone"
            )
        self._pool: DefaultAsyncHttpxClient | None = None

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        """`get_eval_dataset` or `get_dataset`: where an environment has but one of them, they are the
        same."""
        dataset = self.env.get_eval_dataset() if held_out else self.env.get_dataset()
        split = "eval" if held_out else "train"
        return [_as_sample(row, f"{split}-{number}") for number, row in enumerate(dataset.to_list())]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        assert self._pool is not None, "a rollout runs inside `resources`"
        row: Any = sample.get("row")
        if not isinstance(row, dict):
            raise WorkerError(f"the sample {sample.get('id')!r} holds no row of {self.task_id}")
        # Never closed: its connections are the pool's.
        client = AsyncOpenAI(
            base_url=model.base_url, api_key=model.api_key, http_client=self._pool, max_retries=RETRIES
        )
        output = await self.env.run_rollout(
            row, OpenAIChatCompletionsClient(client), model.name, dict(model.sampling)
        )
        if error := output.get("error"):
            raise WorkerError(f"verifiers: {_words(error)}")
        return _output(output)

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        """One pool of connections for all episodes: only the key differs."""
        async with DefaultAsyncHttpxClient(timeout=CALL_TIMEOUT_S) as pool:
            for task in tasks:
                task._pool = pool
            yield


@contextmanager
def _own_signal_handlers() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _as_sample(row: dict[str, Any], name: str) -> TaskSample:
    plain = json.loads(json.dumps(row, default=str))
    return {
        "id": name,
        "input": plain.get("prompt", ""),
        "target": str(plain.get("answer") or ""),
        "row": plain,
    }


def _output(output: dict[str, Any]) -> WorkflowOutput:
    """The reward; every value that the rubric computed is a score by its name, as in verifiers' metrics."""
    said = output["completion"]
    answer = said if isinstance(said, str) else str(said[-1].get("content") or "") if said else ""
    return named_scores(float(output["reward"]), dict(output["metrics"]), answer=answer)


def _words(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("error_chain_repr") or error.get("error") or error)
    return str(error)

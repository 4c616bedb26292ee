"""`Task`: what each kind of environment is to a run: samples, and a rollout of one that ends in scores.

The trainer asks a task for its samples, and never runs one. A worker gets a sample with each episode, and
runs it with the model of that episode, an `EpisodeModel`. A kind of task is one subclass; `task_kinds` finds
it by name.

Invariant: a rollout that cannot be scored raises; it never returns a reward in place of a failure.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import JsonValue

from tinkerscript.client import Episode
from tinkerscript.client.episode import RolloutResult
from tinkerscript.errors import ClientError
from tinkerscript.protocol import WorkflowOutput

if TYPE_CHECKING:  # It needs aiohttp, which the extras of the kinds install.
    from tinkerscript.workers.chat_endpoint import ChatEndpoint

__all__ = ["EpisodeModel", "Task", "TaskSample", "named_scores"]

HELD_OUT_SEED = 1_000_000
"""Where the seeds of generated samples to evaluate on begin: added to the first seed of those to train on."""

TRANSCRIPT_S = 10.0
"""Seconds that sending a transcript may hold up its episode's end."""

TaskSample: TypeAlias = Mapping[str, JsonValue]
"""One problem, as JSON. `id`: unique in its task. `input`: what is asked, for people: text, or chat messages.
Optional `target` and `metadata` are shown, too. Whatever else the rollout needs may stand beside them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EpisodeModel:
    """The model of one episode: its calls go to `base_url` with `api_key`, which opens this episode alone.

    Programs of any kind can be pointed there: it speaks OpenAI's and Anthropic's formats.
    """

    base_url: str
    """For OpenAI's clients: it ends in `/v1`. Anthropic's add that themselves: `anthropic_base_url`."""

    api_key: str = field(repr=False)
    name: str = "policy"
    """What requests call the model."""

    endpoint: ChatEndpoint = field(repr=False)
    """The connections that all episodes of a worker share."""

    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Request fields that are set for every call, such as `temperature`. Empty under a run: the server
    decides."""

    claim: Episode | None = None
    """The claim that is worked on, with its lease and limits. None in `tinkerscript eval`."""

    def role(self, name: str) -> EpisodeModel:
        """The model of a role of the run (`roles` in its config), for this episode: a judge, an opponent.

        The server refuses a role that the run does not have.
        """
        return replace(self, name=name)

    @property
    def roles(self) -> tuple[str, ...]:
        """Names for `role`: the roles that the claim's run has."""
        return self.claim.roles if self.claim else ()

    @property
    def anthropic_base_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    async def complete(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """One model call: the reply's message (`role`, `content`, and `tool_calls` if there are any).

        `messages` and `fields` (`tools`, `max_tokens`, ...) are those of OpenAI's chat completions. Raises
        what `ChatEndpoint.complete` raises.
        """
        body = {"model": self.name, "messages": list(messages), **self.sampling, **fields}
        completion = await self.endpoint.complete(self.base_url, self.api_key, body)
        return completion["choices"][0]["message"]

    async def ask(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """One model call: the reply's text. Raises what `complete` raises."""
        return (await self.complete(messages, **fields))["content"] or ""

    @property
    def max_transcript_bytes(self) -> int:
        """The longest transcript that is kept of this episode; 0: none is."""
        return self.claim.max_transcript_bytes if self.claim else 0

    async def record_transcript(self, transcript: bytes) -> None:
        """Keep what a rollout recorded beside its calls. Raises nothing: it is for people."""
        if self.claim is None or not 0 < len(transcript) <= self.max_transcript_bytes:
            return
        url = f"{self.anthropic_base_url.rstrip('/')}/record_transcript"
        try:
            async with asyncio.timeout(TRANSCRIPT_S):
                await self.endpoint.send_bytes(url, self.api_key, transcript)
        except (ClientError, TimeoutError) as error:
            logger.info("episode %s: its transcript is not recorded: %s", self.claim.episode_uuid, error)


class Task(ABC):
    """A source of samples and the way to run one. Subclass it; its arguments are those of
    `task.train_args`."""

    task_id: str = ""
    """What programs on every machine call the task. `load_task` sets it."""

    @abstractmethod
    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        """The samples to train on, or those to evaluate on: the same whenever they are asked for.

        A task without a split of its own returns the same ones for both; then its arguments choose
        (`task.train_args`, `task.eval_args`).
        """

    @abstractmethod
    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> RolloutResult:
        """Run one episode and score it. Any number run at once.

        Returns a reward, or a reward and more: `named_scores` makes that of scores by name. Raises whatever
        went wrong, which is recorded as the reason of the failure.
        """

    @classmethod
    @asynccontextmanager
    async def resources(cls, tasks: Sequence[Any]) -> AsyncGenerator[None]:
        """Hold what rollouts of `tasks` need, all of this kind that a process runs: servers, pools, an
        eval."""
        yield


def named_scores(
    reward: float,
    scores: Mapping[str, float],
    *,
    metrics: Mapping[str, float] | None = None,
    answer: str = "",
    metadata: Mapping[str, JsonValue] | None = None,
) -> WorkflowOutput:
    """A rollout's result with its scores by name.

    The scores are shown with the episode, and averaged as `score/<name>`; `metrics` are averaged under their
    own names. `answer`: what was scored, for people.
    """
    shown: dict[str, JsonValue] = {
        "scores": dict(scores),
        "explanations": {name: {} for name in scores},
        "answer": answer,
        **(metadata or {}),
    }
    averaged = {f"score/{name}": float(value) for name, value in scores.items()}
    return WorkflowOutput(reward=float(reward), metadata=shown, log_metrics={**averaged, **(metrics or {})})

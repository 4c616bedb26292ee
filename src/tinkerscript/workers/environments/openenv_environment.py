"""`openenv:URL` is an OpenEnv environment on a server. The reward is the sum of the step rewards."""

# Types are checked without OpenEnv.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import httpx
from openenv import GenericEnvClient

from tinkerscript.errors import ConfigError
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.workers.base_task import HELD_OUT_SEED, EpisodeModel, Task, TaskSample, named_scores

SCHEMA_TIMEOUT_S = 10.0

INSTRUCTION = (
    "You act in an environment. Each message shows what you observe, as JSON. Reply with your next action "
    "alone, as a JSON object of this schema: "
)


class OpenEnvEnvironment(Task):
    """Each sample is a seed for a reset."""

    def __init__(
        self,
        url: str,
        /,
        *,
        size: int = 500,
        held_out_size: int = 100,
        seed: int = 0,
        reset: Mapping[str, Any] | None = None,
        max_steps: int = 50,
        sessions: int = 0,
        system_prompt: str = INSTRUCTION,
    ) -> None:
        """`reset` has arguments for every reset. `sessions` limits open sessions (0: none). The schema of
        actions is appended to `system_prompt`.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"openenv:{url}: give the URL of a server, such as openenv:http://127.0.0.1:8000"
            )
        self._url = url.rstrip("/")
        self._sizes = (size, held_out_size)
        self._seed = seed
        self._reset = dict(reset or {})
        self._max_steps = max_steps
        self._sessions = asyncio.Semaphore(sessions) if sessions else nullcontext()
        self._system = system_prompt
        self._schema: dict[str, Any] = {}

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        first = self._seed + HELD_OUT_SEED * held_out
        return [
            {"id": seed, "input": f"{self._url}, seed {seed}", "reset": {**self._reset, "seed": seed}}
            for seed in range(first, first + self._sizes[held_out])
        ]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> WorkflowOutput:
        schema = await self._action_schema()
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._system + json.dumps(schema)}]
        rewards, steps, misread = dict[str, float](), 0, 0
        async with self._sessions, GenericEnvClient(base_url=self._url) as client:
            result = await client.reset(**dict(sample["reset"]))  # pyright: ignore[reportArgumentType, reportCallIssue]
            told = json.dumps(result.observation)
            while not result.done and steps < self._max_steps:
                messages.append({"role": "user", "content": told})
                said = await model.ask(messages)
                messages.append({"role": "assistant", "content": said})
                steps += 1
                action = parse_action(said, schema)
                if action is None:
                    misread += 1
                    told = "That is no action: reply with a JSON object of the schema."
                    continue
                result = await client.step(action)
                reply_id = model.reply_ids[-1]  # Other servers may repeat ids.
                rewards[reply_id] = rewards.get(reply_id, 0.0) + float(result.reward or 0.0)
                told = json.dumps(result.observation)
        metrics = {"steps": float(steps), "misread": float(misread), "unfinished": float(not result.done)}
        scores = {"openenv_reward": sum(rewards.values())}
        return named_scores(0.0, scores, metrics=metrics, call_rewards=rewards)

    async def _action_schema(self) -> dict[str, Any]:
        # A server has one kind of action.
        if not self._schema:
            async with httpx.AsyncClient(timeout=SCHEMA_TIMEOUT_S) as http:
                response = await http.get(f"{self._url}/schema")
                response.raise_for_status()
            self._schema = response.json()["action"]
        return self._schema


def parse_action(reply: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON object in a reply, possibly in a code fence, or None.

    If the schema requires exactly one field, its value is enough, as JSON or plain text.
    """
    text = reply.strip()
    if text.startswith("```") and text.endswith("```"):
        text = "\n".join(text.splitlines()[1:-1]).strip()
    required = schema.get("required", [])
    only: str | None = required[0] if len(required) == 1 else None
    try:
        value: Any = json.loads(text)
    except ValueError:
        if only is not None and text and schema["properties"][only].get("type") == "string":
            return {only: text}
        return None
    if isinstance(value, dict):
        return value  # pyright: ignore[reportUnknownVariableType]
    return {only: value} if only is not None else None

"""The worker for Inspect tasks: each claimed episode is one sample, run by the task's own solver and scorers.

Invariant: every model call goes through the episode's own key to the gateway, which records its tokens; a
solver or scorer that raises is an error, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalSample
from inspect_ai.model import Model, ModelOutput
from pydantic import JsonValue

from inspect_tinker_bridge import (
    EpisodeOutcome,
    EpisodeReward,
    GenerateRequest,
    InspectTaskInfo,
    RunnerOptions,
    TaskRunner,
    load_inspect_task,
    score_episode,
)
from inspect_tinker_bridge.conversion import ChatConverter, sample_from_json
from inspect_tinker_bridge.scoring import check_weights, report_of
from inspect_tinker_bridge.transcript import pack_transcript
from tinkerscript.client import Episode
from tinkerscript.client.settings import CA_FILE, certificates
from tinkerscript.errors import (
    ClaimLostError,
    ClientError,
    RequestRefusedError,
    ServerUnreachableError,
    WorkerError,
    WrongTaskError,
)
from tinkerscript.protocol import WorkflowOutput
from tinkerscript.tracing import HEADER, traceparent

TRANSCRIPT_S = 10.0
"""Seconds that sending a transcript may hold up its episode's end."""

_BUSY = (429, 503)
_AWAY = (0, 502, 503, 504)
"""No connection, or a proxy's word for it."""

_TIMED_OUT = -1

logger = logging.getLogger(__name__)


class InspectRollout:
    """A rollout function for `tinkerscript.client.run`: `await rollout(episode)` runs one episode.

    Use one per process, since Inspect runs one eval per process; it takes any number of calls at once. The
    eval starts with the first call and ends with `aclose` or the `async with` block; one that died is
    restarted.
    """

    def __init__(
        self,
        tasks: str | Mapping[str, Mapping[str, Any]],
        *,
        scorer_weights: Mapping[str, float] | None = None,
        model_roles: Mapping[str, str | Model] | None = None,
        endpoint: ChatEndpoint | None = None,
    ) -> None:
        """Load the tasks. Raises what `inspect_tinker_bridge.load_inspect_task` raises, and
        EnvironmentConfigError for `scorer_weights` that do not name the scorers.

        `tasks` are specs of tasks, each with its arguments; an episode names one of them in
        `payload["task"]`, with or without its folder. `endpoint` replaces the model endpoint.
        """
        specs: Mapping[str, Mapping[str, Any]] = {tasks: {}} if isinstance(tasks, str) else tasks
        loaded = {name: load_inspect_task(name, **dict(args)) for name, args in specs.items()}
        self._loaded = list(loaded.values())
        self._tasks = {info.task_id: info for info in self._loaded} | loaded
        """By the name that episodes of any machine use, and by the spec as it was given."""

        if scorer_weights is not None:
            check_weights(scorer_weights, {name for info in self._loaded for name in info.scorer_names})
        self._weights = scorer_weights
        self._options = RunnerOptions(model_roles=model_roles)
        self._endpoint = endpoint or ChatEndpoint()
        self._runner: TaskRunner | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> InspectRollout:
        await self._open_runner()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def __call__(self, episode: Episode) -> WorkflowOutput:
        """Run the episode's sample and score it.

        Raises ClaimLostError, WrongTaskError, WorkerError for a payload without a task or a sample,
        TaskFailedError when the solver or a scorer raises, and the endpoint's errors when the model cannot be
        reached.
        """
        task, sample = self._task(episode.payload), _sample(episode.payload)
        policy = _GatewayPolicy(self._endpoint, episode)
        runner = await self._open_runner()
        records: list[EvalSample] = []
        try:
            outcome = await runner.run(sample, policy, task=task, on_record=records.append)
        finally:
            if records and policy.lost is None:
                await self._record_transcript(episode, records[0])
        if policy.lost is not None:
            raise policy.lost
        return _output(outcome, score_episode(outcome, self._weights), policy.calls)

    async def _record_transcript(self, episode: Episode, record: EvalSample) -> None:
        """Send Inspect's record of the episode, if the run wants it. Raises nothing: it is for people."""
        limit = episode.max_transcript_bytes
        transcript = await asyncio.to_thread(pack_transcript, record, limit) if limit else b""
        if not transcript:
            return
        url = f"{episode.anthropic_base_url.rstrip('/')}/record_transcript"
        try:
            async with asyncio.timeout(TRANSCRIPT_S):
                await self._endpoint.send_bytes(url, episode.openai_api_key, transcript)
        except (ClientError, TimeoutError) as error:
            logger.info("episode %s: its transcript is not recorded: %s", episode.episode_uuid, error)

    async def aclose(self) -> None:
        """End the eval and close the connections."""
        runner, self._runner = self._runner, None
        try:
            if runner is not None:
                await runner.__aexit__(None, None, None)
        finally:
            await self._endpoint.aclose()

    async def _open_runner(self) -> TaskRunner:
        if self._runner is not None and self._runner.is_open:
            return self._runner
        async with self._opening:
            if self._runner is None or not self._runner.is_open:
                self._runner = await TaskRunner(self._loaded, self._options).__aenter__()
            return self._runner

    def _task(self, payload: Mapping[str, JsonValue]) -> InspectTaskInfo:
        named = payload.get("task")
        if not isinstance(named, str):  # No worker could run it: its own failure, not this worker's.
            raise WorkerError("the episode's payload names no task, so there is no sample to run")
        if named not in self._tasks:
            runs = ", ".join(repr(info.task_id) for info in self._loaded)
            raise WrongTaskError(f"the episode is of the task {named!r}, this worker runs {runs}")
        return self._tasks[named]


def _sample(payload: Mapping[str, JsonValue]) -> Sample:
    try:
        sample = sample_from_json(payload.get("sample"))  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:  # not a mapping, or without input
        raise WorkerError(f"the episode's payload holds no Inspect sample: {error}") from error
    if sample.id is None:
        raise WorkerError("the episode's sample has no id")
    return sample


class _GatewayPolicy:
    """Sends the model calls of one episode to its gateway endpoint."""

    def __init__(self, endpoint: ChatEndpoint, episode: Episode) -> None:
        self._endpoint = endpoint
        self._url = episode.openai_base_url
        self._key = episode.openai_api_key
        self._converter = ChatConverter()
        self._trace = traceparent()  # The solver runs in a task of the eval's.
        self.calls = 0
        self.lost: ClaimLostError | None = None

    async def generate(self, request: GenerateRequest) -> ModelOutput:
        body = self._converter.request(request.messages, request.tools, request.tool_choice, request.config)
        try:
            completion = await self._endpoint.complete(self._url, self._key, body, trace=self._trace)
        except ClaimLostError as error:
            self.lost = error
            raise
        self.calls += 1
        return self._converter.output(completion)


def _output(outcome: EpisodeOutcome, scored: EpisodeReward, calls: int) -> WorkflowOutput:
    report = report_of(outcome, scored)
    return WorkflowOutput(
        reward=scored.reward,
        metadata=report.metadata,
        log_metrics={**report.metrics, "model_calls": float(calls)},
    )


@dataclass(frozen=True)
class RetryPolicy:
    """How long a failing model call is retried."""

    attempts: int = 6
    """Maximum number of attempts that end in a server error."""

    max_away_s: float = 300.0
    """Seconds in all that one call may wait for a server that is not there, such as one that is restarted:
    the claim outlives that."""

    first_delay_s: float = 0.25
    """Delay after the first failure; doubles each time, up to `max_delay_s`, with a jitter of 50%."""

    max_delay_s: float = 8.0
    max_busy_s: float = 600.0
    """Seconds in all that one call may wait for the `Retry-After` of 429 and 503."""


class ChatEndpoint:
    """Chat completions over one pool of connections, which a worker process shares.

    Opened by its first call; close it with `aclose`. Belongs to one event loop. Uses aiohttp, which Inspect
    installs: a request costs a fraction of the CPU time that it costs with httpx.
    """

    def __init__(
        self,
        *,
        connections: int = 512,
        call_timeout_s: float = 900.0,
        retry: RetryPolicy | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`call_timeout_s` limits one attempt; tests replace `sleep`."""
        self._connections = connections
        self._timeout = aiohttp.ClientTimeout(total=call_timeout_s, sock_connect=30.0)
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        self._session: aiohttp.ClientSession | None = None

    async def complete(
        self, base_url: str, api_key: str, body: dict[str, Any], *, trace: str = ""
    ) -> dict[str, Any]:
        """POST `body` to `{base_url}/chat/completions`; returns the completion. `trace`: its `traceparent`.

        A lost claim (409 claim_lost) raises ClaimLostError at once, any other refusal RequestRefusedError. A
        busy or restarting server is retried; ServerUnreachableError when the attempts or the wait are used
        up.
        """
        url = f"{base_url.rstrip('/')}/chat/completions"
        data = json.dumps(body, separators=(",", ":")).encode()
        return json.loads(await self._answer(url, api_key, data, "application/json", trace=trace))

    async def send_bytes(self, url: str, api_key: str, data: bytes) -> None:
        """POST `data` to `url`. Raises what `complete` raises."""
        await self._answer(url, api_key, data, "application/octet-stream")

    async def _answer(
        self, url: str, api_key: str, data: bytes, content_type: str, *, trace: str = ""
    ) -> bytes:
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": content_type}
        if trace:
            headers[HEADER] = trace
        failures, waited, away = 0, 0.0, 0.0
        while True:
            status, reply, retry_after = await self._post(url, data, headers)
            if status == 200:
                return reply
            if status in _BUSY and retry_after is not None and waited < self._retry.max_busy_s:
                waited += retry_after
                await self._sleep(retry_after)
                continue
            failures += 1
            _raise_refusal(status, reply)
            delay_s = self._delay(failures)
            away = away + delay_s if status in _AWAY else 0.0
            if away > self._retry.max_away_s or (not away and failures >= self._retry.attempts):
                raise ServerUnreachableError(
                    f"{url}: {failures} attempts failed, the last one: {_words(reply)}"
                )
            await self._sleep(delay_s)

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _post(self, url: str, data: bytes, headers: dict[str, str]) -> tuple[int, bytes, float | None]:
        """Status, body and seconds of Retry-After; without an answer 0 or `_TIMED_OUT`, and the reason."""
        if self._session is None:
            trusted = certificates(ca_file) if (ca_file := os.environ.get(CA_FILE)) else True
            connector = aiohttp.TCPConnector(limit=self._connections, ssl=trusted)
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        try:
            async with self._session.post(url, data=data, headers=headers) as response:
                return response.status, await response.read(), _seconds(response.headers.get("Retry-After"))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            return 0, f"{type(error).__name__}: {error}".encode(), None
        except TimeoutError:
            return _TIMED_OUT, f"no answer within {self._timeout.total:g} s".encode(), None

    def _delay(self, failures: int) -> float:
        delay = min(self._retry.first_delay_s * 2 ** (failures - 1), self._retry.max_delay_s)
        return delay * random.uniform(0.5, 1.5)


def _raise_refusal(status: int, reply: bytes) -> None:
    """Raise for a status that a retry cannot change."""
    if status <= 0 or status == 429 or status >= 500:
        return
    if status == 409 and _error(reply).get("code") == "claim_lost":
        raise ClaimLostError(_words(reply))
    raise RequestRefusedError(status, _words(reply))


def _error(reply: bytes) -> dict[str, Any]:
    try:
        error = json.loads(reply)["error"]
    except (ValueError, TypeError, KeyError):
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _words(reply: bytes) -> str:
    return str(_error(reply).get("message") or reply.decode(errors="replace")[:500])


def _seconds(header: str | None) -> float | None:
    try:
        seconds = float(header) if header is not None else None
    except ValueError:
        return None
    return None if seconds is None else min(max(seconds, 0.0), 60.0)

"""An error in one episode of a worker, at any stage, ends neither its other episodes nor the worker.

It is recorded as that episode's failure, with its reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from failing_ledger import VICTIM, planted
from interchange_helpers import collect, new_episode
from interchange_setup import Setup, serving
from tinkerscript.client import AsyncTinkerScriptClient, Episode, Runner
from tinkerscript.client.episode import RolloutFunction
from tinkerscript.client.operations import Operations
from tinkerscript.limits import OUTPUT_BYTES
from tinkerscript.server.routes.episodes import EpisodeRoutes
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed, Outcome
from tinkerscript.workers.base_task import EpisodeModel, Task, TaskSample
from tinkerscript.workers.worker import TaskRollout

pytestmark = pytest.mark.timeout(60)

NAMES = (VICTIM, "neighbor", "later", "last")
"""Uuids of the episodes, and ids of their samples, in the order in which they are handed out."""


class Wordless(Exception):
    """Its words cannot be had."""

    def __str__(self) -> str:
        raise RuntimeError("planted: the error's own words")


class Abrupt(BaseException):
    """As those of pytest, trio and others, which `except Exception` lets through."""


def raising(error: BaseException) -> Callable[[], Any]:
    def fails() -> Any:
        raise error

    return fails


def nested() -> Any:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    return value


ROLLOUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (raising(RuntimeError("planted: rollout")), "RuntimeError: planted: rollout"),
    "raises the end of an iterator": (raising(StopIteration()), "StopIteration"),
    "exits": (raising(SystemExit(3)), "SystemExit: 3"),
    "is cancelled": (raising(asyncio.CancelledError()), "CancelledError"),
    "raises what is no Exception": (raising(Abrupt("planted")), "Abrupt: planted"),
    "raises a group": (raising(BaseExceptionGroup("both", [Abrupt("planted")])), "Abrupt: planted"),
    "raises without words": (raising(Wordless()), "Wordless"),
    "raises half a character": (raising(ValueError("planted \ud800")), "ValueError: planted"),
    "raises at length": (raising(ValueError("planted" * 3_000_000)), "ValueError: planted"),
    "returns nothing": (lambda: None, "not NoneType"),
    "returns no number": (lambda: float("nan"), "finite"),
    "returns too much": (lambda: 1e300, "reward"),
    "returns half a character": (lambda: (1.0, {"answer": "\ud800"}), "surrogate"),
    "returns what JSON has not": (lambda: (1.0, {"answer": {1, 2}}), "metadata"),
    "returns nested lists": (lambda: (1.0, {"answer": nested()}), "metadata"),
    "returns more than a result may have": (lambda: (1.0, {"answer": "x" * OUTPUT_BYTES.limit}), "bytes"),
}
"""What an episode's rollout does, which is its name too -> it, and part of the reason."""


@pytest.fixture
async def server(tmp_path: Path, byte_model: Path) -> AsyncIterator[Setup]:
    async with serving(tmp_path, byte_model, max_attempts=1) as setup:
        yield setup


async def worked(server: Setup, rollout: RolloutFunction, names: Sequence[str] = NAMES) -> dict[str, Outcome]:
    """How the episodes ended in a worker that works on two at a time, by uuid."""
    payloads = {name: json.dumps({"task": "sums", "sample": {"id": name}}).encode() for name in names}
    await server.link.register([new_episode(name, payload=payloads[name]) for name in names])
    async with AsyncTinkerScriptClient(server.url, allow_discard_timeout=1.0) as client:
        runner = Runner(rollout, client=client, concurrency=2)
        running = asyncio.create_task(runner.run())
        collecting = asyncio.create_task(collect(server.link, len(names)))
        await asyncio.wait((running, collecting), return_when=asyncio.FIRST_COMPLETED)
        assert not running.done(), f"the worker ended: {running.exception()!r}"
        runner.stop()
        assert (await running).running == 0
    return await collecting


def reason_of(outcome: Outcome) -> str:
    """Why the episode failed."""
    assert isinstance(outcome, EpisodeFailed)
    return str(outcome.failures[-1]["message"])


def plain(rollout: Callable[[Episode], Any]) -> RolloutFunction:
    return rollout


def asynchronous(rollout: Callable[[Episode], Any]) -> RolloutFunction:
    async def with_await(episode: Episode) -> Any:
        return rollout(episode)

    return with_await


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_whatever_a_rollout_raises_or_returns(
    server: Setup,
    kind: Callable[[Callable[[Episode], Any]], RolloutFunction],
    caplog: pytest.LogCaptureFixture,
) -> None:
    # pytest-xdist could not send tracebacks with half a character, nor megabytes of them.
    caplog.set_level(logging.CRITICAL, logger="tinkerscript.client.runner")

    def rollout(episode: Episode) -> Any:
        return 1.0 if (case := ROLLOUTS.get(episode.episode_uuid)) is None else case[0]()

    names = [name for case in ROLLOUTS for name in (case, f"after one that {case}")]
    outcomes = await worked(server, kind(rollout), names)
    ended = {name for name, outcome in outcomes.items() if isinstance(outcome, EpisodeAccepted)}
    assert ended == set(names) - ROLLOUTS.keys()
    reasons = {case: reason_of(outcomes[case]) for case in ROLLOUTS}
    assert [case for case, (_, words) in ROLLOUTS.items() if words not in reasons[case]] == [], reasons


class Sums(Task):
    task_id = "sums"

    def samples(self, *, held_out: bool) -> Sequence[TaskSample]:
        return [{"id": name} for name in NAMES]

    async def rollout(self, sample: TaskSample, model: EpisodeModel) -> float:
        return 1.0


STAGES: dict[str, tuple[type[Any], str, str]] = {
    "claim": (EpisodeRoutes, "_claimed", "planted: claim"),
    "loading": (Sums, "own_sample", "planted: loading"),
    "rollout": (Sums, "rollout", "planted: rollout"),
    "end": (Operations, "end_episode", "planted: end"),
    "cleanup": (Operations, "abort_episode", "no activity"),
}
"""Stage -> the class and the method that does it, and part of the reason."""


@pytest.mark.parametrize("stage", STAGES)
async def test_a_defect_at_one_stage(server: Setup, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = ("rollout", "cleanup") if stage == "cleanup" else (stage,)
    for each in failing:
        owner, name, _ = STAGES[each]
        monkeypatch.setattr(owner, name, planted(getattr(owner, name), each))
    async with TaskRollout({"sums": Sums()}) as rollout:
        outcomes = await worked(server, rollout)
    assert STAGES[stage][2] in reason_of(outcomes.pop(VICTIM))
    assert {type(outcome) for outcome in outcomes.values()} == {EpisodeAccepted}

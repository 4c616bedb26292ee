"""The training loop without a model: what it publishes, writes down, sets aside and saves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker

from rollout_helpers import make_accepted, make_call
from tinkerscript.config import RunConfig
from tinkerscript.errors import AlignmentError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.record.schema import RECORD_FILE
from tinkerscript.record.writer import RecordWriter
from tinkerscript.rollouts.alignment import AlignmentReport
from tinkerscript.sampler import Sampler
from tinkerscript.testing import QuietReporter, ScriptedSampler
from tinkerscript.train.alignment_check import TrainedModel
from tinkerscript.train.backends.backend import Publisher
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.grpo import GRPO
from tinkerscript.train.history import read_history
from tinkerscript.train.journal import (
    Checkpointed,
    Discarded,
    EpisodeRegistered,
    Journal,
    SetAside,
    StepConsumed,
    read_journal,
)
from tinkerscript.train.learner import Learner
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.policy import Policy
from tinkerscript.train.recorder import RunRecorder
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.samples import TaskSamples
from tinkerscript.trainer_link.messages import Outcome

ARITHMETIC = Path(__file__).parents[3] / "examples" / "arithmetic.py"


class Client:
    """A training client that notes what it is asked; its logprobs are off by `gap`."""

    def __init__(self, folder: Path) -> None:
        self.steps = 0
        self.gap = 0.0
        self._folder = folder

    async def forward(self, data: list[tinker.Datum], loss_fn: str) -> tinker.ForwardBackwardOutput:
        rows: list[Any] = []
        for datum in data:
            length = len(datum.loss_fn_inputs["weights"].to_numpy())
            rows.append(
                {"logprobs": tinker.TensorData.from_numpy(np.full(length, self.gap - 0.5, np.float32))}
            )
        return tinker.ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=rows, metrics={})

    async def forward_backward(self, data: list[tinker.Datum], *_: Any) -> tinker.ForwardBackwardOutput:
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type="", loss_fn_outputs=[], metrics={"loss:sum": 1.0}
        )

    async def optim_step(self, _: tinker.AdamParams) -> tinker.types.OptimStepResponse:
        self.steps += 1
        return tinker.types.OptimStepResponse(metrics={})

    async def save_state(self, name: str) -> None:
        (self._folder / name).mkdir()
        (self._folder / name / "weights").write_text("w")


class Published(Publisher):
    max_context = 64

    async def publish(self, policy_version: int) -> Sampler:
        return ScriptedSampler(lambda prompt: prompt)


@dataclass
class Answering(EpisodeSource):
    """Every episode ends at once, sampled by the newest version or by `version`."""

    version: int | None = None
    statuses: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    starts: int = 0

    def __post_init__(self) -> None:
        self.ended: asyncio.Queue[Outcome] = asyncio.Queue()

    async def start(self, episodes: Sequence[PlannedEpisode]) -> None:
        self.starts += 1
        newest = max(status.get("policy_version", -1) for status in self.statuses)
        version, self.version = newest if self.version is None else self.version, None
        for number, episode in enumerate(episodes):
            call = make_call(None, [5, 6], [7, 8], policy_version=version, logprobs=[-0.5] * 2)
            ended = make_accepted(
                *(episode.episode_uuid, float(number % 2), [call]),
                group_id=episode.group_id,
                policy_version_at_claim=version,
            )
            self.ended.put_nowait(ended)

    async def outcomes(self) -> list[Outcome]:
        return [await self.ended.get()]

    def set_status(self, **changed: Any) -> None:
        self.statuses.append({name: value for name, value in changed.items() if value is not None})

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        assert not episode_uuids, "nothing is left over"

    async def abandon(self, registered: Sequence[EpisodeRegistered], reason: str) -> None:
        assert not registered


@dataclass
class Run:
    grpo: GRPO
    client: Client
    source: Answering
    shown: QuietReporter

    @property
    def events(self) -> list[Any]:
        return read_journal(self.grpo.parts.folder.path / "journal.jsonl")

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def running(tmp_path: Path, source: Answering | None = None, **training: Any) -> AsyncGenerator[Run]:
    settings = {"steps": 3, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.1, **training}
    path = tmp_path / "run"
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(path),
            "task": {"name": f"{ARITHMETIC}@arithmetic"},
            "training": {"checkpoint_every": 2, "inspect_log_every": 0, **settings},
            "evaluation": {"episodes": 0},
        }
    )
    folder = RunFolder(config, TINY_MODEL, now=datetime.now(), path=path if path.exists() else None)
    history = read_history(folder.events(), exists=folder.has_checkpoint)
    shown = QuietReporter()
    with (
        RecordWriter(path / RECORD_FILE) as record,
        Journal(path / "journal.jsonl", run_id=folder.run_id) as journal,
    ):
        client: Any = Client(folder.checkpoints)
        learner = Learner(client, config.training, model=TrainedModel(64), report=AlignmentReport(), seed=1)
        made = source or Answering()
        samples = TaskSamples(config.all_tasks, seed=1)
        samples.next_position = history.next_position
        policy = Policy(Published(), journal)
        recorder = RunRecorder(record, "off")
        parts = OpenRun(config, folder, journal, recorder, shown, history)
        grpo = GRPO(parts, samples, made, policy, [learner])
        async with asyncio.timeout(60):
            yield Run(grpo, client, made, shown)
    folder.close()


async def test_each_step_trains_on_its_groups_and_publishes_a_version(tmp_path: Path) -> None:
    async with running(tmp_path, max_policy_lag=1) as run:
        await run.grpo.run()
    assert run.client.steps == 3
    consumed = run.of(StepConsumed)
    assert [(event.step, len(event.episode_uuids), len(event.trained)) for event in consumed] == [
        (1, 4, 2),
        (2, 4, 2),
        (3, 4, 2),
    ]
    assert [event.step for event in run.of(Checkpointed)] == [2, 3]
    assert run.source.statuses[:4] == [
        {"engine_status": "ENGINE.WEIGHT_SYNCING"},
        {"engine_status": "ENGINE.ROLLING", "policy_version": 0, "global_step": 0, "usable_versions": [0]},
        {"usable_versions": [0]},
        {"engine_status": "ENGINE.WEIGHT_SYNCING"},
    ]
    assert run.source.statuses[-1]["usable_versions"] == [2, 3], "one step behind the newest, and it"
    assert [step["policy_version"] for step in run.shown.steps] == [1, 2, 3]


async def test_a_step_whose_results_are_all_stale_collects_others(tmp_path: Path) -> None:
    async with running(tmp_path, Answering(version=-7), steps=1) as run:
        await run.grpo.run()
    assert run.source.starts == 2
    assert {event.reason for event in run.of(Discarded)} == {
        "stale: sampled by weights that this run does not build on"
    }
    assert [note for note in run.shown.notes if "all 4 results of the batch are stale" in note]
    (step,) = run.shown.steps
    assert (step["lag/gone"], step["lag/0"], step["groups/trained"]) == (4, 4, 2)


async def test_a_misaligned_step_changes_nothing_and_can_be_resumed(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        misaligned = run.grpo.learners[0]
        check = misaligned.check

        async def spoiled(*groups: Any, step: int, **more: Any) -> None:
            run.client.gap = 1.0 if step == 2 else 0.0
            await check(*groups, step=step, **more)

        misaligned.check = spoiled  # type: ignore[method-assign]
        with pytest.raises(AlignmentError, match="step 2: the trainer does not reproduce"):
            await run.grpo.run()
    assert run.client.steps == 1
    (aside,) = run.of(SetAside)
    assert (aside.step, len(aside.episode_uuids)) == (2, 4)
    assert [event.step for event in run.of(Checkpointed)] == [1], "of the last good step"
    async with running(tmp_path) as again:
        await again.grpo.run()
    assert again.client.steps == 2
    fresh = {uuid for event in again.of(StepConsumed) for uuid in event.episode_uuids}
    assert not fresh & set(aside.episode_uuids)
    assert [event.step for event in again.of(StepConsumed)] == [1, 2, 3]


async def test_a_run_that_is_stopped_saves_its_last_finished_step(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        task = asyncio.create_task(run.grpo.run())
        step, reached = run.shown.step, asyncio.Event()

        def noted(number: int, metrics: Any) -> None:
            step(number, metrics)
            reached.set()

        run.shown.step = noted  # type: ignore[method-assign]
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [event.step for event in run.of(Checkpointed)] == [1]

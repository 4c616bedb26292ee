"""The training loop without a model: what it publishes, writes down, sets aside and saves."""

from __future__ import annotations

import asyncio
import errno
import gzip
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import tinker

from clock import Clock
from interchange_helpers import until
from rollout_helpers import make_accepted, make_call
from run_ledger import KeptRows, LedgerWriter
from tinkerscript.config import RunConfig
from tinkerscript.errors import AlignmentError, EngineError, LinkError, NoSuccessError
from tinkerscript.ledger.history import History, PlannedRow
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import (
    CheckpointRow,
    EvaluationRow,
    FindingRow,
    MetricRow,
    PublicationRow,
    StepRow,
    TokensRow,
    TrainedRow,
    TrainerRow,
    Use,
)
from tinkerscript.ledger.tokens import unpacked_sequences
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import FloatArray, IntArray
from tinkerscript.sampler import Sampler
from tinkerscript.testing import QuietReporter
from tinkerscript.train.backends.backend import Publisher
from tinkerscript.train.collector import Batch
from tinkerscript.train.curriculum import Curriculum
from tinkerscript.train.episode_source import EpisodeSource, PlannedEpisode
from tinkerscript.train.evaluation import Evaluator
from tinkerscript.train.learner import Learner, LearnerState
from tinkerscript.train.loop import TrainingLoop
from tinkerscript.train.open_run import OpenRun
from tinkerscript.train.policy import Policy
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.step_metrics import StepFacts, StepMetric
from tinkerscript.train.token_advantages import ReferenceLogprobs
from tinkerscript.trainer_link.messages import BatchProgress, EpisodeAccepted, EpisodeFailed, Outcome
from trainer_fakes import ScriptedClient, ScriptedPublisher, made_learner

ARITHMETIC = Path(__file__).parents[3] / "examples" / "arithmetic.py"


class Client(ScriptedClient):
    """One that saves into a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    async def save_state(self, name: str) -> None:
        (self._folder / name).mkdir(parents=True, exist_ok=True)
        (self._folder / name / "weights").write_text("w")


async def start_logprobs(sequences: list[IntArray], _: list[FloatArray]) -> list[FloatArray]:
    return [np.full(len(ids), -0.75, np.float32) for ids in sequences]


class Answering(KeptRows, EpisodeSource):
    """Every episode ends at once, sampled by the newest version or by `version`."""

    def __init__(self, version: int | None = None) -> None:
        super().__init__()
        self.version = version
        self.statuses: list[dict[str, Any]] = []
        self.starts: list[tuple[int, int]] = []
        """Step and episodes of each call of `start`."""
        self.labels: list[str] = []
        """Of the evaluations among them."""
        self.all: list[EpisodeAccepted] = []
        self.ended: asyncio.Queue[Outcome] = asyncio.Queue()

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        self.starts.append((step, len(episodes)))
        self.labels += {episode.label for episode in episodes if episode.episode_type == "eval"}
        newest = max(status.get("policy_version", -1) for status in self.statuses)
        version, self.version = newest if self.version is None else self.version, None
        for number, episode in enumerate(episodes):
            self.end(episode.episode_uuid, episode.group_id, version, reward=float(number % 2))

    def end(self, uuid: str, group_id: str, version: int, *, reward: float, **call_values: Any) -> None:
        number = len(self.all) + 1
        values = {"policy_version": version, "logprobs": [-0.5] * 2, "seed": number, **call_values}
        call = make_call(None, [5, 6], [7, 8], **values)
        more: dict[str, Any] = {"sequence": number, "number": number}
        more["episode_type"] = "eval" if group_id.startswith("eval-") else "train"
        self.all.append(make_accepted(uuid, reward, [call], group_id=group_id, **more))
        self.ended.put_nowait(self.all[-1])

    async def outcomes(self) -> list[Outcome]:
        return [await self.ended.get()]

    def set_status(self, **changed: Any) -> None:
        self.statuses.append({name: value for name, value in changed.items() if value is not None})

    def collecting(self, *_: Any, **__: Any) -> None:
        """Nobody shows it."""

    def cancel(self, episode_uuids: Sequence[str], reason: str) -> None:
        assert not episode_uuids, "nothing is left over"


@dataclass
class Run:
    loop: TrainingLoop
    learners: list[Learner]
    client: Client
    source: Answering
    shown: QuietReporter

    @property
    def learner(self) -> Learner:
        return self.learners[0]

    def trained(self, step: int) -> list[TrainedRow]:
        return [row for row in self.source.of(TrainedRow) if row.step == step]

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.source.of(StepRow) if not row.stopped]

    @property
    def checkpoints(self) -> list[int]:
        return [row.step for row in self.source.of(CheckpointRow)]


@asynccontextmanager
async def running(
    tmp_path: Path,
    source: Answering | None = None,
    *,
    history: History | None = None,
    replayed: Sequence[EpisodeAccepted] = (),
    recording: str = "all",
    evaluation: Mapping[str, float] | None = None,
    extra_metrics: Sequence[StepMetric] = (),
    role: str = "",
    scored: ReferenceLogprobs = start_logprobs,
    holds: int = 0,
    workers: Mapping[str, int] | None = None,
    restore: Callable[[int], Awaitable[None]] | None = None,
    renew: Callable[[int], Awaitable[None]] | None = None,
    publisher: Publisher | None = None,
    has_curriculum: bool = False,
    is_of_clients: bool = False,
    **training: Any,
) -> AsyncGenerator[Run]:
    settings: dict[str, Any] = {"steps": 3, "groups_per_step": 2, "group_size": 2, "learning_rate": 0.1}
    settings |= training
    path = tmp_path / "run"
    config = RunConfig.model_validate(
        {
            "experiment_dir": str(path),
            "recording": recording,
            "task": {} if is_of_clients else {"name": f"{ARITHMETIC}@arithmetic"},
            "training": {"checkpoint_every": 2, "inspect_log_every": 0, **settings},
            "evaluation": evaluation or {"episodes": 0},
            "workers": workers or {},
        }
    )
    folder = RunFolder(config, TINY_MODEL, now=datetime.now(), path=path if path.exists() else None)
    history = history or History()
    shown = QuietReporter()
    clients = {
        each: Client(folder.checkpoints_of(each) if each else folder.checkpoints) for each in {"", role}
    }
    learners = [made_learner(clients[each], role=each, start=scored, **settings) for each in sorted(clients)]
    made = source or Answering()
    samples = None if is_of_clients else TaskSamples(config.all_tasks, seed=1)
    if samples is not None:
        samples.next_position = history.next_position
        samples.curriculum = Curriculum(config.training.curriculum, 1) if has_curriculum else None
    policy = Policy(publisher or ScriptedPublisher(holds=holds), made, version=history.newest_version)
    parts = OpenRun(config, folder, made, LedgerReader(folder.path), shown, history, replayed)
    loop = TrainingLoop(parts, samples, made, policy, learners, extra_metrics, restore=restore, renew=renew)
    async with asyncio.timeout(60):
        yield Run(loop, learners, clients[""], made, shown)
    folder.close()


async def finished(tmp_path: Path, source: Answering | None = None, **options: Any) -> Run:
    """A run that has ended by itself."""
    async with running(tmp_path, source, **options) as run:
        await run.loop.run()
    return run


async def test_each_step_trains_on_its_groups_and_publishes_a_version(tmp_path: Path) -> None:
    run = await finished(tmp_path)
    assert run.client.steps == 3
    steps = run.source.of(StepRow)
    assert [(row.step, row.policy_version) for row in steps] == [(1, 1), (2, 2), (3, 3)]
    assert {(row.reward, row.accepted, row.failed, row.trained, row.max_lag) for row in steps} == {
        (0.5, 4, 0, 4, 0)
    }
    for step in (1, 2, 3):
        rows = run.trained(step)
        assert len({row.episode for row in rows}) == 4
        assert {row.outcome for row in rows} == {Use.TRAINED}
        assert sorted(row.place for row in rows) == [0, 0, 1, 1]
        tokens = [row.episode for row in run.source.of(TokensRow) if row.step == step]
        assert sorted(tokens) == sorted(row.episode for row in rows)
        metrics = {row.name: row.value for row in run.source.of(MetricRow) if row.step == step}
        assert metrics["reward/mean"] == 0.5
    assert run.source.starts == [(1, 4), (2, 4), (3, 4)]
    assert run.checkpoints == [2, 3]
    in_order = [row.step for row in run.source.kept if isinstance(row, PublicationRow | StepRow)]
    assert in_order == [0, 1, 1, 2, 2, 3, 3], "a version is published before its step is over"
    assert run.source.statuses[:4] == [
        {"engine_status": "ENGINE.WEIGHT_SYNCING"},
        {"engine_status": "ENGINE.ROLLING", "policy_version": 0, "global_step": 0, "usable_versions": [0]},
        {"usable_versions": []},
        {"engine_status": "ENGINE.WEIGHT_SYNCING"},
    ]
    assert run.source.statuses[-1]["usable_versions"] == [3]
    assert [step["policy_version"] for step in run.shown.steps] == [1, 2, 3]
    assert [wait for wait in run.shown.waits if "episodes of" not in wait] == [
        "the first weights to be published",
        *("step 1 to train", "step 2 to train", "the checkpoint of step 2"),
        *("step 3 to train", "the checkpoint of step 3", "the last episodes to end"),
    ]


async def test_a_step_tells_how_long_it_took_and_how_much_of_that_was_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One episode runs at a time, with a call in three seconds of four."""
    clock = Clock()
    for module in ("loop", "occupancy"):
        monkeypatch.setattr(f"tinkerscript.train.{module}.time", SimpleNamespace(monotonic=clock))

    class Slow(Answering):
        async def outcomes(self) -> list[Outcome]:
            ended = await super().outcomes()
            run.loop.policy.calls.number += 1
            clock.now += 3
            run.loop.policy.calls.number -= 1
            clock.now += 1
            return ended

    class SlowToPublish(ScriptedPublisher):
        async def publish(self, policy_version: int) -> Sampler:
            clock.now += 5
            return await super().publish(policy_version)

    checkpoint = CheckpointRow(step=1, time=1.0, policy_version=1, train_seconds=100.0)
    history = History(step=1, checkpoint=checkpoint, versions={1: 1}, newest_version=1, next_position=2)
    workers = {"count": 1, "concurrency": 1}
    async with running(
        tmp_path, Slow(), history=history, publisher=SlowToPublish(), workers=workers, groups_per_step=1
    ) as run:
        await run.loop.run()
    assert [step["time/publish_s"] for step in run.shown.steps] == [5, 5]
    assert [step["time/sample_s"] / step["time/rollout_s"] for step in run.shown.steps] == [0.75, 0.75]
    seconds = [(row.step, row.train_seconds) for row in run.source.of(CheckpointRow)]
    assert seconds == [(2, 113), (3, 126)], "of two episodes and a publication each"


@pytest.mark.parametrize(
    ("every", "saved"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (6, [5])]
)
async def test_checkpoints_are_saved_every_so_many_steps_and_at_the_end(
    tmp_path: Path, every: int, saved: list[int]
) -> None:
    async with running(tmp_path, steps=5, checkpoint_every=every, keep_checkpoints=2) as run:
        await run.loop.run()
        assert run.loop.parts.folder.whole_checkpoints() == saved[-2:]
    assert run.checkpoints == saved


async def test_a_checkpoint_has_what_a_run_goes_on_with(tmp_path: Path) -> None:
    settings = {"advantage_baseline": "sample_mean", "max_policy_lag": 1, "checkpoint_every": 0}
    run = await finished(tmp_path, role="judge", has_curriculum=True, **settings)
    (row,) = run.source.of(CheckpointRow)
    assert (row.step, row.policy_version) == (3, 3)
    learners = msgspec.json.decode(row.learners, type=dict[str, LearnerState])
    assert learners == {each.role: each.state for each in run.learners}
    assert (learners[""].rewards.count, len(learners[""].samples)) == (12, 6)
    assert json.loads(row.curriculum) == dict.fromkeys(learners[""].samples, 0.5)
    reports = {"": json.loads(row.report), **json.loads(row.role_reports)}
    assert reports == {each.role: json.loads(json.dumps(each.report.as_json())) for each in run.learners}
    assert {lag: gap["tokens"] for lag, gap in reports[""]["gaps"].items()} == {"0": 8, "1": 16}
    run = await finished(tmp_path / "without", **settings)
    assert [(row.curriculum, row.role_reports) for row in run.source.of(CheckpointRow)] == [(b"{}", b"{}")]


async def test_the_reference_of_the_divergences_is_renewed_from_a_checkpoint_that_stays(
    tmp_path: Path,
) -> None:
    settings = {"kl_penalty_coef": 0.1, "kl_reference_every": 2}
    settings |= {"steps": 7, "checkpoint_every": 0, "keep_checkpoints": 1}
    renewed = list[tuple[int, int]]()

    async def renew(step: int) -> None:
        renewed.append((step, run.loop.step))

    async with running(tmp_path, renew=renew, **settings) as run:
        await run.loop.run()
        assert run.loop.parts.folder.whole_checkpoints() == [6, 7]
    assert renewed == [(2, 2), (4, 4), (6, 6)], "before the next step"
    assert run.checkpoints == [2, 4, 6, 7]
    assert [wait for wait in run.shown.waits if "KL" in wait] == [
        f"the weights of step {step}, the KL reference" for step in (2, 4, 6)
    ]
    renewed.clear()
    history = History(step=5, versions={0: 0, 5: 5}, newest_version=5, next_position=10)
    async with running(tmp_path, renew=renew, history=history, **settings) as run:
        await run.loop.run()
    assert renewed == [(4, 5), (6, 6)], "a resumed run begins with the one that it had"


async def test_a_run_trains_on_what_clients_register(tmp_path: Path) -> None:
    class Clients(Answering):
        """They run two groups for each step that waits."""

        def collecting(self, batch: BatchProgress | None, **_: Any) -> None:
            if batch is None or batch.label in self.labels:
                return
            self.labels.append(batch.label)
            for number in range(4):
                group, version = f"{batch.label}/{number // 2}", len(self.labels) - 1
                self.end(f"{batch.label}/{number}", group, version, reward=float(number % 2))

        async def outcomes(self) -> list[Outcome]:
            return [msgspec.structs.replace(each, pool="w") for each in await super().outcomes()]

    source = Clients()
    run = await finished(tmp_path, source, is_of_clients=True, on_stale="drop")
    assert (run.steps, source.starts) == ([1, 2, 3], [])
    assert [len(run.trained(step)) for step in run.steps] == [4, 4, 4]
    assert source.statuses[-1]["usable_versions"] == [2, 3], "older results would be dropped"


async def test_groups_start_beside_the_steps(tmp_path: Path) -> None:
    run = await finished(tmp_path, max_policy_lag=1)
    assert run.source.starts == [(1, 8), (2, 4)], "two steps' worth, and what the last step needs"
    assert [row.max_lag for row in run.source.of(StepRow)] == [0, 1, 1]
    assert [{row.outcome for row in run.trained(step)} for step in (1, 2, 3)] == [{Use.TRAINED}] * 3
    assert run.source.statuses[-1]["usable_versions"] == [2, 3], "one step behind the newest, and it"
    assert {step["time/wait_stale_s"] for step in run.shown.steps} == {0}


async def test_an_episode_that_is_too_old_counts_in_its_groups_baseline(tmp_path: Path) -> None:
    """It ends when two further steps have trained, and the step does not wait for it."""

    class Late(Answering):
        held: Sequence[PlannedEpisode] = ()

        async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
            if step == 1:
                self.held, episodes = episodes[:2], episodes[2:]
            await super().start(episodes, step=step)
            if step == 3:
                for reward, (each, version) in enumerate(zip(self.held, (0, 2), strict=True)):
                    self.end(each.episode_uuid, each.group_id, version, reward=float(reward))

    lag = {"max_policy_lag": 1, "on_stale": "drop"}
    run = await finished(tmp_path, Late(), steps=4, groups_per_step=1, **lag)
    late = [each for each in run.source.all if each.group_id.endswith("sample-0")]
    old, new = (
        next(row for row in run.source.of(TrainedRow) if row.episode == each.sequence) for each in late
    )
    assert (old.outcome, old.reason, old.advantage) == (Use.STALE, f"stale: {old.step - 1} steps old", -0.5)
    assert (new.outcome, new.reason, new.advantage, new.step) == (Use.TRAINED, "", 0.5, old.step)
    assert old.step > 2
    assert [step["episodes/stale"] for step in run.shown.steps][old.step - 1] == 1
    assert not any("usable_versions" in status for status in run.source.statuses), "every result counts"


async def test_an_evaluation_follows_a_step_and_is_told_at_once_with_what_it_used(tmp_path: Path) -> None:
    evaluation = {"episodes": 2, "every_steps": 1, "interim_episodes": 1}
    run = await finished(tmp_path, evaluation=evaluation, steps=2)
    assert run.source.starts == [(0, 2), (1, 4), (1, 1), (2, 4), (2, 2)]
    assert run.source.labels == ["before", "step-1", "after"]
    scored = [(row.label, row.step, row.accepted, row.score) for row in run.source.of(EvaluationRow)]
    assert scored == [("before", 0, 2, 0.5), ("step-1", 1, 1, 0.0), ("after", 2, 2, 0.5)]
    used = [row for row in run.source.of(TrainedRow) if row.outcome == Use.EVALUATED]
    assert [(row.episode, row.step) for row in used] == [(1, 0), (2, 0), (7, 1), (12, 2), (13, 2)]
    scores = [row for row in run.source.of(MetricRow) if row.name == "eval/score"]
    assert [(row.step, row.value) for row in scores] == [(0, 0.5), (1, 0.0), (2, 0.5)]


class Pending(Answering):
    """The episodes of evaluation `step-1` end, with `reward`, when those of step `until` start. Without a
    reward they fail."""

    def __init__(self, until: int, reward: float | None = 1.0) -> None:
        super().__init__()
        self.until, self.reward = until, reward
        self.pending: list[PlannedEpisode] = []
        self.is_over = False

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        if episodes[0].label == "step-1" and not self.is_over:
            self.starts.append((step, len(episodes)))
            self.pending += episodes
            return
        self.is_over |= step >= self.until and not episodes[0].label
        while self.is_over and self.pending:
            one = self.pending.pop()
            if self.reward is None:
                failed = {"kind": "error", "message": "no such file", "attempt": 1, "client_uuid": "w"}
                number = 1000 + len(self.pending)
                more = {"episode_type": "eval", "sequence": number, "number": number}
                self.ended.put_nowait(EpisodeFailed(episode_uuid=one.episode_uuid, failures=[failed], **more))
            else:
                self.end(one.episode_uuid, one.group_id, 1, reward=self.reward)
        await super().start(episodes, step=step)


async def test_steps_train_while_an_evaluation_runs_and_its_result_belongs_to_its_step(
    tmp_path: Path,
) -> None:
    evaluation = {"episodes": 1, "every_steps": 1, "interim_episodes": 3}
    run = await finished(tmp_path, Pending(4), evaluation=evaluation, steps=5, holds=4)
    scored = {row.label: row for row in run.source.of(EvaluationRow)}
    assert {label: (row.step, row.policy_version) for label, row in scored.items()} == {
        **{f"step-{step}": (step, step) for step in (1, 2, 3, 4)},
        **{"before": (0, 0), "after": (5, 5)},
    }
    order = [
        f"{type(row).__name__} {row.step}"
        for row in run.source.kept
        if isinstance(row, StepRow | EvaluationRow)
    ]
    assert order.index("StepRow 3") < order.index("EvaluationRow 1"), "it stood in nobody's way"
    assert order[-1] == "EvaluationRow 5"
    used = [row.episode for row in run.source.of(TrainedRow) if row.outcome == Use.EVALUATED]
    assert len(used) == len(set(used)) == 1 + 4 * 3 + 1
    assert all(row.step == 1 for row in run.source.of(MetricRow) if row.name == "eval/step-1")
    assert run.checkpoints == [1, 2, 3, 4, 5], "a resumed run could score every one of them"
    assert run.loop.parts.folder.whole_checkpoints() == [1, 4, 5], "the newest two, and the best's"


async def test_an_evaluation_that_fails_ends_the_run_between_two_steps_and_costs_none(tmp_path: Path) -> None:
    evaluation = {"episodes": 0, "every_steps": 1, "interim_episodes": 1}
    async with running(tmp_path, Pending(2, reward=None), evaluation=evaluation, holds=2) as run:
        with pytest.raises(NoSuccessError, match=r"evaluation step-1: all 1 episodes .*\n.*no such file"):
            await run.loop.run()
    assert run.steps == [1, 2]
    assert run.checkpoints == [1, 2]
    assert {row.outcome for row in run.source.of(TrainedRow)} == {Use.TRAINED}


@asynccontextmanager
async def evaluating(run: Run) -> AsyncGenerator[Evaluator]:
    """The evaluation of step 1 beside the 40 episodes of step 2."""
    evaluator = run.loop.evaluator
    await run.loop.policy.publish()
    run.source.statuses.append({"policy_version": 0})
    trained = [PlannedEpisode("train", "g", {}, episode_uuid=f"t{i}") for i in range(40)]
    evaluator.collector.expect(Batch("step 2"), trained, step=2)
    tasks = [asyncio.create_task(evaluator.run()), asyncio.create_task(evaluator.collector.run())]
    yield evaluator
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("slots", "room"), [(20, 2), (8, 1), (0, 4)])
async def test_evaluations_have_a_share_of_what_runs_while_steps_train(
    tmp_path: Path, slots: int, room: int
) -> None:
    """Of what runs at once: of the workers' slots, or where it has no workers of what has started."""
    evaluation = {"episodes": 0, "every_steps": 1, "interim_episodes": 30, "share": 0.1}
    workers = {"count": 2 if slots else 0, "concurrency": slots // 2 or 1}
    source = Pending(9)
    async with (
        running(tmp_path, source, evaluation=evaluation, workers=workers, holds=1) as run,
        evaluating(run) as evaluator,
    ):
        evaluator.collector.rollouts = 1000
        await evaluator.during(1, steps=9)
        assert len(source.pending) == room
        for number in range(1, 4):
            one = source.pending.pop(0)
            source.end(one.episode_uuid, one.group_id, 0, reward=1.0)
            await until(lambda number=number: sum(n for _, n in source.starts) == room + number)
            assert len(source.pending) == room, "another one starts where one has ended"


async def test_evaluations_have_a_share_of_what_has_run_while_steps_train(tmp_path: Path) -> None:
    """Also where one at a time ends much faster than those of a step do."""
    evaluation = {"episodes": 0, "every_steps": 1, "interim_episodes": 30, "share": 0.2}
    source = Answering()
    async with (
        running(tmp_path, source, evaluation=evaluation, holds=1) as run,
        evaluating(run) as evaluator,
    ):
        await evaluator.during(1, steps=9)
        for ended in range(1, 13):
            source.end(f"t{ended}", "g", 0, reward=1.0)
            await until(lambda ended=ended: evaluator.collector.rollouts == ended)
            await until(lambda ended=ended: len(source.starts) == 1 + ended // 4)


async def test_evaluations_that_were_interrupted_are_made_again_with_their_own_weights(
    tmp_path: Path,
) -> None:
    evaluation = {"episodes": 0, "every_steps": 1, "interim_episodes": 2}
    async with running(tmp_path, Pending(9), evaluation=evaluation, steps=6, holds=9) as run:
        work = asyncio.create_task(run.loop.run())
        await until(lambda: run.checkpoints[-1:] == [4])
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert run.source.of(EvaluationRow) == [], "the first one is in the way of the others"
    assert {*run.source.labels} >= {"step-2", "step-3"}, "by which the ledger knows them"
    last = run.source.of(CheckpointRow)[-1]
    history = History(
        step=last.step,
        checkpoint=last,
        interrupted=[1, 2, 3],
        versions={0: 0},
        newest_version=last.policy_version,
        next_position=8,
    )
    had: list[int] = []

    async def restore(step: int) -> None:
        had.append(step)

    async with running(
        tmp_path, history=history, evaluation=evaluation, steps=6, holds=9, restore=restore
    ) as again:
        (again.loop.parts.folder.checkpoints / "step_0003").rename(tmp_path / "gone")
        await again.loop.run()
    assert had == [1, last.step, 2, last.step]
    published = {row.policy_version: row.step for row in again.source.of(PublicationRow)}
    found = {row.label: row for row in again.source.of(EvaluationRow)}
    assert found.keys() == {"step-1", "step-2", *(f"step-{step}" for step in range(last.step, 6))}
    assert all(published[row.policy_version] == row.step for row in found.values())
    assert "evaluation step-3 was interrupted and is left out: its weights are gone" in again.shown.notes
    assert again.steps == [*range(last.step + 1, 7)]


async def test_a_step_whose_results_are_all_stale_collects_others(tmp_path: Path) -> None:
    run = await finished(tmp_path, Answering(version=-7), steps=1)
    assert run.source.starts == [(1, 4), (1, 4)]
    stale = [row for row in run.trained(1) if row.outcome == Use.STALE]
    assert [row.episode for row in stale] == [1, 2, 3, 4]
    assert {row.reason for row in stale} == {"stale: sampled by weights that this run does not build on"}
    assert [row.episode for row in run.trained(1) if row.outcome == Use.TRAINED] == [5, 6, 7, 8]
    assert [note for note in run.shown.notes if "all 4 results of the batch are stale" in note]
    (step,) = run.shown.steps
    assert (step["lag/gone"], step["lag/0"], step["groups/trained"]) == (4, 4, 2)


async def test_a_step_that_the_kl_penalty_alone_trains_is_no_idle_one(tmp_path: Path) -> None:
    class Agreeing(Answering):
        def end(self, *args: Any, **values: Any) -> None:
            super().end(*args, **values | {"reward": 1.0})

    run = await finished(tmp_path, Agreeing(), steps=1, kl_penalty_coef=0.1)
    assert {row.outcome for row in run.trained(1)} == {Use.TRAINED}
    (step,) = run.shown.steps
    assert (step["groups/trained"], step["groups/same_reward"], step["train/sequences"]) == (2, 0, 4)
    assert [note for note in run.shown.notes if "trained nothing" in note] == []


async def test_a_step_counts_every_episode_that_trained(tmp_path: Path) -> None:
    """A sequence that is refused takes its own episode's gradient away, and not that of its group."""

    class Constrained(Answering):
        def end(self, *args: Any, **values: Any) -> None:
            refused = {} if self.all else {"constrained": bytes([1, 1])}
            super().end(*args, **values, **refused)

    run = await finished(
        tmp_path, Constrained(), steps=1, group_size=4, groups_per_step=1, constrained_tokens="refuse"
    )
    assert [row.outcome for row in run.trained(1)] == [Use.MISALIGNED, *[Use.TRAINED] * 3]
    assert [row.trained for row in run.source.of(StepRow)] == [3]


async def test_an_episode_without_a_score_that_is_compared_ends_no_run(tmp_path: Path) -> None:
    class Scored(Answering):
        async def outcomes(self) -> list[Outcome]:
            (ended,) = await super().outcomes()
            scores = {} if ended.number == 1 else {"score/right": float(ended.number % 2)}
            return [msgspec.structs.replace(ended, log_metrics=scores)]

    weights = {"reward_weights": {"right": 1.0}}
    run = await finished(tmp_path, Scored(), steps=2, group_size=3, groups_per_step=1, **weights)
    assert run.steps == [1, 2]
    assert [row.outcome for row in run.trained(1)].count(Use.TRAINED) == 2
    assert [row.outcome for row in run.trained(2)] == [Use.TRAINED] * 3


async def test_a_metric_of_a_users_own_that_fails_costs_itself_alone(tmp_path: Path) -> None:
    def failing(_: StepFacts) -> dict[str, float]:
        return {"own/failing": 1 / 0}

    def silent(_: StepFacts) -> Any:
        return None

    def talking(_: StepFacts) -> Any:
        return {"own/talking": "many"}

    def replacing(_: StepFacts) -> dict[str, float]:
        return {"own/replacing": 1, "episodes/accepted": float("nan")}

    metrics = [failing, silent, talking, replacing]
    run = await finished(tmp_path, extra_metrics=metrics, steps=1)
    (step,) = run.shown.steps
    assert {name for name in step if name.startswith("own/")} == {"own/replacing"}
    assert (step["own/replacing"], step["episodes/accepted"]) == (1, 4)
    told = [note for note in run.shown.notes if "metrics.extra" in note]
    assert [note.split(" failed: ")[0].rpartition(".")[2] for note in told] == [
        "failing",
        "silent",
        "talking",
    ]
    assert "ZeroDivisionError: division by zero" in told[0]


async def test_a_misaligned_step_changes_nothing_and_can_be_resumed(tmp_path: Path) -> None:
    async with running(tmp_path, recording="off") as run:
        misaligned = run.learner
        check = misaligned.check

        async def spoiled(*groups: Any, step: int, **more: Any) -> None:
            run.client.logprob = 0.5 if step == 2 else -0.5
            await check(*groups, step=step, **more)

        misaligned.check = spoiled  # type: ignore[method-assign]
        with pytest.raises(AlignmentError, match="step 2: the trainer does not reproduce"):
            await run.loop.run()
    assert (run.client.steps, run.client.drops > 0) == (1, True)
    aside = run.trained(2)
    assert {(row.episode, row.outcome) for row in aside} == {(n, Use.SET_ASIDE) for n in (5, 6, 7, 8)}
    assert all("the trainer does not reproduce" in row.reason for row in aside)
    assert (run.steps, run.checkpoints) == ([1], [1]), "of the last good step"
    (_, stopped) = run.source.of(StepRow)
    assert (stopped.step, stopped.policy_version, stopped.trained) == (2, 1, 0)
    assert stopped.stopped == run.learner.report.findings[-1]["name"]
    assert stopped.stopped in {row.name for row in run.source.of(FindingRow) if row.step == 2}
    kept = {(row.step, row.episode): unpacked_sequences(row.sequences) for row in run.source.of(TokensRow)}
    assert kept.keys() == {(2, episode) for episode in (5, 6, 7, 8)}, "of what stops a run in any case"
    assert {each.reason for (each,) in kept.values()} == {f"the step was stopped: {stopped.stopped}"}
    (checkpoint,) = run.source.of(CheckpointRow)
    history = History(step=1, checkpoint=checkpoint, versions={0: 0, 1: 1}, newest_version=1, next_position=4)
    again = await finished(tmp_path, history=history)
    assert again.client.steps == 2
    assert again.steps == [2, 3]
    assert [row.policy_version for row in again.source.of(PublicationRow)] == [2, 3, 4]
    assert again.loop.train_seconds > checkpoint.train_seconds


async def test_a_resumed_run_waits_for_what_ended_before_it_gives_out_seeds(tmp_path: Path) -> None:
    """Episodes of the interrupted step that ended come again: they train, and their seeds are taken."""

    class Noting(Answering):
        taken: frozenset[int] = frozenset()

        async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
            self.taken = frozenset(run.loop.policy.sampler.used)
            await super().start(episodes, step=step)

    source = Noting()
    for number in range(2):
        source.end(f"known-{number}", "step-1/sample-0", 0, reward=float(number))
    planned = [
        PlannedRow(episode_uuid=f"known-{number}", group_id="step-1/sample-0", position=0, step=1)
        for number in range(2)
    ]
    history = History(planned=planned, planned_groups=1, next_position=1, open_until=2, versions={0: 0})
    history = msgspec.structs.replace(history, newest_version=0)
    async with running(tmp_path, source, history=history, steps=1) as run:
        await run.loop.run()
    assert source.starts == [(1, 2)], "the group that was never registered"
    assert source.taken == {1, 2}
    assert {row.episode for row in run.trained(1)} == {1, 2, 3, 4}
    assert {row.outcome for row in run.trained(1)} == {Use.TRAINED}


async def test_groups_of_earlier_steps_train_again_also_in_a_resumed_run(tmp_path: Path) -> None:
    replay = {"replay_uses": 2}
    run = await finished(tmp_path / "whole", **replay)
    assert [len(run.trained(step)) for step in (1, 2, 3)] == [4, 8, 8]
    assert [(step["lag/0"], step.get("lag/1")) for step in run.shown.steps] == [(4, None), (4, 4), (4, 4)]
    rows = [row for row in run.source.of(TrainedRow) if row.step <= 2 and row.place >= 0]
    checkpoint = run.source.of(CheckpointRow)[0]
    assert checkpoint.step == 2
    history = History(
        step=2,
        checkpoint=checkpoint,
        versions={0: 0, 1: 1, 2: 2},
        newest_version=2,
        replayed=sorted(rows, key=lambda row: (row.step, row.role, row.place)),
        next_position=4,
    )
    source = Answering()
    source.all = run.source.all[:8]
    async with running(tmp_path / "cut", source, history=history, replayed=source.all[:8], **replay) as again:
        await again.loop.run()

    def replayed(of: Run) -> set[int]:
        return {row.episode for row in of.trained(3) if row.episode <= 8}

    assert replayed(again) == replayed(run)
    assert len(replayed(run)) == 4


async def test_the_groups_that_train_again_are_others_in_each_step(tmp_path: Path) -> None:
    """One of the four groups of the step before."""
    settings = {"steps": 7, "groups_per_step": 1, "extra_groups": 3, "replay_uses": 2}
    run = await finished(tmp_path, **settings)
    places = set[int]()
    for step in range(2, 8):
        first = 8 * (step - 1) + 1
        (place,) = {(row.episode - first + 8) // 2 for row in run.trained(step) if row.episode < first}
        places.add(place)
    assert len(places) > 1


async def test_what_is_bad_in_the_ledger_is_told_once_after_the_step(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        with LedgerWriter(run.loop.parts.folder.path) as ledger:
            measured = {"response_tokens/cut_off": 0.75, "alignment/calls": 4.0}
            rows = [MetricRow(name=name, step=1, value=value) for name, value in measured.items()]
            ledger.put(StepRow(step=1, time=1.0, policy_version=1), *rows)
        await run.loop.run()
    told = [note for note in run.shown.notes if "replies cut off" in note]
    assert [note.split(":")[:2] for note in told] == [["step 1", " replies cut off 75%"]]


class Leaving(Answering):
    """The server is gone when the episodes of step `first` are to start."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        if step >= self.first:
            raise LinkError("gone")
        await super().start(episodes, step=step)


@pytest.mark.parametrize(("first", "every", "saved"), [(0, 1, []), (2, 1, [1]), (2, 0, [1])])
async def test_a_run_that_is_stopped_saves_no_step_twice(
    tmp_path: Path, first: int, every: int, saved: list[int]
) -> None:
    """Nor the weights with which it began."""
    async with running(tmp_path, Leaving(first), checkpoint_every=every) as run:
        with pytest.raises(LinkError, match="gone"):
            await run.loop.run()
    assert run.checkpoints == saved


async def test_a_checkpoint_of_which_the_ledger_is_told_in_vain_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkerscript.train.checkpoints.LAST_COMMIT_S", 0.01)

    class Gone(Leaving):
        async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
            if any(isinstance(row, CheckpointRow) for row in rows):
                await asyncio.Event().wait()
            await super().commit(rows)

    async with running(tmp_path, Gone(2)) as run:
        with pytest.raises(LinkError, match="gone"):
            await run.loop.run()
    assert run.checkpoints == []
    assert [note for note in run.shown.notes if "no checkpoint" in note] == [
        "step 1 has no checkpoint: TimeoutError: "
    ]


async def test_a_run_that_is_stopped_while_the_ledger_is_told_of_a_checkpoint_tells_it_again(
    tmp_path: Path,
) -> None:
    class Silent(Answering):
        asked = asyncio.Event()

        async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
            if not self.asked.is_set() and any(isinstance(row, CheckpointRow) for row in rows):
                self.asked.set()
                await asyncio.Event().wait()
            await super().commit(rows)

    source = Silent()
    async with running(tmp_path, source) as run:
        task = asyncio.create_task(run.loop.run())
        await source.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert run.checkpoints == [2]


@pytest.mark.parametrize("where", ["in the update", "in its publication", "when the ledger is told"])
async def test_what_ends_a_run_within_a_step_leaves_no_checkpoint_of_it(tmp_path: Path, where: str) -> None:
    """Its weights may be of either step."""

    class Ending(Answering):
        async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
            if where == "when the ledger is told" and any(isinstance(row, StepRow) for row in rows):
                check_step_2(LinkError("gone"))
            await super().commit(rows)

    class EndingToPublish(ScriptedPublisher):
        async def publish(self, policy_version: int) -> Sampler:
            if where == "in its publication":
                check_step_2(EngineError("gone"))
            return await super().publish(policy_version)

    def check_step_2(error: Exception) -> None:
        if run.client.steps == 2:
            raise error

    async with running(tmp_path, Ending(), publisher=EndingToPublish(), checkpoint_every=0) as run:
        step = run.client.optim_step

        async def ending(params: tinker.AdamParams) -> tinker.types.OptimStepResponse:
            done = await step(params)
            if where == "in the update":
                check_step_2(EngineError("gone"))
            return done

        run.client.optim_step = ending  # type: ignore[method-assign]
        with pytest.raises((LinkError, EngineError), match="gone"):
            await run.loop.run()
    assert (run.steps, run.checkpoints) == ([1], [])


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("cause", ["the server is gone", "nothing scores"])
async def test_what_ends_a_run_between_two_steps_costs_none(tmp_path: Path, cause: str, saves: bool) -> None:
    """Nor does a checkpoint that fails then hide what it was."""

    class Ending(Answering):
        async def outcomes(self) -> list[Outcome]:
            if cause == "the server is gone" and self.of(StepRow):
                raise LinkError(cause)
            return await super().outcomes()

    source = Ending()

    async def scored(sequences: list[IntArray], temperatures: list[FloatArray]) -> list[FloatArray]:
        if source.of(StepRow):
            raise EngineError("nothing scores")
        return await start_logprobs(sequences, temperatures)

    async def full(_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with running(tmp_path, source, scored=scored, kl_penalty_coef=0.1) as run:
        if not saves:
            run.client.save_state = full  # type: ignore[method-assign]
        with pytest.raises((LinkError, EngineError), match=cause):
            await run.loop.run()
    assert (run.steps, run.client.steps, run.checkpoints) == ([1], 1, [1] * saves)
    assert [note for note in run.shown.notes if "step 1 has no checkpoint: OSError: [Errno 28]" in note] == [
        "step 1 has no checkpoint: OSError: [Errno 28] No space left on device"
    ] * (not saves)


async def test_a_step_that_a_cancellation_waits_for_counts_its_seconds(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        task = asyncio.create_task(run.loop.run())
        step = run.client.optim_step

        async def cancelled(params: tinker.AdamParams) -> tinker.types.OptimStepResponse:
            task.cancel()
            return await step(params)

        run.client.optim_step = cancelled  # type: ignore[method-assign]
        with pytest.raises(asyncio.CancelledError):
            await task
    (checkpoint,) = run.source.of(CheckpointRow)
    assert checkpoint.step == 1
    assert checkpoint.train_seconds > 0


async def test_the_best_of_the_evaluations_that_have_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    class Scored(Answering):
        score: float | None = None

        async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
            is_evaluation = episodes[0].episode_type == "eval"
            self.score = {2: 0.5, 3: 1.0}.get(step, 0.0) if is_evaluation else None
            await super().start(episodes, step=step)

        def end(self, *args: Any, **values: Any) -> None:
            super().end(*args, **values if self.score is None else values | {"reward": self.score})

    evaluation = {"episodes": 0, "every_steps": 1, "interim_episodes": 1}
    async with running(tmp_path, Scored(), evaluation=evaluation, steps=6, keep_checkpoints=1) as run:
        await run.loop.run()
        saved = run.loop.parts.folder.whole_checkpoints()
    assert (run.checkpoints, saved) == ([2, 4, 6], [2, 6])


async def test_an_episode_that_did_not_train_says_why_where_people_read_it(tmp_path: Path) -> None:
    """The first episode is too old, and none calls the judge."""

    class Mixed(Answering):
        def end(self, uuid: str, group_id: str, version: int, **values: Any) -> None:
            more = {} if self.all else {"version": -7}
            super().end(uuid, group_id, **{"version": version, **values, **more})

    run = await finished(tmp_path, Mixed(), steps=1, group_size=3, groups_per_step=1, role="judge")

    def left_out(name: str) -> list[str | None]:
        lines = gzip.decompress((run.loop.parts.folder.path / "rollouts" / name).read_bytes()).splitlines()
        return [json.loads(line).get("left_out") for line in lines]

    stale = "stale: sampled by weights that this run does not build on"
    assert left_out("step_0001.jsonl.gz") == [None, None, stale]
    assert left_out("step_0001.judge.jsonl.gz") == [stale, *["it did not call judge"] * 2]

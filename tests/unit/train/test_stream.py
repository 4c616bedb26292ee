"""Which groups start and which train: at a lag of 0 a step after the other, above it beside the steps."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_helpers import make_accepted, make_call
from scripted_source import ScriptedSource
from tinkerscript.config import EvaluationConfig, TrainingConfig
from tinkerscript.errors import NoSuccessError
from tinkerscript.ledger.history import History, PlannedRow
from tinkerscript.ledger.rows import TrainedRow, Use
from tinkerscript.testing import QuietReporter
from tinkerscript.train.collector import Collector
from tinkerscript.train.episode_source import PlannedEpisode
from tinkerscript.train.evaluation import Evaluator
from tinkerscript.train.off_policy import PolicyLags
from tinkerscript.train.samples import TaskSamples
from tinkerscript.train.stream import MAX_TRIES, GroupStream, TrainingStep
from tinkerscript.trainer_link.messages import EpisodeFailed, Outcome

SIZE = 2


class Samples(TaskSamples):
    """Those of no task."""

    def __init__(self) -> None:
        self.next_position, self.again, self.tasks = 0, [], ["sums"]

    def eval_episodes(self, *, label: str, count: int, attempts: int = 1) -> list[PlannedEpisode]:
        payload = {"task": "sums"}
        return [
            PlannedEpisode("eval", f"{label}/{place}", payload, label=label)
            for place in range(count * attempts)
        ]

    def payload_at(self, position: int) -> dict[str, Any]:
        return {"position": position}


@dataclass
class Episode:
    """What the world knows of one."""

    planned: PlannedEpisode
    step: int
    sequence: int
    versions: set[int] = field(default_factory=set[int])
    """That sampled it."""

    outcome: Outcome | None = None
    trained: int = 0
    """The step that took it; 0: none that stands."""

    undone: bool = False
    is_cancelled: bool = False


class Source(ScriptedSource):
    """Keeps the episodes that started, also while trainers come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.episodes: dict[str, Episode] = {}
        self.evaluated: dict[str, Episode] = {}
        """Those of evaluations."""

    async def start(self, episodes: Sequence[PlannedEpisode], *, step: int) -> None:
        await super().start(episodes, step=step)
        for each in episodes:
            kept = self.evaluated if each.episode_type == "eval" else self.episodes
            number = len(self.episodes) + len(self.evaluated) + 1
            kept[each.episode_uuid] = Episode(each, step, number)


class World:
    """A run without a server and without a model: what starts, ends, trains and is undone."""

    def __init__(
        self, lag: int, *, evaluation: dict[str, Any] | None = None, holds: int = 0, **training: Any
    ) -> None:
        """`holds`: versions that the sampler keeps for evaluations."""
        self.config = TrainingConfig(group_size=SIZE, inspect_log_every=0, **training)
        self.evaluation = EvaluationConfig(episodes=0, **(evaluation or {}))
        self.lag, self.holds = lag, holds
        self.beside: asyncio.Task[None] | None = None
        self.evaluating: asyncio.Task[None] | None = None
        """While the trainer looks after evaluations, and perhaps waits for one."""
        self.source, self.shown = Source(), QuietReporter()
        self.step, self.version = 0, -1
        self.steps_of: dict[int, int] = {}
        self.taking: asyncio.Task[TrainingStep] | None = None
        self.taken: list[TrainingStep] = []
        self.is_training = False

    async def begin(self, history: History | None = None) -> None:
        """A trainer begins."""
        history = history or History()
        drops = self.config.on_stale == "drop"
        self.lags = PolicyLags(self.config, self.steps_of, max_lag=self.lag, keeps_stale=drops)
        self.collector = Collector(self.source, self.shown, group_size=SIZE)
        self.samples = Samples()
        self.samples.next_position, self.samples.again = history.next_position, history.again
        self.stream = GroupStream(
            self.source, self.collector, self.shown, self.config, self.samples, self.lags
        )
        self.step = history.step
        self.stream.restore(history)
        for plan in history.planned:
            if (outcome := self.source.episodes[plan.episode_uuid].outcome) is not None:
                self.collector.receive([outcome])
        parts: Any = SimpleNamespace(
            config=SimpleNamespace(evaluation=self.evaluation, training=self.config),
            history=history,
            ledger=self.source,
            progress=self.shown,
            folder=SimpleNamespace(log_metrics=lambda *_, **__: None),
        )
        self.evaluator = Evaluator(parts, self.samples, self.collector, cast(Any, self))
        for step in history.interrupted if self.holds else ():
            self.name_version(step)
            await self.evaluator.again(step)
        await self.publish()
        self.beside = asyncio.create_task(self.evaluator.run())
        await self.look_after_evaluations()

    async def publish(self) -> None:
        self.name_version(self.step)
        await self.stream.published(self.step)

    def name_version(self, step: int) -> None:
        self.version += 1
        self.steps_of[self.version] = step
        self.lags.published(self.version, step=step)

    # Evaluations

    @contextmanager
    def pinned(self, _: Sequence[str]) -> Generator[int]:
        yield self.version

    async def look_after_evaluations(self, *, is_last: bool = False) -> None:
        """As the loop does after each step."""
        evaluator, steps = self.evaluator, self.config.steps
        more = evaluator.after(self.step) if is_last else evaluator.during(self.step, steps=steps)
        self.evaluating = asyncio.create_task(more)
        await self.settle()

    @property
    def awaits_evaluation(self) -> bool:
        return self.evaluating is not None and not self.evaluating.done()

    @property
    def being_evaluated(self) -> list[str]:
        return [uuid for uuid, each in self.source.evaluated.items() if each.outcome is None]

    # Episodes

    @property
    def running(self) -> list[str]:
        return [uuid for uuid, each in self.source.episodes.items() if each.outcome is None]

    def groups(self) -> dict[tuple[str, bool], list[Episode]]:
        """By name, and whether it is undone: its sample may have been asked again."""
        found: dict[tuple[str, bool], list[Episode]] = defaultdict(list)
        for each in self.source.episodes.values():
            found[each.planned.group_id, each.undone].append(each)
        return found

    async def end(self, *uuids: str, reward: float | None = 1.0) -> None:
        """Episodes end, with a reward or by failing."""
        for uuid in uuids:
            episode = self.source.episodes.get(uuid) or self.source.evaluated[uuid]
            episode.versions = episode.versions or {self.version}
            more = {
                "group_id": episode.planned.group_id,
                "sequence": episode.sequence,
                "episode_type": episode.planned.episode_type,
            }
            calls = [make_call(None, [1], [2], policy_version=each) for each in sorted(episode.versions)]
            episode.outcome = (
                make_accepted(uuid, reward, calls, **more)
                if reward is not None
                else EpisodeFailed(episode_uuid=uuid, failures=[{"kind": "task_error"}], **more)  # type: ignore[arg-type]
            )
            self.collector.receive([episode.outcome])
        await self.settle()

    async def end_group(self, position: int, *rewards: float | None) -> None:
        """The newest group of the sample at this position ends."""
        uuids = [u for u, each in self.source.episodes.items() if each.planned.position == position][-SIZE:]
        for uuid, reward in zip(uuids, rewards or (0.0, 1.0), strict=True):
            await self.end(uuid, reward=reward)

    async def cancel(self) -> None:
        """What the stream has no use for ends."""
        uuids, self.source.cancelled = self.source.cancelled, []
        for uuid in uuids:
            episode = self.source.episodes[uuid]
            failures: list[dict[str, object]] = [{"kind": "cancelled", "message": "enough"}]
            episode.is_cancelled = True
            episode.outcome = EpisodeFailed(episode_uuid=uuid, sequence=episode.sequence, failures=failures)
            self.collector.receive([episode.outcome])

    # Steps

    async def take(self) -> None:
        """The next step begins to wait."""
        self.taking = asyncio.create_task(self.stream.take(self.step + 1, version=self.version))
        await self.settle()

    async def settle(self) -> None:
        """Return when everything that waits has looked at what there is."""
        self.collector._received.set()
        scheduled = cast(Any, asyncio.get_running_loop())._ready
        while scheduled:  # noqa: ASYNC110 (nothing announces that the loop is idle)
            await asyncio.sleep(0)

    @property
    def is_ready(self) -> bool:
        return self.taking is not None and self.taking.done()

    async def taken_step(self) -> TrainingStep:
        """The step has its groups."""
        assert self.taking is not None
        assert self.taking.done(), "it waits"
        step, self.taking, self.is_training = self.taking.result(), None, True
        self.taken.append(step)
        for uuid in step.batch.outcomes:
            assert not self.source.episodes[uuid].trained, "an episode trains once"
            self.source.episodes[uuid].trained = step.number
        await self.cancel()
        return step

    async def train(self) -> None:
        """The weights of the step that has its groups are published."""
        self.step, self.is_training = self.step + 1, False
        await self.publish()
        await self.look_after_evaluations()

    async def whole_step_of(self, position: int) -> None:
        """One that takes the group of this sample."""
        await self.take()
        await self.end_group(position)
        assert names(await self.taken_step()) == [position]
        await self.train()

    async def go_on(self) -> None:
        """The trainer does what comes next, if it can."""
        if self.awaits_evaluation:
            return
        if self.is_training:
            await self.train()
        elif self.taking is None and self.step < self.config.steps:
            await self.take()
        elif self.is_ready and not self.has_no_success:
            await self.taken_step()

    @property
    def has_no_success(self) -> bool:
        """Whether the run has ended because every episode failed."""
        return (
            self.taking is not None
            and self.taking.done()
            and isinstance(self.taking.exception(), NoSuccessError)
        )

    # Beginning again

    async def resume(self, step: int) -> None:
        """The trainer is killed, and another one goes on after `step`, as docs/training.md says."""
        tasks = [each for each in (self.taking, self.evaluating, self.beside) if each is not None]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.taking, self.is_training = None, False
        await self.cancel()
        gone = {version for version, steps in self.steps_of.items() if steps > step}
        self.steps_of = {version: steps for version, steps in self.steps_of.items() if steps <= step}
        first = step + 1 - (self.lag if self.config.on_stale == "wait" else self.config.steps)
        planned, of_step = list[Episode](), set[str]()
        for (name, is_undone), group in self.groups().items():
            if is_undone or any(0 < each.trained <= step for each in group):
                continue
            is_spoiled = any(each.versions & gone for each in group)
            if is_spoiled or group[0].step > step + 1:
                for each in group:
                    each.undone = True
            elif group[0].step == step + 1:
                of_step.add(name)
            is_whole = not any(each.is_cancelled or self.is_left_out(each) for each in group)
            if group[0].undone or group[0].step < first or not is_whole:
                for each in group:
                    each.outcome = each.outcome or EpisodeFailed(episode_uuid="given up", failures=[])
                    each.trained, each.is_cancelled = 0, True
            else:
                planned += group
                for each in group:
                    each.trained = 0
        standing = {each.planned.position for each in self.source.episodes.values() if not each.undone}
        end = 1 + max(standing, default=-1)
        self.taken = [each for each in self.taken if each.number <= step]
        rows = [
            PlannedRow(
                episode_uuid=each.planned.episode_uuid,
                group_id=each.planned.group_id,
                position=each.planned.position,
                step=each.step,
            )
            for each in sorted(planned, key=lambda each: each.sequence)
        ]
        for uuid in self.being_evaluated:
            self.source.evaluated[uuid].outcome = EpisodeFailed(episode_uuid=uuid, failures=[])
        await self.begin(
            History(
                step=step,
                planned=rows,
                planned_groups=len(of_step),
                next_position=end,
                again=sorted({*range(end)} - standing),
                evaluations=[each for each in self.evaluator.finished.values() if each.step <= step],
                interrupted=[each.step for each in self.evaluator._begun if each.step < step],
            )
        )

    def is_left_out(self, episode: Episode) -> bool:
        return any(row.episode == episode.sequence for row in self.source.of(TrainedRow))


def names(step: TrainingStep) -> list[int]:
    """The positions of a step's groups, in its order."""
    return [int(name.rpartition("-")[2]) for name in step.batch.groups]


async def world(lag: int, **training: Any) -> World:
    made = World(lag, **training)
    await made.begin()
    return made


# A lag of 0


async def test_a_step_starts_its_groups_and_the_extra_ones_and_cancels_what_is_left() -> None:
    run = await world(0, steps=2, groups_per_step=2, extra_groups=1)
    assert run.source.started == [], "an evaluation may come first"
    await run.take()
    assert (run.source.positions, run.source.steps) == ([0, 0, 1, 1, 2, 2], [1])
    for position in (0, 1):
        await run.end_group(position)
    step = await run.taken_step()
    assert (step.number, step.cancelled, step.policy_version, step.max_lag) == (1, 2, 0, 0)
    assert step.wait_stale_s is None
    assert [len(group) for _, group in step.groups] == [2, 2]
    assert set(run.source.reasons) == {"step 1 has enough without this episode"}
    assert run.source.steps == [1], "the next step's groups wait"
    await run.train()
    assert run.source.steps == [1]


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_step_of_which_every_episode_fails_is_set_aside(lag: int) -> None:
    run = await world(lag, steps=3, groups_per_step=1)
    await run.take()
    await run.end_group(0, None, None)
    assert run.taking is not None
    with pytest.raises(NoSuccessError, match="step 1: all 2 episodes that ended failed"):
        await run.taking
    assert [(row.step, row.outcome) for row in run.source.of(TrainedRow)] == [(1, Use.SET_ASIDE)] * 2


async def test_what_a_step_lost_is_not_replaced_by_the_run_that_goes_on() -> None:
    """The extra group was cancelled, and then the trainer was killed before the step was in the ledger."""
    run = await world(0, steps=2, groups_per_step=1, extra_groups=1)
    await run.take()
    await run.end_group(0)
    await run.taken_step()
    await run.resume(0)
    run.source.started.clear()
    await run.take()
    assert (names(await run.taken_step()), run.source.started) == ([0], [])


@settings(max_examples=100, deadline=None)
@given(
    rule=st.sampled_from(["groups", "differing_groups"]),
    needed=st.integers(1, 3),
    extra=st.integers(0, 2),
    data=st.data(),
)
def test_at_a_lag_of_0_a_step_is_a_batch_of_its_own(
    rule: str, needed: int, extra: int, data: st.DataObject
) -> None:
    """Whatever the order and the endings: as soon as a naive reading of the rule says, never stuck."""

    async def run() -> None:
        run = await world(0, steps=2, groups_per_step=needed, extra_groups=extra, batch_rule=rule)
        for number in (1, 2):
            before = len(run.source.episodes)
            await run.take()
            while not run.is_ready:
                mine = list(run.source.episodes.values())[before:]
                assert len(mine) == SIZE * naive_number(mine, rule, needed, extra)
                uuid = data.draw(st.sampled_from(run.running))
                await run.end(uuid, reward=data.draw(st.sampled_from([0.0, 1.0, None])))
            assert run.taking is not None
            if isinstance(run.taking.exception(), NoSuccessError):
                return
            mine = list(run.source.episodes.values())[before:]
            assert len(mine) == SIZE * naive_number(mine, rule, needed, extra)
            step = await run.taken_step()
            assert step.number == number
            assert list(step.batch.groups) == list(dict.fromkeys(each.planned.group_id for each in mine))
            await run.train()

    asyncio.run(run())


def naive_number(episodes: list[Episode], rule: str, needed: int, extra: int) -> int:
    """How many groups a step has started by now."""
    number = needed + extra
    if rule == "groups":
        return number
    groups: dict[str, list[Outcome | None]] = defaultdict(list)
    for each in episodes:
        groups[each.planned.group_id].append(each.outcome)
    equal = sum(
        None not in group and len({getattr(each, "reward", None) for each in group} - {None}) < 2
        for group in groups.values()
    )
    return max(number, min(needed + equal, MAX_TRIES * needed))


# Above


async def test_a_step_waits_for_groups_that_would_be_too_old_and_says_so() -> None:
    run = await world(1, steps=5, groups_per_step=2)
    await run.take()
    for position in (1, 2):
        await run.end_group(position)
    assert (await run.taken_step()).wait_stale_s == 0
    await run.train()
    await run.take()
    for each in run.source.episodes.values():
        each.versions = {each.step - 1}
    for position in (4, 5, 3):
        await run.end_group(position)
        assert not run.is_ready
    assert run.shown.waits == ["2 groups that would be too old after step 2"]
    await run.end_group(0)
    step = await run.taken_step()
    assert (names(step), step.max_lag, step.stale) == ([0, 3], 1, {})
    assert step.wait_stale_s is not None
    assert 0 < step.wait_stale_s <= step.collected - step.began < 60


async def test_an_extra_group_leaves_in_the_last_step_that_could_train_it() -> None:
    """Complete or not: a step has as many groups as the config says."""
    run = await world(1, steps=5, groups_per_step=1, extra_groups=2)
    await run.whole_step_of(1)
    assert run.source.positions == [position for position in range(5) for _ in range(SIZE)]
    for position in (3, 2):
        await run.end_group(position)
    await run.take()
    step = await run.taken_step()
    assert (names(step), step.cancelled) == ([2], SIZE), "step 2 is the last one for 0, 2 and 3"
    assert run.source.reasons[-1] == "step 2 has enough without this episode"
    assert [(row.step, row.outcome, row.reason) for row in run.source.of(TrainedRow)] == [
        *[(2, Use.LEFT_OUT, "step 2 has enough without this episode")] * SIZE,
        *[(1, Use.LEFT_OUT, "cancelled: enough")] * SIZE,
    ]
    await run.train()
    assert len(run.running) == 4 * SIZE, "others take their places"


async def test_a_step_waits_for_the_judge_of_a_group_that_has_ended() -> None:
    """Else the group would leave with a step that it cannot train in, and be counted as too small."""
    run = await world(0, steps=2, groups_per_step=1, extra_groups=1)
    await run.take()
    _, second = run.stream._pool.groups.values()
    second.is_judged = False
    await run.end_group(1)
    assert not run.is_ready
    await run.end_group(0)
    assert not run.is_ready
    second.is_judged = True
    await run.settle()
    assert names(await run.taken_step()) == [0, 1]


async def test_equal_groups_hold_no_place_and_leave_with_the_next_step() -> None:
    run = await world(1, steps=4, groups_per_step=1, batch_rule="differing_groups")
    await run.take()
    for position in range(MAX_TRIES - 1):
        await run.end_group(position, 1.0, 1.0)
        assert run.source.positions[-1] == position + 2, "replaced at once"
    for position in (3, 4):
        assert not run.is_ready
        await run.end_group(position, 1.0, 1.0)
    assert names(await run.taken_step()) == [0, 1, 2, 3, 4], "with what there is: it has tried often enough"


async def test_samples_whose_groups_undone_weights_sampled_come_first_in_line() -> None:
    run = await world(2, steps=6, groups_per_step=1)
    for position in (0, 1):
        await run.whole_step_of(position)
    assert run.source.positions == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    run.source.episodes[run.running[0]].versions = {0, 2}
    run.source.positions.clear()
    await run.resume(1)
    assert run.source.positions == [2, 2], "3 goes on, and what started with the weights of step 2 is undone"
    await run.take()
    assert names(await run.taken_step()) == [1], "which had trained in a step that is undone"
    await run.train()
    assert run.source.positions == [2, 2, 4, 4]


@settings(max_examples=300, deadline=None)
@given(
    lag=st.integers(0, 4),
    steps=st.integers(1, 6),
    needed=st.integers(1, 3),
    extra=st.integers(0, 2),
    rule=st.sampled_from(["groups", "differing_groups"]),
    on_stale=st.sampled_from(["wait", "drop"]),
    evaluation=st.fixed_dictionaries(
        {
            "every_steps": st.integers(0, 2),
            "interim_episodes": st.integers(1, 4),
            "share": st.sampled_from([0.05, 0.5, 1]),
        }
    ),
    holds=st.integers(0, 2),
    data=st.data(),
)
def test_whatever_happens_in_which_order(
    lag: int,
    steps: int,
    needed: int,
    extra: int,
    rule: str,
    on_stale: str,
    evaluation: dict[str, Any],
    holds: int,
    data: st.DataObject,
) -> None:
    """Nothing trains beyond the lag or twice, nothing starves, and all that started trains or is left out.

    Evaluations change none of that, and steps wait for one only if the sampler can hold no more versions.
    """
    made = World(
        lag,
        evaluation=evaluation,
        holds=holds,
        steps=steps,
        groups_per_step=needed,
        extra_groups=extra if lag else 0,  # At a lag of 0 a step takes them even while they run.
        batch_rule=rule,
        on_stale=on_stale,
    )

    async def run() -> None:
        await made.begin()
        for _ in range(data.draw(st.integers(0, 50))):
            await act(made, data)
            check_capacity(made)
            if made.has_no_success:
                return
        killed_at = data.draw(st.lists(st.integers(1, steps), max_size=3))
        while made.step < steps or made.is_training:
            if made.step in killed_at:
                killed_at.remove(made.step)
                await made.resume(max(0, made.step - data.draw(st.integers(0, 2))))
            if made.awaits_evaluation:
                assert len(made.evaluator._begun) > holds, "it waits for an evaluation that it need not"
                await made.end(made.being_evaluated[-1])
            elif made.running:  # The newest first: the worst order.
                await made.end(made.running[-1], reward=float(len(made.running) % 2))
            await made.go_on()
            check_capacity(made)
            if made.has_no_success:
                return
            assert made.running or made.is_ready or made.taking is None, "it waits for nothing"
        await made.look_after_evaluations(is_last=True)
        while made.awaits_evaluation:
            await made.end(made.being_evaluated[-1])
        check_evaluations(made)
        made.stream.end()
        await made.cancel()
        check_accounts(made)

    asyncio.run(run())


async def act(run: World, data: st.DataObject) -> None:
    """Something happens."""
    what = data.draw(
        st.sampled_from(["end", "end", "end", "end evaluated", "sample", "go on", "go on", "resume"])
    )
    if what == "resume":
        await run.resume(data.draw(st.integers(0, run.step)))
    elif what == "end evaluated" and run.being_evaluated:
        await run.end(data.draw(st.sampled_from(run.being_evaluated)))
    elif what == "go on" or not run.running:
        await run.go_on()
    else:
        uuid = data.draw(st.sampled_from(run.running))
        run.source.episodes[uuid].versions.add(run.version)
        if what == "end":
            await run.end(uuid, reward=data.draw(st.sampled_from([0.0, 1.0, 0.0, 1.0, None])))


def check_capacity(run: World) -> None:
    config = run.config
    assert len(run.evaluator._begun) <= run.holds + 1
    if config.on_stale == "wait" and config.batch_rule == "groups" and not config.extra_groups:
        started = [name for name, is_undone in run.groups() if not is_undone]
        assert len(started) <= (run.step + run.lag + 1) * config.groups_per_step
    for step in run.taken:
        check_step(run, step)


def check_step(run: World, step: TrainingStep) -> None:
    config, groups = run.config, step.batch.groups
    late = {name for name, group in groups.items() if step.number - 1 - group.started > run.lag}
    assert all(group.is_complete for group in groups.values())
    assert set(step.stale) <= {uuid for name in late for uuid in groups[name].outcomes}
    for name, accepted in step.groups:
        assert len(accepted) == len(groups[name].accepted), "no group becomes smaller"
    if config.on_stale == "wait":
        assert (late, step.stale) == (set(), {})
        assert all(lag is not None and lag <= run.lag for lag in step.lags)
    if config.batch_rule == "groups":
        number = len(groups) - len(late)
        assert number >= config.groups_per_step
        if config.on_stale == "wait":  # What waits for nothing may fall due together.
            assert number == config.groups_per_step


def check_evaluations(run: World) -> None:
    every, steps = run.evaluation.every_steps, run.config.steps
    due = range(every, steps, every) if every else ()
    assert run.evaluator.finished.keys() == {f"step-{step}" for step in due}
    assert {each.accepted for each in run.evaluator.finished.values()} <= {run.evaluation.interim_episodes}
    assert all(run.steps_of[each.policy_version] == each.step for each in run.evaluator.finished.values())


def check_accounts(run: World) -> None:
    config = run.config
    for each in run.source.episodes.values():
        assert each.trained or each.undone or each.is_cancelled or run.is_left_out(each)
    if config.on_stale == "wait" and not config.extra_groups:
        standing = [each for each in run.source.episodes.values() if not each.undone]
        assert all(each.trained for each in standing), "nothing is thrown away for being slow"
        assert sorted(each.planned.position for each in standing) == [
            position for position in range(len(standing) // SIZE) for _ in range(SIZE)
        ]

"""Random histories of a run: its book, its ledger and the trainers that go on, against a small model.

Every step of a history is committed. After each one the book equals one that a new server makes from the
tables.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clock import Clock
from episode_records import restored
from ledger_contract import made
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.history import History
from tinkerscript.ledger.ledger import Statement
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
from tinkerscript.protocol import EpisodeType, Failure
from tinkerscript.server.episodes.record import EpisodeRecord, episode_row
from tinkerscript.server.interchange import read_episodes
from tinkerscript.server.trainer_messages import resume_run

LEASE_S = 10.0
USES = (Use.TRAINED, Use.TRAINED, Use.SAME_REWARD, Use.STALE, Use.LEFT_OUT)
HOPELESS = (Use.LEFT_OUT, Use.STALE)
LAG = 2


@dataclass
class Modelled:
    """What a reader of docs/design.md expects of one episode."""

    kind: EpisodeType
    pool: str
    step: int
    group: str
    position: int
    state: str = "registered"
    attempts: int = 0
    version: int = -1
    """When it was claimed last."""

    cancelled: bool = False
    emptied: bool = False
    offered: bool = False
    consumed: bool = False
    undone: bool = False
    uses: dict[int, str] = field(default_factory=dict[int, str])
    """What became of it, by step, in steps that stand."""

    @property
    def is_over(self) -> bool:
        return self.state in ("ended", "failed")

    def used_after(self, step: int) -> str:
        """What became of it in later steps, which are undone, and in none before; empty if nothing did."""
        if any(each <= step for each in self.uses):
            return ""
        return next(iter(self.uses.values()), "")


class Histories(RuleBasedStateMachine):
    """A server, and one trainer after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.wall = Clock(), Clock()
        self.model: dict[str, Modelled] = {}
        self.step, self.version = 0, -1
        self.versions: dict[int, int] = {}
        self.evaluations: list[str] = []
        self.saved = set[int]()
        """Steps whose checkpoints are in the ledger and not undone."""

        self.whole = set[int]()
        """Steps whose checkpoints are whole, in the ledger or not."""

        self.groups = 0
        self.ends: dict[str, int] = {}
        self.folder = tempfile.TemporaryDirectory(prefix="history-")
        self.ledger = SqliteLedger(Path(self.folder.name) / LEDGER_FILE)
        self.runner = asyncio.Runner()
        self.restart()
        self.resume()

    def teardown(self) -> None:
        self.runner.run(self.ledger.close())
        self.runner.close()
        self.folder.cleanup()

    def pick(self, data: st.DataObject, uuids: list[str]) -> str:
        return data.draw(st.sampled_from(uuids))

    def those(self, *states: str) -> list[str]:
        return [uuid for uuid, each in self.model.items() if each.state in states and not each.consumed]

    # Clients

    @rule(ahead=st.integers(1, 2), size=st.integers(1, 3), ends=st.integers(0, 3))
    def plan(self, ahead: int, size: int, ends: int) -> None:
        position = 1 + max((each.position for each in self.model.values() if not each.undone), default=-1)
        for place in range(size):
            self.register("train", step=self.step + ahead, position=position + place)
        self.groups += 1
        self.claim("", ends, ends=True)

    @rule(kind=st.sampled_from((("eval", ""), ("eval", "me"), ("train", "me"))), ends=st.booleans())
    def register_another(self, kind: tuple[EpisodeType, str], ends: bool) -> None:
        self.register(kind[0], pool=kind[1], step=self.step if kind == ("eval", "") else 0)
        self.groups += 1
        self.claim(kind[1], int(ends), ends=True)

    def register(self, kind: EpisodeType, *, pool: str = "", step: int = 0, position: int = -1) -> None:
        uuid, group = f"e{len(self.model)}", f"g{self.groups}"
        payload = b'{"n": %d}' % self.groups
        more = {"label": f"step {step}"} if kind == "eval" and not pool else {}
        self.book.register(uuid, kind, group, payload, pool=pool, step=step, position=position, **more)
        self.model[uuid] = Modelled(kind, pool, step, group, position)

    @rule(pool=st.sampled_from(("", "me")), number=st.integers(1, 4), ends=st.booleans())
    def claim(self, pool: str, number: int, ends: bool) -> None:
        for _ in range(number):
            found = self.book.claim("c", "any", LEASE_S, pool=pool, policy_version=self.version)
            if found is not None:
                self.model[found.uuid].state = "claimed"
                self.model[found.uuid].attempts += 1
                self.model[found.uuid].version = self.version
                if ends:
                    self.end(found.uuid)

    def end(self, uuid: str) -> None:
        self.book.end(uuid, self.model[uuid].attempts, reward=1.0, result=b'{"reward": 1}')
        self.model[uuid].state = "ended"

    @precondition(lambda self: self.those("claimed"))
    @rule(data=st.data(), fails=st.booleans())
    def end_one(self, data: st.DataObject, fails: bool) -> None:
        uuid = self.pick(data, self.those("claimed"))
        if fails:
            self.book.poison(uuid, self.model[uuid].attempts, Failure(kind="bad"))
            self.model[uuid].state = "failed"
        else:
            self.end(uuid)

    @rule()
    def leases_expire(self) -> None:
        self.clock.now += LEASE_S
        self.wall.now += LEASE_S
        expired = {each.uuid: each.state for each in self.book.expire()}
        assert expired.keys() == set(self.those("claimed"))
        for uuid, state in expired.items():
            self.model[uuid].state = state

    @precondition(lambda self: self.those("registered", "claimed"))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        uuid = self.pick(data, self.those("registered", "claimed"))
        assert self.book.cancel(uuid, "enough")
        self.model[uuid].state, self.model[uuid].cancelled = "failed", True

    @precondition(lambda self: self.retriable)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        uuid = self.pick(data, self.retriable)
        self.book.retry(uuid)
        self.model[uuid].state = "registered"
        del self.ends[uuid]

    @property
    def retriable(self) -> list[str]:
        failed = ((uuid, self.model[uuid]) for uuid in self.those("failed"))
        return [uuid for uuid, each in failed if not (each.offered or each.cancelled)]

    # The trainer

    def take(self) -> list[str]:
        """What the trainer has got and not used; it was told of every failure among it."""
        for uuid in self.those("failed"):
            self.book.offer_failure(uuid)
            self.model[uuid].offered = True
        return self.those("ended", "failed")

    def write(self, *rows: TrainerRow | Statement) -> None:
        async def write() -> None:
            self.interchange.settle()
            for row in rows:
                if isinstance(row, Statement):
                    self.ledger.execute(row.sql, *row.parameters)
                    continue
                self.ledger.put(row)
                if isinstance(row, TrainedRow):
                    self.book.consume(row.episode)
            await self.interchange.commit()

        self.runner.run(write())

    def use(self, uuid: str, step: int, outcome: str, *, role: str = "", place: int = -1) -> TrainedRow:
        self.model[uuid].consumed = True
        self.model[uuid].uses[step] = outcome
        sequence = self.book.get(uuid).sequence
        return TrainedRow(episode=sequence, step=step, outcome=outcome, role=role, place=place)

    def publish(self) -> None:
        self.version += 1
        self.versions[self.version] = self.step
        self.write(PublicationRow(policy_version=self.version, step=self.step, time=1.0))

    def trainable(self) -> list[str]:
        ready = ((uuid, self.model[uuid]) for uuid in self.take())
        return [
            uuid
            for uuid, each in ready
            if each.kind == "train" and (each.pool or 0 < each.step <= self.step + 1)
        ]

    @rule(data=st.data(), steps=st.integers(1, 3))
    def train_on(self, data: st.DataObject, steps: int) -> None:
        """Random rules alone seldom get far."""
        for _ in range(steps):
            self.plan(1, 2, 2)
            self.register_another(("train", "me"), True)
            self.train(data, *(data.draw(st.booleans()) for _ in range(3)))

    @rule(data=st.data(), trained_again=st.booleans(), judged=st.booleans(), saves=st.booleans())
    def train(self, data: st.DataObject, trained_again: bool, judged: bool, saves: bool) -> None:
        step, rows = self.step + 1, list[TrainerRow]()
        former = [uuid for uuid, each in self.model.items() if each.uses.get(self.step) == Use.TRAINED]
        for uuid in self.trainable():
            uses = (None, *(USES if self.model[uuid].state == "ended" else (Use.LEFT_OUT,)))
            outcome = data.draw(st.sampled_from(uses))
            if outcome is not None:
                rows.append(self.use(uuid, step, outcome, place=0 if outcome == Use.TRAINED else -1))
                if judged and outcome == Use.TRAINED:
                    rows.append(self.use(uuid, step, outcome, role="judge"))
        if trained_again:
            rows += [self.use(uuid, step, Use.TRAINED, place=1) for uuid in former]
        rows += [MetricRow(name="reward", step=step, value=0.5), *self.left_by(step, rows)]
        self.step = step
        self.write(StepRow(step=step, time=1.0, policy_version=self.version + 1), *rows)
        self.publish()
        if saves:
            self.save(is_known=True)

    def left_by(self, step: int, rows: Sequence[TrainerRow]) -> list[TrainerRow]:
        """What a step leaves for people beside `rows`."""
        trained = [each for each in rows if isinstance(each, TrainedRow) and each.outcome == Use.TRAINED]
        tokens = [TokensRow(episode=e.episode, step=step, role=e.role, sequences=b"") for e in trained]
        return [FindingRow(step=step, kind="finding", name="none"), *tokens]

    @rule(data=st.data())
    def leave_one_out(self, data: st.DataObject) -> None:
        """It came after its batch was complete."""
        if taken := self.take():
            uuid = self.pick(data, taken)
            self.write(self.use(uuid, self.model[uuid].step, Use.LEFT_OUT))

    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        """The run ends with its next step, and another trainer goes on."""
        if ended := [uuid for uuid in self.trainable() if self.model[uuid].state == "ended"]:
            batch = data.draw(st.lists(st.sampled_from(ended), min_size=1, unique=True))
            stopped = StepRow(step=self.step + 1, time=1.0, policy_version=self.version, stopped="shifted")
            self.write(stopped, *self.left_by(self.step + 1, ()))
            self.write(*(self.use(uuid, self.step + 1, Use.SET_ASIDE) for uuid in batch))
            self.resume()

    @rule()
    def evaluate(self) -> None:
        label = f"step {self.step}"
        if label not in self.evaluations:
            ended = [uuid for uuid in self.take() if self.model[uuid].kind == "eval"]
            own = [u for u in ended if not self.model[u].pool and self.model[u].step == self.step]
            scored = made(EvaluationRow, self.step, label=label, undone=0)
            self.evaluations.append(label)
            self.write(scored, *(self.use(uuid, self.step, Use.EVALUATED) for uuid in own))

    @precondition(lambda self: self.step)
    @rule(is_known=st.booleans())
    def save(self, is_known: bool) -> None:
        """A checkpoint, after which the trainer may end before the ledger knows of it."""
        self.whole.add(self.step)
        if is_known:
            self.saved.add(self.step)
            row = CheckpointRow(step=self.step, time=1.0, policy_version=self.version, train_seconds=1.0)
            self.write(row)

    @rule(data=st.data())
    def make_room(self, data: st.DataObject) -> None:
        """Of some episodes; the limit takes those that seem to be of no use any more."""
        if consumed := [uuid for uuid, each in self.model.items() if each.consumed]:
            uuids = data.draw(st.lists(st.sampled_from([*self.model]), unique=True))
            emptied = self.book.empty(uuids)
            assert emptied == {*uuids} & {*consumed}
            for uuid in emptied:
                self.model[uuid].emptied = True
            empty = "UPDATE {s}episodes SET emptied = 1 WHERE uuid = ?"
            self.write(*(Statement(empty, (uuid,)) for uuid in emptied))

    # Beginning again

    @rule(lost=st.integers(0, 2), with_trainer=st.booleans(), plan_lag=st.integers(0, 3))
    def begin_again(self, lost: int, with_trainer: bool, plan_lag: int) -> None:
        """`lost`: so many of the newest checkpoints are not whole any more."""
        self.restart()
        if with_trainer:
            self.whole -= {*sorted(self.whole)[::-1][:lost]}
            self.resume(plan_lag)

    def restart(self) -> None:
        """Of the server."""
        going_on = restored(self.ledger, self.clock, wall=self.wall, max_attempts=2)
        self.interchange = self.runner.run(going_on)
        self.book = self.interchange.book

    def resume(self, plan_lag: int = 0) -> None:
        """Another trainer goes on."""
        step = max(self.saved & self.whole, default=0)
        back = self.undo(step, plan_lag)
        self.write()
        going_on = resume_run(self.interchange, self.ledger, self.whole, replay_lag=LAG, plan_lag=plan_lag)
        self.expect(self.runner.run(going_on), step, back)
        self.step = step
        self.publish()

    def undo(self, step: int, plan_lag: int) -> dict[str, Modelled]:
        """What comes back of what was planned, by uuid, after the model has gone back to `step`."""
        planned = {
            uuid: each
            for uuid, each in self.model.items()
            if each.kind == "train" and each.step > 0 and -plan_lag <= each.step - step - 1 <= 0
            if not each.undone
        }
        lost = {
            each.group for each in planned.values() if each.cancelled or each.emptied or is_gone(each, step)
        }
        groups = {each.group for each in planned.values()}
        next_step = [each for each in planned.values() if each.step == step + 1]
        aside = {each.group for each in next_step if each.used_after(step) == Use.SET_ASIDE}
        # No call is recorded here: an episode is of the weights that it was claimed from.
        kept = {version for version, at in self.versions.items() if at <= step}
        spoiled = {
            each.group
            for each in planned.values()
            if each.state == "ended" and each.version not in kept
            if not each.consumed or each.used_after(step)
        }
        for each in planned.values():
            each.undone |= each.group in spoiled
        lost |= spoiled
        aside |= {each.group for each in next_step if each.undone}
        for group in groups - lost:
            members = [each for each in planned.values() if each.group == group]
            if all(each.state == "ended" and each.used_after(step) in HOPELESS for each in members):
                lost.add(group)
        back = {uuid: each for uuid, each in planned.items() if each.group not in lost}
        for uuid, each in self.model.items():
            used = each.used_after(step)
            is_later = each.step > step + 1 if each.kind == "train" else each.step > step or not each.consumed
            each.undone |= not each.pool and is_later
            is_open = each.pool and each.kind == "train" and used not in ("", Use.SET_ASIDE, *HOPELESS)
            if uuid in back or (is_open and not each.emptied):
                each.consumed = False
            each.uses = {at: use for at, use in each.uses.items() if at <= step or use == Use.SET_ASIDE}
            if not each.pool and uuid not in back and not each.consumed:
                each.cancelled |= not each.is_over
                each.state = each.state if each.is_over else "failed"
                each.consumed, each.uses[step] = True, Use.GIVEN_UP
        self.planned_groups = len({each.group for each in next_step} - aside)
        return back

    def expect(self, found: History, step: int, back: dict[str, Modelled]) -> None:
        assert (found.step, found.newest_version) == (step, self.version)
        self.versions = {version: at for version, at in self.versions.items() if at <= step}
        assert found.versions == self.versions
        assert (found.checkpoint is None) == (step == 0)
        self.saved = {each for each in self.saved if each <= step}
        self.evaluations = [label for label in self.evaluations if int(label.split()[1]) <= step]
        assert {each.label for each in found.evaluations} == set(self.evaluations)
        assert {each.episode_uuid: (each.group_id, each.position) for each in found.planned} == {
            uuid: (each.group, each.position) for uuid, each in back.items()
        }
        assert {each.episode_uuid: each.step for each in found.planned} == {
            uuid: each.step for uuid, each in back.items()
        }
        planned = [each for each in self.model.values() if each.kind == "train" and each.step]
        standing = {each.position for each in planned if not each.undone}
        assert found.planned_groups == self.planned_groups
        assert {*range(found.next_position)} - {*found.again} <= standing, "each has started, or starts first"
        assert not {*found.again} & standing
        assert max(standing, default=-1) < found.next_position
        assert all(step - LAG < row.step <= step and row.place >= 0 for row in found.replayed)
        replayed = {(row.episode, row.step) for row in found.replayed}
        assert replayed == {
            (self.book.get(uuid).sequence, at)
            for uuid, each in self.model.items()
            for at, use in each.uses.items()
            if use == Use.TRAINED and step - LAG < at <= step
        }

    # What holds after every step

    @invariant()
    def the_book_can_be_made_again_from_the_tables(self) -> None:
        self.runner.run(self.interchange.commit())
        read = self.runner.run(read_episodes(self.ledger))
        found = {each.uuid: each for each in read.present}
        assert [*found] == [each.uuid for each in self.book] == [*self.model]
        for episode in self.book:
            assert stored(found[episode.uuid]) == stored(episode)
            if episode.state in ("registered", "claimed"):
                assert found[episode.uuid].payload == episode.payload != b""

    @invariant()
    def the_book_equals_the_model(self) -> None:
        for uuid, each in self.model.items():
            episode = self.book.get(uuid)
            assert (episode.state, episode.consumed) == (each.state, each.consumed), uuid
            assert (episode.end_number is not None) == each.is_over
            assert (bool(episode.undone), episode.emptied) == (each.undone, each.emptied), uuid
            if Use.EVALUATED in each.uses.values():
                assert not each.undone
                assert episode.label in self.evaluations
        waiting = {each.uuid for each in self.book.open_ends.values()}
        assert waiting == set(self.those("ended", "failed"))
        assert not waiting & {uuid for uuid, each in self.model.items() if each.uses}, (
            "what a standing step used, or what was set aside, is not open"
        )

    @invariant()
    def episodes_end_once_and_in_order(self) -> None:
        numbers = {each.uuid: each.end_number for each in self.book if each.end_number is not None}
        assert len(set(numbers.values())) == len(numbers)
        assert {uuid: numbers[uuid] for uuid in self.ends} == self.ends
        new = [number for uuid, number in numbers.items() if uuid not in self.ends]
        assert min(new, default=1) > max(self.ends.values(), default=0) or not new
        self.ends = numbers

    @invariant()
    def versions_grow_and_rows_stand_once(self) -> None:
        read = self.ledger.read
        versions = self.runner.run(read("SELECT policy_version FROM publications ORDER BY rowid"))
        assert [version for (version,) in versions] == [*range(self.version + 1)]
        for table in ("steps", "metrics", "findings"):
            steps = self.runner.run(read(f"SELECT step FROM {table} WHERE undone = 0 ORDER BY step"))
            assert [step for (step,) in steps] == [*range(1, self.step + 1)], table
        standing = "AS t JOIN episodes ON sequence = episode WHERE t.undone = 0"
        trained = self.runner.run(read(f"SELECT uuid, t.step, outcome FROM trained {standing}"))
        uses = {(uuid, *use) for uuid, each in self.model.items() for use in each.uses.items()}
        assert {*trained} == uses
        tokens = self.runner.run(read(f"SELECT uuid, t.step FROM tokens {standing}"))
        assert {*tokens} == {(uuid, step) for uuid, step, use in uses if use == Use.TRAINED}


def is_gone(each: Modelled, step: int) -> bool:
    """Whether it was set aside or given up, or a step that stands used it."""
    return each.consumed and each.used_after(step) in ("", Use.SET_ASIDE, Use.GIVEN_UP)


def stored(episode: EpisodeRecord) -> tuple[object, ...]:
    """What the ledger has of an episode."""
    claims = (episode.claimants, episode.request_ids, episode.claimed_at, episode.lease_s, episode.queued_s)
    return episode_row(episode), claims, episode.failures, episode.policy_version


CHAOS = settings.get_current_profile_name() == "chaos"
TestHistories = Histories.TestCase
TestHistories.settings = (
    settings() if CHAOS else settings(max_examples=25, stateful_step_count=30, deadline=None)
)

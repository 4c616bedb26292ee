"""`TrainerMessageHandler` executes the trainer's messages, `OutcomeStream` sends it outcomes.

A bad message is logged, counted or answered; it never stops the link.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Collection, Sequence
from functools import partial

import msgspec

from tinkerscript.errors import ConfigError, ConflictError, InterchangeError, StoreError, UnknownEpisodeError
from tinkerscript.ledger import Ledger
from tinkerscript.ledger.history import (
    History,
    PlannedRow,
    find_beginning,
    given_up_positions,
    tally,
    undo_later,
)
from tinkerscript.ledger.rows import FactRow, TrainedRow, Use
from tinkerscript.ledger.storage import StorageLimit
from tinkerscript.logs import about
from tinkerscript.rollouts.call import Call
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.interchange import Interchange
from tinkerscript.server.metrics import ServerMetrics
from tinkerscript.trainer_link.framing import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, LinkTimes
from tinkerscript.trainer_link.messages import (
    Answer,
    Cancel,
    Cancelled,
    Commit,
    Committed,
    EpisodeAccepted,
    EpisodeFailed,
    Fetch,
    Fetched,
    Hello,
    Metrics,
    NotRegistered,
    Outcome,
    Received,
    Register,
    Registered,
    ReleaseClient,
    Request,
    RequestFailed,
    Resume,
    Resumed,
    Sampled,
    SampleFailed,
    SampleProgress,
    Tallied,
    TallyRequest,
)
from tinkerscript.trainer_link.remote_sampling import LinkSampler
from tinkerscript.trainer_link.server_end import LinkEvent, ServerLink, TrainerEvent

logger = logging.getLogger(__name__)

AT_ONCE = 16
MAX_ON_THE_WAY = MAX_FRAME_BYTES  # Bytes of unconfirmed outcomes.
LAST_COMMIT = "last_commit"
OVERHEAD = 1024  # Bounds a message's bytes around each call.


class LastCommit(msgspec.Struct, frozen=True):
    """Stored with the commit's rows."""

    trainer: str = ""
    number: int = 0


async def read_last_commit(ledger: Ledger) -> LastCommit:
    found = await ledger.read("SELECT value FROM {s}facts WHERE name = ?", (LAST_COMMIT,))
    return msgspec.json.decode(found[0][0], type=LastCommit) if found else LastCommit()


async def resume_run(
    interchange: Interchange,
    ledger: Ledger,
    checkpoints: Collection[int],
    *,
    replay_lag: int = 0,
    plan_lag: int = 0,
) -> History:
    """Resume the newest of `checkpoints`; see `find_beginning` and `Resume`. An error changes nothing."""
    await ledger.durable()
    beginning = await find_beginning(ledger, checkpoints, replay_lag=replay_lag)
    history, book = beginning.history, interchange.book
    await interchange.recall_after(history.step, beginning.used)
    # No await before the commit: the undone steps' facts cannot be read again.
    undo_later(ledger, history, time=time.time())
    for episode in book.resume(
        history.step, history.resumption, beginning.used, plan_lag=plan_lag, spoiled=beginning.spoiled
    ):
        ledger.put(TrainedRow(episode=episode.sequence, step=history.step, outcome=Use.GIVEN_UP))
    planned = [
        PlannedRow(episode_uuid=each.uuid, group_id=each.group_id, position=each.position, step=each.step)
        for each in book.planned(history.step + 1, plan_lag=plan_lag)
    ]
    for episode in book.open_ends.values():
        if episode.state == "failed":  # The trainer waits for it.
            book.offer_failure(episode.uuid)
    await interchange.commit()
    return msgspec.structs.replace(
        history,
        planned=planned,
        planned_groups=book.planned_groups(history.step + 1, beginning.used),
        again=await given_up_positions(ledger, history),
        open_until=max(book.open_ends, default=0),
    )


class TrainerMessageHandler:
    def __init__(
        self,
        *,
        interchange: Interchange,
        ledger: Ledger,
        link: ServerLink,
        sampler: LinkSampler,
        metrics: ServerMetrics,
        times: LinkTimes,
        last_commit: LastCommit,
        storage: StorageLimit,
    ) -> None:
        self._interchange = interchange
        self._ledger = ledger
        self._link = link
        self._sampler = sampler
        self._outcomes = OutcomeStream(interchange, ledger, link)
        self._metrics = metrics
        self._times = times
        self._last_commit = last_commit
        self._storage = storage
        self._resuming = ("", 0)
        self._resumed: Answer | None = None
        self._beginning = asyncio.Lock()
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        async with self._tasks as tasks:
            tasks.create_task(self._link.run(self.handle))
            tasks.create_task(self._outcomes.run())
            tasks.create_task(self._repeat())

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._times.resend_s)
            self._outcomes.repeat()
            self._sampler.resend()

    def handle(self, event: LinkEvent) -> None:
        try:
            self._handle(event)
        except StoreError:  # Memory is ahead of the ledger.
            raise
        except Exception:
            logger.exception("link.drop reason=failed message=%s", type(event).__name__)
            self._metrics.count_link_drop("failed")

    def _handle(self, event: LinkEvent) -> None:
        match event:
            case Hello():
                self._hello(event)
            case TrainerEvent.CONNECTED:
                self._outcomes.follow(self._link.position)
                self._sampler.trainer_connected()
            case TrainerEvent.SILENT:
                self._interchange.trainer_gone()
                self._metrics.forget_trainer()
            case TrainerEvent.LOST:
                self._sampler.engine_unavailable()
            case Register():
                self._register(event)
            case Received():
                self._outcomes.received(event.position)
            case Commit():
                self._commit(event)
            case Cancel():
                self._cancel(event)
            case ReleaseClient():
                released = self._interchange.book.release_client(event.client_uuid, event.reason)
                self._interchange.settle()
                logger.info("client.released client_uuid=%s claims=%d", event.client_uuid, len(released))
            case Resume():
                self._resume(event)
            case Fetch():
                self._tasks.create_task(self._answer(event, self._fetch(event)))
            case TallyRequest():
                self._tasks.create_task(self._answer(event, self._tally(event)))
            case Metrics():
                if not self._metrics.add_trainers(event.text):
                    self._metrics.count_link_drop("metrics")
            case Sampled() | SampleProgress() | SampleFailed():
                self._sampler.message(event)

    def _hello(self, hello: Hello) -> None:
        self._interchange.trainer_says(hello)
        quarantined = self._interchange.clients.quarantined()
        self._interchange.when_committed(partial(self._link.welcome, hello.number, quarantined))

    def _register(self, message: Register) -> None:
        registered = list[str]()
        for new in message.episodes:
            try:
                self._interchange.register(new)
            except (ValueError, ConflictError) as error:
                with about(episode=new.episode_uuid):
                    logger.warning("episode.refused episode_uuid=%s error=%s", new.episode_uuid, error)
                self._link.send(NotRegistered(episode_uuid=new.episode_uuid, reason=str(error)))
            else:
                registered.append(new.episode_uuid)
        self._interchange.settle()
        done = Registered(episode_uuids=registered)
        self._interchange.when_committed(lambda: self._link.send(done))

    def _cancel(self, message: Cancel) -> None:
        for uuid in message.episode_uuids:
            try:
                self._interchange.book.cancel(uuid, message.reason)
            except UnknownEpisodeError as error:
                logger.warning("link.drop reason=unknown_episode action=cancel detail=%s", error)
                self._metrics.count_link_drop("unknown_episode")
        self._interchange.settle()
        done = Cancelled(episode_uuids=message.episode_uuids)
        self._interchange.when_committed(lambda: self._link.send(done))

    def _commit(self, message: Commit) -> None:
        """Trainers repeat unconfirmed commits."""
        trainer, last = self._link.trainer_id, self._last_commit
        done = last.number if last.trainer == trainer else 0
        if message.number > done + 1:
            logger.warning("link.drop reason=early_commit number=%d after=%d", message.number, done)
            return
        if message.number == done + 1:
            self._last_commit = LastCommit(trainer=trainer, number=message.number)
            self._ledger.put(FactRow(name=LAST_COMMIT, value=msgspec.json.encode(self._last_commit)))
            self._ledger.note(message.rows)
            for row in message.rows:
                if isinstance(row, TrainedRow):
                    self._interchange.book.consume(row.episode)
            self._interchange.settle()
            if self._storage.is_reached:
                self._tasks.create_task(self._keep_storage())
        answer = Committed(number=message.number)
        self._interchange.when_committed(lambda: self._link.send(answer))

    async def _keep_storage(self) -> None:
        try:
            await self._storage.keep()
        except StoreError:
            raise
        except Exception:
            logger.exception("link.drop reason=failed")
            self._metrics.count_link_drop("failed")

    async def _answer(self, request: Request, work: Awaitable[Answer]) -> None:
        self._link.send(await self._answered(request, work))

    async def _answered(self, request: Request, work: Awaitable[Answer]) -> Answer:
        """Trainers repeat unanswered requests, so failures are answered."""
        name, is_config = type(request).__name__, False
        try:
            return await work
        except StoreError:
            raise
        except ConfigError as error:
            reason, is_config = str(error), True
        except Exception as error:
            logger.exception("link.drop reason=failed message=%s", name)
            self._metrics.count_link_drop("failed")
            reason = f"{name} failed at the server: {type(error).__name__}: {error}"
        return RequestFailed(request_id=request.request_id, reason=reason, is_config=is_config)

    def _resume(self, request: Resume) -> None:
        key = self._link.trainer_id, request.request_id
        if key != self._resuming:
            self._resuming, self._resumed = key, None
            self._tasks.create_task(self._begin(request))
        elif self._resumed is not None:
            self._say_resumed(self._resumed)

    async def _begin(self, request: Resume) -> None:
        key = self._resuming
        async with self._beginning:
            answer = await self._answered(request, self._begun(request))
        if key == self._resuming:
            self._resumed = answer
            self._say_resumed(answer)

    def _say_resumed(self, answer: Answer) -> None:
        self._link.send(answer)
        if isinstance(answer, Resumed):
            self._outcomes.follow(max(0, self._link.position))

    async def _begun(self, request: Resume) -> Resumed:
        history = await resume_run(
            self._interchange,
            self._ledger,
            request.checkpoints,
            replay_lag=request.replay_lag,
            plan_lag=request.plan_lag,
        )
        return Resumed(request_id=request.request_id, history=history)

    async def _fetch(self, request: Fetch) -> Fetched:
        query = "SELECT uuid FROM {s}episodes WHERE sequence = ?"
        ((uuid,),) = await self._ledger.read(query, (request.episode,))
        await self._interchange.recall([uuid])
        (outcome,) = await self._outcomes.outcomes([self._interchange.book.get(uuid)])
        found = outcome if isinstance(outcome, EpisodeAccepted) else None
        return Fetched(request_id=request.request_id, outcome=found)

    async def _tally(self, request: TallyRequest) -> Tallied:
        await self._ledger.durable()
        return Tallied(request_id=request.request_id, tally=await tally(self._ledger))


class OutcomeStream:
    """Sends committed, unused outcomes in order of their end numbers, until the trainer has them.

    An outcome too large for a message fails its episode, so that it does not block the others.
    """

    def __init__(self, interchange: Interchange, ledger: Ledger, link: ServerLink) -> None:
        self._interchange = interchange
        self._book = interchange.book
        self._ledger = ledger
        self._link = link
        self._follows = False
        self._waiting: deque[int] = deque()
        self._position = self._sent = 0
        self._under_way: deque[tuple[int, int]] = deque()
        """End number and size of unconfirmed outcomes."""

        self._arrived_before = -1
        """The trainer's last end number at the previous `repeat`."""

        self._readings = 0
        """Each `follow` makes running sends stale."""

        self._changed = asyncio.Event()
        interchange.on_ended = self._ended

    def follow(self, position: int) -> None:
        """Send outcomes after `position`; below 0, send nothing yet."""
        self._readings += 1
        self._follows = position >= 0
        self._position = self._sent = position
        self._under_way.clear()
        until = self._interchange.committed_end
        self._waiting = deque(sorted(each for each in self._book.open_ends if position < each <= until))
        self._changed.set()

    def received(self, position: int) -> None:
        self._position = max(self._position, position)
        while self._under_way and self._under_way[0][0] <= position:
            self._under_way.popleft()
        self._changed.set()

    def repeat(self) -> None:
        arrived = max(self._position, self._link.position)
        if self._under_way and arrived < self._sent and arrived == self._arrived_before:
            self.follow(arrived)
        self._arrived_before = arrived

    def _ended(self, numbers: list[int]) -> None:
        if self._follows:
            self._waiting += numbers
            self._changed.set()

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._link.connected and self._follows and self._waiting and self._has_room:
                numbers = [self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))]
                episodes = [each for n in numbers if (each := self._book.open_ends.get(n)) is not None]
                await self._send_each(episodes, self._readings)

    @property
    def _has_room(self) -> bool:
        return sum(size for _, size in self._under_way) < MAX_ON_THE_WAY

    async def _send_each(self, episodes: list[EpisodeRecord], reading: int) -> None:
        """An outcome that cannot be read or encoded fails alone. A `follow` queues the rest anew and ends
        this."""
        try:
            first_offers = [each for each in episodes if each.state == "failed" and not each.offered]
            for episode in first_offers:
                self._book.offer_failure(episode.uuid)
            if first_offers:
                await self._interchange.commit()
            outcomes = await self.outcomes(episodes)
        except StoreError:
            raise
        except Exception as error:
            for episode in episodes if len(episodes) > 1 else ():
                await self._send_each([episode], reading)
            if len(episodes) == 1:
                logger.exception("outcome.failed episode_uuid=%s", episodes[0].uuid)
                await self._give_up(episodes[0], f"{type(error).__name__}: {error}", reading)
            return
        for episode, outcome in zip(episodes, outcomes, strict=True):
            size = _size_of(outcome)
            if size <= MAX_MESSAGE_BYTES or isinstance(outcome, EpisodeFailed):
                self._send(episode, outcome, size, reading)
            else:
                limit = f"a message to the trainer carries {MAX_MESSAGE_BYTES}"
                await self._give_up(episode, f"the result and its calls have {size} bytes; {limit}", reading)

    async def outcomes(self, episodes: Sequence[EpisodeRecord]) -> list[Outcome]:
        claims = [(each.sequence, each.attempt) for each in episodes if each.state == "ended"]
        calls = dict(zip(claims, await self._ledger.calls(claims), strict=True))
        return [await self._outcome(each, calls.get((each.sequence, each.attempt), [])) for each in episodes]

    async def _outcome(self, episode: EpisodeRecord, calls: list[Call]) -> Outcome:
        if episode.state == "failed":
            return outcome_of(episode)
        result = episode.result
        if not result:
            query = "SELECT result FROM {s}results WHERE episode = ?"
            ((result,),) = await self._ledger.read(query, (episode.sequence,))
        return outcome_of(episode, calls, result=result)

    def _send(self, episode: EpisodeRecord, outcome: Outcome, size: int, reading: int) -> None:
        if self._readings != reading or episode.consumed:
            return
        self._link.send(msgspec.structs.replace(outcome, after=self._sent))
        self._sent = outcome.number
        self._under_way.append((outcome.number, size))

    async def _give_up(self, episode: EpisodeRecord, reason: str, reading: int) -> None:
        with about(episode=episode.uuid, attempt=episode.attempt, client=episode.client_uuid):
            logger.error("episode.undeliverable episode_uuid=%s reason=%s", episode.uuid, reason)
        if episode.status == "ended":
            self._book.give_up(episode.uuid, reason)
            self._book.offer_failure(episode.uuid)
            await self._interchange.commit()
        if episode.state == "failed":
            self._send(episode, outcome_of(episode), OVERHEAD, reading)


def _size_of(outcome: Outcome) -> int:
    calls = list[Call]()
    if isinstance(outcome, EpisodeAccepted) and outcome.all_calls:
        calls, outcome = outcome.all_calls, msgspec.structs.replace(outcome, all_calls=[])
    size = len(msgspec.msgpack.encode(outcome))
    return OVERHEAD + size + sum(OVERHEAD + call.size for call in calls)


def outcome_of(episode: EpisodeRecord, calls: Sequence[Call] = (), *, result: bytes = b"") -> Outcome:
    failures: list[dict[str, object]] = [failure.model_dump() for failure in episode.failures]
    if episode.state == "failed":
        return EpisodeFailed(
            number=episode.end_number or 0,
            sequence=episode.sequence,
            episode_uuid=episode.uuid,
            episode_type=episode.episode_type,
            group_id=episode.group_id,
            failures=failures,
            pool=episode.pool,
            group_size=episode.group_size,
        )
    if episode.reward is None:
        raise InterchangeError(f"episode {episode.uuid} is {episode.state} and has no result")
    output = _read(result)
    return EpisodeAccepted(
        number=episode.end_number or 0,
        sequence=episode.sequence,
        episode_uuid=episode.uuid,
        episode_type=episode.episode_type,
        group_id=episode.group_id,
        attempt=episode.attempt,
        client_uuid=episode.client_uuid,
        reward=episode.reward,
        all_calls=list(calls),
        role_rewards=output.role_rewards,
        call_rewards=output.call_rewards,
        metadata=output.metadata,
        log_metrics=output.log_metrics,
        is_success=output.is_success,
        retries=failures,
        pool=episode.pool,
        group_size=episode.group_size,
    )


def _within_64_bits(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else float(digits)


class _Output(msgspec.Struct):
    role_rewards: dict[str, float] = {}
    call_rewards: dict[str, float] = {}
    metadata: dict[str, object] = {}
    log_metrics: dict[str, float] = {}
    is_success: bool | None = None


def _read(result: bytes) -> _Output:
    """Integers too large for msgpack become floats."""
    output = msgspec.json.decode(result, type=_Output)
    try:
        msgspec.msgpack.encode(output.metadata)
    except OverflowError:
        output.metadata = json.loads(result, parse_int=_within_64_bits)["metadata"]
    return output

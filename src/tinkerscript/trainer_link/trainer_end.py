"""`TrainerLink`: the trainer's end of the link.

It repeats registrations, commits, cancellations and requests until confirmed. Frames with an older epoch are
dropped, so a link survives a server's replacement.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from tinkerscript.errors import ConfigError, ConflictError, LinkError
from tinkerscript.ledger.history import History, Tally
from tinkerscript.ledger.rows import TrainerRow
from tinkerscript.protocol import EngineStatus, own_clients
from tinkerscript.sampler import SampleFunction
from tinkerscript.trainer_link.framing import (
    FULL_FRAME_BYTES,
    LinkTimes,
    Outbox,
    frames,
    read_to_trainer,
    set_options,
)
from tinkerscript.trainer_link.keys import FailedHandshakes, TrainerKeys, secure_trainer
from tinkerscript.trainer_link.messages import (
    LINK_VERSION,
    Answer,
    BatchProgress,
    Cancel,
    Cancelled,
    CancelSample,
    Commit,
    Committed,
    EpisodeAccepted,
    EpisodeFailed,
    Fetch,
    Fetched,
    Hello,
    Metrics,
    NewEpisode,
    NotRegistered,
    Outcome,
    Received,
    Refused,
    Register,
    Registered,
    ReleaseClient,
    Request,
    RequestFailed,
    Resume,
    Resumed,
    Sample,
    Sampled,
    SampleProgress,
    Stop,
    Tagged,
    Tallied,
    TallyRequest,
    ToTrainer,
    Welcome,
    check_episode,
)
from tinkerscript.trainer_link.remote_sampling import SampleService

logger = logging.getLogger(__name__)


# A single group may be larger.
REGISTER_CHUNK = 500

FETCHED_AT_ONCE = 16  # Each episode is a message.


@dataclass(slots=True, eq=False)
class _Registration:
    missing: dict[str, NewEpisode]
    confirmed: asyncio.Future[None]


class TrainerLink:
    """Registers episodes, serves samples, receives outcomes and writes to the ledger.

        async with TrainerLink(address, trainer_id=uuid, model="tiny", sampler=engine.sample) as link:
            history = await link.resume(checkpoints=[])
            await link.register(episodes)
            outcomes = await link.outcomes()
            await link.commit([StepRow(...), *(TrainedRow(episode=each.sequence, ...) for each in outcomes)])

    `trainer_id` is unique to the trainer process. Once the link has failed or was refused, coroutines raise
    LinkError.
    """

    def __init__(
        self,
        address: str,
        *,
        trainer_id: str,
        model: str,
        sampler: SampleFunction,
        policy_version: int = 0,
        global_step: int = 0,
        engine_status: EngineStatus = "ENGINE.ROLLING",
        times: LinkTimes | None = None,
        keys: TrainerKeys | None = None,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """`keys` are required if `server.json` names `link_keys`. `note` shows a message to the user."""
        self.stop_requested = asyncio.Event()
        self.refused_handshakes = 0

        self._address = address
        self._keys = keys
        self._note = note
        self._quarantined: dict[str, str] = {}
        self._times = times or LinkTimes()
        self._hello = Hello(
            link_version=LINK_VERSION,
            trainer_id=trainer_id,
            started_ns=time.time_ns(),
            policy_version=policy_version,
            global_step=global_step,
            engine_status=engine_status,
            model=model,
        )
        self._outbox = Outbox()
        self._samples = SampleService(sampler, self._outbox.put)
        self._inbox: list[Outcome] = []
        # The last outcome taken from the inbox.
        self._taken = 0
        self._commits: dict[int, Commit] = {}
        self._commit_numbers = itertools.count(1)
        self._committed = 0
        self._registering: dict[str, _Registration] = {}
        self._cancelling: dict[str, str] = {}
        self._asking: dict[int, tuple[Request, asyncio.Future[Answer]]] = {}
        self._request_ids = itertools.count(1)
        self._server_id = ""
        self._epoch = 0
        self._welcomed = -1
        self._news = asyncio.Event()
        self._failure: LinkError | None = None
        self._tasks = set[asyncio.Task[None]]()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.DEALER)
        set_options(self._socket, self._address)
        self._socket.setsockopt(zmq.IDENTITY, self._hello.trainer_id.encode())
        if self._keys is not None:
            secure_trainer(self._socket, self._keys)
        self._handshakes = FailedHandshakes(self._socket, self._address, self._count_handshake)
        self._socket.connect(self._address)
        self._say_hello()
        parts = {
            "receive": self._receive,
            "send": self._send,
            "beat": self._beat,
            "handshakes": self._handshakes.run,
        }
        for name, part in parts.items():
            self._tasks.add(asyncio.create_task(self._guarded(name, part)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._samples.close()
        self._handshakes.close()
        self._socket.close(linger=0)
        self._context.term()

    @property
    def own_clients(self) -> str:
        return own_clients(self._hello.trainer_id)

    @property
    def server_id(self) -> str:
        """Empty before the first answer."""
        return self._server_id

    async def register(self, episodes: Sequence[NewEpisode]) -> None:
        """Return once the server has stored the episodes.

        Raises ValueError for an invalid episode, ConflictError for a known uuid with other content, and
        LinkError for a group too large for a message.
        """
        self._check()
        missing = {episode.episode_uuid: episode for episode in episodes}
        _check_episodes(episodes, missing, self._registering)
        if not missing:
            return
        registration = _Registration(missing, asyncio.get_running_loop().create_future())
        self._registering.update(dict.fromkeys(missing, registration))
        self._send_registrations(missing.values())
        try:
            await registration.confirmed
        finally:
            for episode in episodes:
                self._registering.pop(episode.episode_uuid, None)

    async def resume(self, checkpoints: Sequence[int], *, replay_lag: int = 0, plan_lag: int = 0) -> History:
        """Start, or continue from the newest step in `checkpoints` (see `ledger.history.find_beginning`).

        Outcomes arrive from now on. Raises ConfigError if the ledger cannot continue there.
        """
        request = Resume(
            request_id=next(self._request_ids),
            checkpoints=list(checkpoints),
            replay_lag=replay_lag,
            plan_lag=plan_lag,
        )
        answer = await self._ask(request)
        assert isinstance(answer, Resumed)
        return answer.history

    async def fetch(self, episodes: Sequence[int]) -> list[EpisodeAccepted]:
        """Return results by sequence, without failures."""
        found = list[EpisodeAccepted]()
        for start in range(0, len(episodes), FETCHED_AT_ONCE):
            chunk = episodes[start : start + FETCHED_AT_ONCE]
            found += [each for each in await asyncio.gather(*map(self._fetch, chunk)) if each is not None]
        return found

    async def _fetch(self, episode: int) -> EpisodeAccepted | None:
        answer = await self._ask(Fetch(request_id=next(self._request_ids), episode=episode))
        assert isinstance(answer, Fetched)
        return answer.outcome

    async def tally(self) -> Tally:
        answer = await self._ask(TallyRequest(request_id=next(self._request_ids)))
        assert isinstance(answer, Tallied)
        return answer.tally

    async def _ask(self, request: Request) -> Answer:
        self._check()
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asking[request.request_id] = request, waiting
        self._outbox.put(request)
        try:
            answer = await waiting
        finally:
            del self._asking[request.request_id]
        if isinstance(answer, RequestFailed):
            raise (ConfigError if answer.is_config else LinkError)(answer.reason)
        return answer

    async def outcomes(self) -> list[Outcome]:
        """Wait for outcomes, in the order of the episodes' ends, each once."""
        while not self._inbox:
            self._check()
            self._news.clear()
            await self._news.wait()
        taken, self._inbox = self._inbox, []
        self._taken = self._hello.position
        self._outbox.put_latest(Received(position=self._taken))
        return taken

    def note(self, rows: Collection[TrainerRow]) -> None:
        if rows:
            commit = Commit(number=next(self._commit_numbers), rows=list(rows))
            self._commits[commit.number] = commit
            self._outbox.put(commit)

    async def commit(self, rows: Collection[TrainerRow] = ()) -> None:
        """Write rows in one transaction, and wait for all commits so far."""
        self.note(rows)
        wanted = max(self._commits, default=0)
        while self._committed < wanted:
            self._check()
            self._news.clear()
            await self._news.wait()

    def cancel(self, uuids: Iterable[str], reason: str) -> None:
        """Each episode still gets an outcome: a failure, or the result that came first."""
        uuids = list(uuids)
        self._cancelling.update(dict.fromkeys(uuids, reason))
        self._outbox.put(Cancel(episode_uuids=uuids, reason=reason))

    def release_client(self, client_uuid: str, reason: str) -> None:
        self._outbox.put(ReleaseClient(client_uuid=client_uuid, reason=reason))

    def set_status(
        self,
        *,
        policy_version: int | None = None,
        global_step: int | None = None,
        engine_status: EngineStatus | None = None,
        usable_versions: list[int] | None = None,
        client_samples: bool | None = None,
        run_finished: bool | None = None,
        failure: str | None = None,
    ) -> None:
        """None leaves a value unchanged."""
        new = {
            "policy_version": policy_version,
            "global_step": global_step,
            "engine_status": engine_status,
            "usable_versions": usable_versions,
            "client_samples": client_samples,
            "run_finished": run_finished,
            "failure": failure,
        }
        changed = {name: value for name, value in new.items() if value is not None}
        self._hello = msgspec.structs.replace(self._hello, **changed)
        self._say_hello()

    def send_metrics(self, text: bytes) -> None:
        self._outbox.put_latest(Metrics(text=text))

    def set_batch(self, batch: BatchProgress | None, *, at_once: bool) -> None:
        """Without `at_once`, the next heartbeat carries it."""
        self._hello = msgspec.structs.replace(self._hello, batch=batch)
        if at_once:
            self._say_hello()

    async def flush(self) -> None:
        """Wait until the server has committed everything sent so far."""
        self._say_hello()
        number = self._hello.number
        while self._welcomed < number:
            self._check()
            self._news.clear()
            await self._news.wait()

    def _count_handshake(self, reason: str) -> None:
        self.refused_handshakes += 1

    async def _guarded(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        # Pending and later calls must raise, not wait forever.
        try:
            await part()
        except Exception as error:
            logger.exception("link.failed part=%s", name)
            self._fail(LinkError(f"the link's {name} task failed: {error!r}"))
            raise

    async def _receive(self) -> None:
        while True:
            *before, frame = await self._socket.recv_multipart()
            try:
                epoch, messages = int(before[0]) if before else 0, read_to_trainer(frame)
            except (LinkError, ValueError) as error:
                logger.warning("link.drop reason=malformed detail=%s", error)
                continue
            if epoch < self._epoch:
                logger.warning("link.drop reason=former_server epoch=%d", epoch)
                continue
            self._epoch = epoch
            for message in messages:
                self._on_message(message)

    async def _send(self) -> None:
        while True:
            for frame in frames(await self._outbox.take(), self._on_unsendable):
                await self._socket.send(frame)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        repeat_at = loop.time() + self._times.resend_s
        while True:
            await asyncio.sleep(self._times.heartbeat_s)
            self._say_hello()
            if loop.time() >= repeat_at:
                self._repeat()
                repeat_at = loop.time() + self._times.resend_s

    def _say_hello(self) -> None:
        self._hello = msgspec.structs.replace(self._hello, number=self._hello.number + 1)
        self._outbox.put(self._hello)

    def _repeat(self) -> None:
        self._send_registrations(
            [episode for uuid, each in self._registering.items() if (episode := each.missing.get(uuid))]
        )
        for uuid, reason in self._cancelling.items():
            self._outbox.put(Cancel(episode_uuids=[uuid], reason=reason))
        if self._taken:
            self._outbox.put_latest(Received(position=self._taken))
        for commit in self._commits.values():
            self._outbox.put(commit)
        for request, _ in self._asking.values():
            self._outbox.put(request)

    def _send_registrations(self, episodes: Iterable[NewEpisode]) -> None:
        chunk, size = list[NewEpisode](), 0
        for _, members in itertools.groupby(episodes, key=attrgetter("group_id")):
            group = list(members)
            more = sum(len(each.payload) for each in group)
            if chunk and (len(chunk) + len(group) > REGISTER_CHUNK or size + more > FULL_FRAME_BYTES):
                self._outbox.put(Register(episodes=chunk))
                chunk, size = [], 0
            chunk += group
            size += more
        if chunk:
            self._outbox.put(Register(episodes=chunk))

    def _on_unsendable(self, reason: str, detail: str, message: Tagged) -> None:
        # A call waits for this message's effect, which will never come.
        logger.error("link.drop reason=%s detail=%s", reason, detail)
        if isinstance(message, Sampled | SampleProgress | Metrics):
            return  # The server times out the sample.
        if not isinstance(message, Register):
            self._fail(LinkError(f"a message to the server cannot be sent: {detail}"))
            return
        first = message.episodes[0]
        registration = self._registering.get(first.episode_uuid)
        if registration is not None and not registration.confirmed.done():
            reason = f"the group {first.group_id!r} cannot be registered: {detail}"
            registration.confirmed.set_exception(LinkError(reason))

    def _on_message(self, message: ToTrainer) -> None:
        match message:
            case EpisodeAccepted() | EpisodeFailed():
                self._on_outcome(message)
            case Sample():
                self._samples.start(message)
            case CancelSample():
                self._samples.cancel(message.request_id)
            case Cancelled():
                for uuid in message.episode_uuids:
                    self._cancelling.pop(uuid, None)
            case Registered():
                for uuid in message.episode_uuids:
                    self._on_registered(uuid)
            case NotRegistered():
                self._on_not_registered(message)
            case Committed():
                self._on_committed(message.number)
            case Resumed() | Fetched() | Tallied() | RequestFailed():
                self._on_answer(message)
            case Welcome():
                self._on_welcome(message)
            case Stop():
                logger.info("link.stop reason=%s", message.reason)
                self.stop_requested.set()
            case Refused():
                self._fail(LinkError(f"the server refused this trainer: {message.reason}"))

    def _on_outcome(self, outcome: Outcome) -> None:
        # It may be a repetition, or an earlier outcome may be missing.
        position = self._hello.position
        if outcome.after <= position < outcome.number:
            self._inbox.append(outcome)
            self._hello = msgspec.structs.replace(self._hello, position=outcome.number)
            self._news.set()

    def _on_committed(self, number: int) -> None:
        self._committed = max(self._committed, number)
        for each in [each for each in self._commits if each <= number]:
            del self._commits[each]
        self._news.set()

    def _on_answer(self, answer: Answer) -> None:
        if isinstance(answer, Resumed) and self._hello.position < 0:
            self._hello = msgspec.structs.replace(self._hello, position=0)
        _, waiting = self._asking.get(answer.request_id, (None, None))
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _on_registered(self, uuid: str) -> None:
        registration = self._registering.get(uuid)
        if registration is None:
            return
        registration.missing.pop(uuid, None)
        if not registration.missing and not registration.confirmed.done():
            registration.confirmed.set_result(None)

    def _on_not_registered(self, message: NotRegistered) -> None:
        registration = self._registering.get(message.episode_uuid)
        if registration is not None and not registration.confirmed.done():
            registration.confirmed.set_exception(ConflictError(message.reason))

    def _on_welcome(self, welcome: Welcome) -> None:
        self._welcomed = max(self._welcomed, welcome.number)
        if welcome.number:
            self._name_quarantined(welcome.quarantined)
        if welcome.server_id != self._server_id:
            logger.info("link.welcome server_id=%s", welcome.server_id)
            if self._server_id:
                self._samples.cancel_all()
                self._repeat()
            self._server_id = welcome.server_id
        self._news.set()

    def _name_quarantined(self, quarantined: dict[str, str]) -> None:
        for name, reason in quarantined.items():
            if name not in self._quarantined and self._note is not None:
                self._note(f"client {name!r} gets no more episodes for now: {reason}")
        self._quarantined = quarantined

    def _fail(self, error: LinkError) -> None:
        self._failure = self._failure or error
        pending = [
            *(registration.confirmed for registration in self._registering.values()),
            *(answer for _, answer in self._asking.values()),
        ]
        for future in pending:
            if not future.done():
                future.set_exception(self._failure)
        self._news.set()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


def _check_episodes(
    episodes: Sequence[NewEpisode], unique: dict[str, NewEpisode], registering: dict[str, _Registration]
) -> None:
    if len(unique) != len(episodes) or unique.keys() & registering.keys():
        raise ValueError("an episode uuid is registered twice at once")
    for episode in episodes:
        check_episode(episode)

"""`Clients`: what each client did recently, which must slow down, and how much each token may hold.

A broken client fails at once and claims again, using up many episodes' attempts. After `MIN_FAILURES`
failures in a row it gets one episode per second, and once the others' success rate cannot explain its
failures, none for `QUARANTINE_S`. A client with its own token is `NAME/CLIENT_UUID`, and is also tracked as
`NAME/`, so a new uuid does not help it. If everyone fails, the run ends by itself (`NoSuccessError`).
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Literal, NamedTuple

from tinkerscript.errors import QuotaError, UnauthorizedError
from tinkerscript.protocol import TRAINER_POOL
from tinkerscript.server.episodes.record import EpisodeRecord

# Quarantine for a row of failures less likely than this at the others' success rate.
CHANCE = 1e-6
MIN_FAILURES = 8
PACE_S = 1.0
QUARANTINE_S = 600.0

MAX_CLIENTS = 10_000
MIN_AGE_S = 5.0  # Else a first result looks fast.
MESSAGE_CHARS = 300
POLLING_S = 35.0  # A live worker's long polls last 30 s.
SHUTDOWN_S = 2.5


class Pause(NamedTuple):
    reason: str
    is_refusal: bool
    """Whether the client should give up (403)."""


@dataclass(slots=True)
class ClientRecord:
    first_seen: float
    last_seen: float
    ended: int = 0
    failed: int = 0
    failures: int = 0
    """Its latest failures in a row; the next three fields are about them."""

    succeeded_before: int = 0
    failed_before: int = 0
    message: str = ""
    next_claim: float = -math.inf
    quarantined_until: float = -math.inf
    """Infinity once an operator stopped it."""

    @property
    def why(self) -> str:
        if self.quarantined_until == math.inf:
            return "an operator has stopped it"
        return f"its last {self.failures} attempts failed while others succeeded: {self.message}"


class Clients:
    def __init__(
        self, clock: Callable[[], float], max_claims: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        self._clock = clock
        self._max_claims = max_claims
        self._held: Counter[str] = Counter()
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._records: OrderedDict[str, ClientRecord] = OrderedDict()
        """Least recently seen first."""

        self._quarantined: dict[str, ClientRecord] = {}
        """Without a success since."""

        self._succeeded = self._failed = 0
        self.own_prefix = ""
        """Our own workers are never quarantined: their failures are the run's."""

    def restore(self, episodes: Iterable[EpisodeRecord]) -> None:
        claimed = (episode.client_uuid for episode in episodes if episode.state == "claimed")
        self._held.update(name for client in claimed if (name := self.account(client)))

    def account(self, client: str) -> str:
        if not self._max_claims:
            return ""
        name, slash, _ = client.partition("/")
        return name if slash and name in self._max_claims else ""

    def owner(self, client_uuid: str, account: str) -> str:
        if account:
            return f"{account}/{client_uuid}"
        if name := self.account(client_uuid):
            raise UnauthorizedError(
                403,
                f"client_uuid: {client_uuid!r} is a name of client {name!r}, which has its own token "
                "(interchange_server.clients)",
            )
        return client_uuid

    def check_pool(self, account: str, pool: str) -> None:
        if account and pool not in (TRAINER_POOL, account):
            raise UnauthorizedError(
                403, f"client {account!r} may use the trainer's pool and its own, not {pool!r}"
            )

    def free_claims(self, client: str) -> float:
        name = self.account(client)
        return max(0, self._max_claims[name] - self._held[name]) if name else math.inf

    def check_waiting(self, client: str, what: Literal["an episode", "the run's end"]) -> None:
        name = self.account(client)
        held = self._held[name] if what == "an episode" else 0
        if name and held + self._waiting[name, what] >= self._max_claims[name]:
            raise QuotaError(
                f"client {name!r} holds or waits for {what} {self._max_claims[name]} times, the maximum "
                f"(interchange_server.clients: {name}.max_claims)"
            )

    @contextmanager
    def waiting(self, client: str, what: Literal["an episode", "the run's end"]) -> Generator[None]:
        self.check_waiting(client, what)
        key = self.account(client), what
        self._waiting[key] += 1
        try:
            yield
        finally:
            self._waiting[key] -= 1

    def seen(self, name: str) -> ClientRecord:
        now = self._clock()
        record = self._records.get(name)
        if record is None:
            if len(self._records) >= MAX_CLIENTS:
                self._records.popitem(last=False)
            record = self._records[name] = self._quarantined.get(name) or ClientRecord(now, now)
        record.last_seen = now
        self._records.move_to_end(name)
        return record

    def claimed(self, client: str) -> None:
        if name := self.account(client):
            self._held[name] += 1
        for record in self._known(client).values():
            if record.failures >= MIN_FAILURES:
                record.next_claim = self._clock() + PACE_S

    def closed(self, client: str) -> None:
        if name := self.account(client):
            self._held[name] -= 1

    def succeeded(self, client: str) -> None:
        self._succeeded += 1
        for name in self._names_of(client):
            record = self.seen(name)
            record.ended += 1
            record.failures = 0
            if record.quarantined_until < math.inf:
                record.quarantined_until = -math.inf
                self._quarantined.pop(name, None)

    def failed(self, client: str, message: str) -> list[str]:
        """Return the names newly in quarantine."""
        now, caught = self._clock(), list[str]()
        for name in self._names_of(client):
            record = self.seen(name)
            record.failed += 1
            if self.own_prefix and client.startswith(self.own_prefix):
                continue
            if not record.failures:
                record.succeeded_before, record.failed_before = self._succeeded, self._failed
            record.failures += 1
            record.message = _printable(message)
            if self._is_no_accident(record):
                if record.quarantined_until <= now:
                    caught.append(name)
                record.quarantined_until = max(record.quarantined_until, now + QUARANTINE_S)
                self._quarantined[name] = record
        if len(self._quarantined) > MAX_CLIENTS:
            each = self._quarantined.items()
            self._quarantined = {name: known for name, known in each if known.quarantined_until > now}
        self._failed += 1
        return caught

    def _is_no_accident(self, record: ClientRecord) -> bool:
        succeeded = self._succeeded - record.succeeded_before
        failed = self._failed - record.failed_before - (record.failures - 1)
        rate = succeeded / (succeeded + failed + 1)
        return record.failures >= MIN_FAILURES and (1 - rate) ** record.failures < CHANCE

    def stop(self, name: str) -> None:
        """A restart ends it."""
        record = self._quarantined[name] = self.seen(name)
        record.quarantined_until = math.inf

    def pause(self, client: str) -> Pause | None:
        now = self._clock()
        for name, record in self._known(client).items():
            if record.quarantined_until > now:
                return Pause(f"client {name!r} is in quarantine: {record.why}", is_refusal=True)
            if record.failures and record.next_claim > now:
                reason = (
                    f"The last {record.failures} attempts of client {name!r} failed; until one succeeds, it "
                    f"gets one episode in {PACE_S:g} s. The last failure: {record.message}"
                )
                return Pause(reason, is_refusal=False)
        return None

    def is_paced(self, client: str) -> bool:
        return any(record.failures >= MIN_FAILURES for record in self._known(client).values())

    def quarantined(self) -> dict[str, str]:
        now = self._clock()
        return {name: each.why for name, each in self._quarantined.items() if each.quarantined_until > now}

    def latest(self, limit: int) -> list[str]:
        return list(islice(reversed(self._records), limit))

    def since(self, seconds: float) -> Iterator[str]:
        oldest = self._clock() - seconds
        return (name for name, record in self._records.items() if record.last_seen >= oldest)

    def record(self, name: str) -> ClientRecord | None:
        return self._records.get(name)

    def per_minute(self, record: ClientRecord) -> float:
        age_s = max(MIN_AGE_S, self._clock() - record.first_seen)
        return (record.ended + record.failed) * 60 / age_s

    def idle_s(self, record: ClientRecord) -> float:
        return self._clock() - record.last_seen

    def _known(self, client: str) -> dict[str, ClientRecord]:
        names = self._names_of(client)
        return {name: found for name in names if (found := self._records.get(name)) is not None}

    def _names_of(self, client: str) -> list[str]:
        name = self.account(client)
        return [client, f"{name}/"] if name else [client]


class RunEnd:
    def __init__(self, clients: Clients, *, shutdown_s: float = SHUTDOWN_S) -> None:
        self._clients = clients
        self._shutdown_s = shutdown_s
        self._unaware = set[str]()
        self._changed = asyncio.Event()
        self._closing = False
        self.is_here = False

    def set(self, finished: bool) -> None:
        if finished and not self.is_here:
            self._unaware = set(self._clients.since(POLLING_S))
        if finished != self.is_here:
            self.is_here = finished
            self._wake()

    def close(self) -> None:
        self._closing = True
        self._wake()

    def knows(self, client: str) -> None:
        self._unaware.discard(client)
        if not self._unaware:
            self._wake()

    async def wait(self, client: str, wait_s: float) -> bool:
        self._clients.seen(client)
        try:
            async with asyncio.timeout(wait_s):
                while not self.is_here and not self._closing:
                    await self._changed.wait()
        except TimeoutError:
            pass
        if self.is_here:
            self.knows(client)
        return self.is_here

    async def known_to_all(self) -> None:
        try:
            async with asyncio.timeout(self._shutdown_s):
                while self.is_here and self._unaware:
                    await self._changed.wait()
        except TimeoutError:
            return

    def _wake(self) -> None:
        # Later waiters wait for the next change.
        self._changed.set()
        self._changed = asyncio.Event()


def _printable(message: str) -> str:
    text = "".join(char if char.isprintable() else " " for char in message[: 2 * MESSAGE_CHARS])
    return " ".join(text.split())[:MESSAGE_CHARS]

"""`Accounts`: clients with tokens of their own, and what each of them may use.

Invariant: a limit that is reached refuses a request before anything of it is stored. The refusal names the
limit; 429 says when to ask again, and 403 that asking again is in vain. Nobody claims in the name of such a
client without its token, and its claims count as its own across a restart of the server. Tokens are compared
by their digests and never logged.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

from tinkerscript.config import ClientConfig
from tinkerscript.errors import ConfigError, QuotaError, UnauthorizedError
from tinkerscript.protocol import TRAINER_POOL
from tinkerscript.server.auth import read_token
from tinkerscript.server.episodes.record import EpisodeRecord
from tinkerscript.server.metrics import ServerMetrics

MINUTE_S = 60.0


class Rate:
    """So much a minute, with bursts of up to a minute's worth."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._since = clock()

    def wait_s(self, amount: int) -> float:
        """Seconds until `amount`, at most a minute's worth, is free; 0 if it is."""
        now = self._clock()
        self._left = min(self.per_minute, self._left + (now - self._since) * self.per_minute / MINUTE_S)
        self._since = now
        return max(0.0, (amount - self._left) * MINUTE_S / self.per_minute)

    def take(self, amount: int) -> None:
        self._left -= amount


class Account:
    """One client with its own token: its limits, and what it has used."""

    def __init__(
        self,
        config: ClientConfig,
        metrics: ServerMetrics,
        clock: Callable[[], float],
        holders: dict[tuple[str, int], Account],
    ) -> None:
        """`holders`: of the claims of all clients with their own tokens, by episode and attempt."""
        self.name = config.name
        self._config = config
        self._metrics = metrics
        self._holders = holders
        self.claims = 0
        """How many it holds."""

        self._waiting = 0
        """Requests of it that wait for an episode."""

        self._watching = 0
        """Those that wait for the run's end."""

        self._registrations = Rate(config.registrations_per_minute, clock)
        self._bytes = Rate(config.bytes_per_minute, clock)

    @property
    def free_claims(self) -> int:
        """How many more claims it may hold."""
        return max(0, self._config.max_claims - self.claims)

    def use_pool(self, pool: str) -> None:
        """Raises UnauthorizedError 403 for a pool that it may neither claim from nor register into."""
        allowed = self._config.pools or [TRAINER_POOL, self.name]
        if pool not in allowed:
            self._metrics.count_client(self.name, "refusals")
            raise UnauthorizedError(
                403, f"client {self.name!r} may not use the pool {pool!r} ({self._limit('pools')}: {allowed})"
            )

    def check_claims(self) -> None:
        """Raises QuotaError if it holds, or waits for, as many claims as it may."""
        if self.claims + self._waiting >= self._config.max_claims:
            self._refuse("max_claims", f"holds or waits for {self._config.max_claims} claims", 1.0)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """While a request waits for an episode, and occupies a connection. Raises QuotaError."""
        self.check_claims()
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextmanager
    def watching(self) -> Generator[None]:
        """While a request waits for the run's end, and occupies a connection. Raises QuotaError."""
        if self._watching >= self._config.max_claims:
            self._refuse("max_claims", f"waits {self._config.max_claims} times for the run's end", 1.0)
        self._watching += 1
        try:
            yield
        finally:
            self._watching -= 1

    def hold(self, episode_uuid: str, attempt: int) -> None:
        """A claim of this client was made."""
        self.hold_again(episode_uuid, attempt)
        self._metrics.count_client(self.name, "claims")

    def hold_again(self, episode_uuid: str, attempt: int) -> None:
        """A claim that this client made before the server was restarted."""
        self._holders[episode_uuid, attempt] = self
        self.claims += 1

    def send(self, body: bytes, *, registrations: int = 0) -> None:
        """Count a request with this body. Raises QuotaError 429, or UnauthorizedError 403 for one that is
        too much for any minute."""
        for key, rate, amount in (
            ("bytes_per_minute", self._bytes, len(body)),
            ("registrations_per_minute", self._registrations, registrations),
        ):
            if amount > rate.per_minute:
                self._metrics.count_client(self.name, "refusals")
                raise UnauthorizedError(
                    403, f"client {self.name!r}: {amount} at once is more than {self._limit(key)} allows"
                )
            if wait_s := rate.wait_s(amount):
                self._refuse(key, f"has used up its {rate.per_minute}", wait_s)
        self._bytes.take(len(body))
        self._registrations.take(registrations)
        self._metrics.count_client(self.name, "bytes", len(body))
        self._metrics.count_client(self.name, "registrations", registrations)

    def _refuse(self, key: str, what: str, retry_after_s: float) -> None:
        self._metrics.count_client(self.name, "refusals")
        raise QuotaError(f"client {self.name!r} {what} ({self._limit(key)})", retry_after_s)

    def _limit(self, key: str) -> str:
        return f"interchange_server.clients: {self.name}.{key}"


class Accounts:
    """The clients with tokens of their own."""

    def __init__(
        self,
        configs: Sequence[ClientConfig],
        environ: Mapping[str, str],
        *,
        metrics: ServerMetrics,
        clock: Callable[[], float],
        other_tokens: Sequence[str | None] = (),
        min_chars: int = 1,
    ) -> None:
        """Reads each client's token. Raises ConfigError for one that is missing, short, or not its own."""
        self._of_token: dict[bytes, tuple[str, Account]] = {}
        self._of_name: dict[str, Account] = {}
        self._holders: dict[tuple[str, int], Account] = {}
        taken = {_digest(token) for token in other_tokens if token is not None}
        for config in configs:
            where = f"interchange_server.clients: {config.name}"
            token = read_token(environ, config.token_env)
            if token is None:
                raise ConfigError(
                    f"{where}: no token; set {config.token_env}, or {config.token_env}_FILE to a file with it"
                )
            if len(token) < min_chars:
                raise ConfigError(f"{where}: its token needs at least {min_chars} characters")
            digest = _digest(token)
            if digest in taken:
                raise ConfigError(f"{where}: its token is also another's")
            taken.add(digest)
            account = Account(config, metrics, clock, self._holders)
            self._of_token[digest] = token, account
            self._of_name[config.name] = account

    def restore(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Count the claims that were made before the server was restarted."""
        for episode in episodes:
            account = self._named(episode.client_uuid) if episode.state == "claimed" else None
            if account is not None:
                account.hold_again(episode.uuid, episode.attempt)

    def of(self, authorization: str) -> Account | None:
        """The client of an `Authorization` header; None if it is nobody's own token."""
        token = authorization.removeprefix("Bearer ")
        found = self._of_token.get(_digest(token))
        if found is None or not hmac.compare_digest(found[0].encode(), token.encode()):
            return None
        return found[1]

    def charged(self, authorization: str, body: bytes, *, registrations: int = 0) -> Account | None:
        """The client of an `Authorization` header, with a request counted; None if it is nobody's own token.

        Raises QuotaError and UnauthorizedError.
        """
        account = self.of(authorization)
        if account is not None:
            account.send(body, registrations=registrations)
        return account

    def owner(self, client_uuid: str, account: Account | None) -> str:
        """Who owns the claims of this request: for a client with its own token, `NAME/CLIENT_UUID`.

        Raises UnauthorizedError 403 for such a name without the token.
        """
        if account is not None:
            return f"{account.name}/{client_uuid}"
        if (named := self._named(client_uuid)) is not None:
            raise UnauthorizedError(
                403,
                f"client_uuid: {client_uuid!r} is a name of client {named.name!r}, which has its own token "
                "(interchange_server.clients)",
            )
        return client_uuid

    def _named(self, owner: str) -> Account | None:
        name, slash, _ = owner.partition("/")
        return self._of_name.get(name) if slash else None

    def holder(self, episode_uuid: str, attempt: int) -> Account | None:
        """The client whose claim this is; None for one that was made with another token."""
        return self._holders.get((episode_uuid, attempt))

    def forget(self, episode_uuid: str, attempt: int) -> None:
        """The claim is over."""
        account = self._holders.pop((episode_uuid, attempt), None)
        if account is not None:
            account.claims -= 1


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()

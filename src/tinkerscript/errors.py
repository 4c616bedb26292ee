"""The errors that TinkerScript raises, one class per boundary.

    TinkerScriptError
    ├── ConfigError              a config, task path or option that cannot be used
    ├── ClientError              what a rollout program sees
    │   ├── ServerUnreachableError   no answer from the interchange server
    │   ├── NoEpisodeError           nothing to claim within the time given
    │   ├── ClaimLostError           the claim no longer holds the episode's lease
    │   └── RequestRefusedError      the server understood the request and refused it
    ├── InterchangeError         the server's own refusals
    │   ├── UnknownEpisodeError      no such episode
    │   ├── NotTheOwnerError         the caller's claim does not hold the lease
    │   ├── ConflictError            the same id with other content, or an illegal transition
    │   ├── QuotaError               the caller holds all that it may; later it may have more
    │   ├── UnauthorizedError        a token that is missing, wrong, or of a lesser role
    │   └── StoreError               the server's file cannot be read or written
    ├── GatewayError             a model call that cannot be served (HTTP status and code inside)
    ├── LinkError                the connection between trainer and server
    ├── EngineError              sampling or training failed
    │   ├── EngineRequestError       what was asked of the engine cannot be done
    │   └── WireError                a refusal of the wire server (HTTP status inside)
    ├── AlignmentError           what would train is not what was sampled
    ├── ConversionError          another trainer's form has no place for what a rollout holds
    └── WorkerError              a worker cannot run its script or task
        └── WrongTaskError           an episode of a task that the worker does not run

`*Error` is an exception. A recorded failure of an episode is a `Failure` (see `protocol`).
"""

from __future__ import annotations


class TinkerScriptError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(TinkerScriptError):
    """A config key, task path or command-line option that cannot be used."""


class ClientError(TinkerScriptError):
    """Base of the errors that a rollout program sees."""


class ServerUnreachableError(ClientError):
    """The interchange server did not answer."""


class NoEpisodeError(ClientError):
    """No episode could be claimed within the time that the caller gave."""


class ClaimLostError(ClientError):
    """This claim no longer holds the lease of its episode; its result does not count."""


class RequestRefusedError(ClientError):
    """The server understood the request and refused it.

    `status` is the HTTP status, `reason` the server's own words.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"the server refused the request (HTTP {status}): {reason}")
        self.status = status
        self.reason = reason


class InterchangeError(TinkerScriptError):
    """Base of what the interchange server refuses."""


class UnknownEpisodeError(InterchangeError):
    """The server holds no episode with this uuid."""


class NotTheOwnerError(InterchangeError):
    """The caller's claim does not hold the lease of the episode."""


class ConflictError(InterchangeError):
    """The same id arrived with other content, or the transition is not legal."""


class QuotaError(InterchangeError):
    """The caller holds as much as it may; when some of that is over it may have more."""


class UnauthorizedError(InterchangeError):
    """The request's token does not grant the role that the route needs; `status` is 401 or 403."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class StoreError(InterchangeError):
    """The server's file of episodes cannot be read or written."""


class GatewayError(TinkerScriptError):
    """A model call that cannot be served.

    `status` is the HTTP status, chosen for the caller's retry logic; `code` a stable word
    such as `invalid_api_key` or `context_length_exceeded`; `param` the offending field.
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


class LinkError(TinkerScriptError):
    """The ZeroMQ link between trainer and server failed or was misused."""


class EngineError(TinkerScriptError):
    """Sampling or training failed inside the engine."""


class EngineRequestError(EngineError):
    """What was asked of the engine cannot be done; the same request fails again."""


class WireError(EngineError):
    """A request that the wire server refuses; `status` is the HTTP status, chosen for the SDK's retries."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AlignmentError(TinkerScriptError):
    """What would train is not what was sampled. `name`: the alignment report's word for it, if it has one."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class ConversionError(TinkerScriptError):
    """A rollout holds what another trainer's form has no place for, or what cannot be read back from it."""


class WorkerError(TinkerScriptError):
    """A worker cannot run its script or task."""


class WrongTaskError(WorkerError):
    """The episode is of a task that this worker does not run: the worker hands it back and ends."""

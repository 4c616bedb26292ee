"""TinkerScript's errors, one class per boundary.

    TinkerScriptError
    ├── ConfigError              a config, task path or option that cannot be used
    ├── ClientError              what a rollout program sees
    │   ├── ServerUnreachableError   no response from the interchange server
    │   ├── NoEpisodeError           nothing to claim within the given time
    │   ├── RunFinishedError         nothing to claim, ever: the trainer has finished its run
    │   │   └── RunFailedError       the same, because the run has failed
    │   ├── ClaimLostError           the claim no longer holds the episode's lease
    │   ├── ClientClosedError        the client was closed while it waited
    │   └── RequestRefusedError      the server understood the request and refused it
    ├── InterchangeError         the server's own refusals
    │   ├── UnknownEpisodeError      no such episode
    │   ├── NotTheOwnerError         the caller's claim does not hold the lease
    │   ├── ConflictError            same id with different content, or an illegal transition
    │   ├── QuotaError               the caller is at its limit; it may retry later
    │   ├── UnauthorizedError        the token is missing, wrong, or lacks the role
    │   └── StoreError               the server's store cannot be read or written
    ├── GatewayError             a model call that cannot be served (has HTTP status and code)
    ├── LinkError                the connection between trainer and server
    ├── EngineError              sampling or training failed
    │   ├── EngineRequestError       a request that the engine cannot serve
    │   └── WireError                a refusal of the Tinker API server (has HTTP status)
    ├── AlignmentError           training data is not what was sampled
    ├── NoSuccessError           every episode of a batch failed
    ├── NotRecordedError         a run's record has no such thing
    ├── ConversionError          another trainer's format cannot hold a rollout
    ├── IsolationError           a sandbox cannot be made, or has ended
    ├── UploadError              what a run has finished was not copied to its URL
    └── WorkerError              a worker cannot run its script or task
        └── WrongTaskError           an episode of a task the worker does not run

`*Error` is an exception. A recorded failure of an episode is a `Failure` (see `protocol`).
"""

from __future__ import annotations

__all__ = [
    "MAX_REWARD",
    "AlignmentError",
    "ClaimLostError",
    "ClientClosedError",
    "ClientError",
    "ConfigError",
    "ConflictError",
    "ConversionError",
    "EngineError",
    "EngineRequestError",
    "GatewayError",
    "InterchangeError",
    "IsolationError",
    "LinkError",
    "NoEpisodeError",
    "NoSuccessError",
    "NotRecordedError",
    "NotTheOwnerError",
    "QuotaError",
    "RequestRefusedError",
    "RunFailedError",
    "RunFinishedError",
    "ServerUnreachableError",
    "StoreError",
    "TinkerScriptError",
    "UnauthorizedError",
    "UnknownEpisodeError",
    "UnknownWeightsError",
    "UploadError",
    "WireError",
    "WorkerError",
    "WrongTaskError",
]


MAX_REWARD = 1e6
"""Largest magnitude of an episode's reward, after a list is summed. Beyond it training would overflow.

Wherever a reward enters (over HTTP, from an episode in this process, a ledger, a table), it is checked."""


class TinkerScriptError(Exception):
    """Base class of this package's errors."""


class ConfigError(TinkerScriptError):
    """A config key, task path or command-line option that cannot be used."""


class ClientError(TinkerScriptError):
    """Base class of the errors a rollout program sees."""


class ServerUnreachableError(ClientError):
    """The interchange server did not respond."""


class NoEpisodeError(ClientError):
    """No episode could be claimed within the given time."""


class RunFinishedError(ClientError):
    """The trainer has finished its run, so there is nothing to claim any more."""


class RunFailedError(RunFinishedError):
    """The run has failed, and its server ends with it."""


class ClaimLostError(ClientError):
    """The claim no longer holds its episode's lease, so its result does not count."""


class ClientClosedError(ClientError):
    """The client was closed, by another thread or task, while it waited."""


class RequestRefusedError(ClientError):
    """The server understood the request and refused it.

    `status`: the HTTP status. `reason`: the server's message. `code`: its code, such as
    `context_length_exceeded`; empty if it gave none.
    """

    def __init__(self, status: int, reason: str, code: str = "") -> None:
        super().__init__(f"the server refused the request (HTTP {status}): {reason}")
        self.status = status
        self.reason = reason
        self.code = code


class InterchangeError(TinkerScriptError):
    """Base class of the interchange server's refusals."""


class UnknownEpisodeError(InterchangeError):
    """The server has no episode with this uuid."""


class UnknownWeightsError(InterchangeError):
    """The run has no weights with this name, or they have no such file."""


class NotTheOwnerError(InterchangeError):
    """The caller's claim does not hold the episode's lease."""


class ConflictError(InterchangeError):
    """The same id arrived with different content, or the transition is not legal."""


class QuotaError(InterchangeError):
    """The caller is at its limit; it may retry after `retry_after_s` seconds."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class UnauthorizedError(InterchangeError):
    """The request's token does not grant the role that the route requires; `status` is 401 or 403."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class StoreError(InterchangeError):
    """The server's store of episodes cannot be read or written."""


class GatewayError(TinkerScriptError):
    """A model call that cannot be served.

    `status`: the HTTP status, chosen for the caller's retry logic. `code`: a stable identifier such as
    `invalid_api_key` or `context_length_exceeded`. `param`: the offending field.
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
    """The engine cannot serve the request; a retry fails again."""


class WireError(EngineError):
    """The Tinker API server refuses the request. `status`: the HTTP status, chosen for the SDK's retries."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AlignmentError(TinkerScriptError):
    """Training data is not what was sampled. `name`: its name in the alignment report, if it has one."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NoSuccessError(TinkerScriptError):
    """Every episode of an evaluation or step failed, so that nothing can be measured or trained."""


class NotRecordedError(TinkerScriptError):
    """A run's record has no such step, episode or token, or a question to it cannot be read."""


class ConversionError(TinkerScriptError):
    """Another trainer's format cannot hold a rollout, or cannot be read back."""


class IsolationError(TinkerScriptError):
    """A sandbox cannot be made here, or has ended."""


class UploadError(TinkerScriptError):
    """What a run has finished could not be copied to the URL of its folder."""


class WorkerError(TinkerScriptError):
    """A worker cannot run its script or task."""


class WrongTaskError(WorkerError):
    """The episode's task is not one this worker runs: the worker returns the episode and exits."""

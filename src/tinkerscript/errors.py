"""TinkerScript's errors, one class per boundary.

    TinkerScriptError
    ├── ConfigError              a config, task path or option that cannot be used
    ├── ClientError              what a rollout program sees
    │   ├── ServerUnreachableError   no response from the interchange server
    │   ├── NoEpisodeError           nothing to claim within the given time
    │   ├── RunFinishedError         nothing to claim, ever: the run is finished
    │   │   └── RunFailedError       nothing to claim, ever: the run has failed
    │   ├── ClaimLostError           the claim no longer holds the episode's lease
    │   ├── ClientClosedError        the client was closed while it waited
    │   └── RequestRefusedError      the server understood the request and refused it
    ├── InterchangeError         what the server refuses
    │   ├── UnknownEpisodeError      no such episode
    │   ├── UnknownWeightsError      no such weights, or no such file in them
    │   ├── NotTheOwnerError         the caller's claim does not hold the lease
    │   ├── ConflictError            same id with different content, or an illegal transition
    │   ├── QuotaError               the caller is at its limit and may retry later
    │   ├── UnauthorizedError        the token is missing, wrong, or lacks the role
    │   └── StoreError               the ledger cannot be read or written
    ├── GatewayError             a model call that cannot be served (has HTTP status and code)
    ├── LinkError                the connection between trainer and server
    ├── EngineError              sampling or training failed
    │   ├── EngineRequestError       a request that the engine cannot serve
    │   └── WireError                a refusal of the Tinker API server (has HTTP status)
    ├── AlignmentError           training data differs from what was sampled
    ├── NoSuccessError           every episode of an evaluation or step failed
    ├── NotRecordedError         the ledger has no such step, episode or token, or the query is malformed
    ├── ConversionError          another trainer's format cannot hold a rollout
    ├── IsolationError           a sandbox cannot be made, or has ended
    ├── UploadError              the run's folder could not be copied to its URL
    └── WorkerError              a worker cannot run its script or task
        └── WrongTaskError           an episode of a task the worker does not run

Everything that reads a user's config, options, model or keys may raise ConfigError, everything that uses the
ledger StoreError, and everything in the engine EngineError. A `Failure` (see `protocol`) is an episode's
recorded failure.
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
"""Larger rewards would overflow training."""


class TinkerScriptError(Exception):
    pass


class ConfigError(TinkerScriptError):
    pass


class ClientError(TinkerScriptError):
    pass


class ServerUnreachableError(ClientError):
    pass


class NoEpisodeError(ClientError):
    pass


class RunFinishedError(ClientError):
    pass


class RunFailedError(RunFinishedError):
    """The run has failed, and its server ends with it."""


class ClaimLostError(ClientError):
    pass


class ClientClosedError(ClientError):
    pass


class RequestRefusedError(ClientError):
    """The server refused a request with the HTTP `status`.

    `reason` is the server's message, `code` such as `context_length_exceeded` or empty.
    """

    def __init__(self, status: int, reason: str, code: str = "") -> None:
        super().__init__(f"the server refused the request (HTTP {status}): {reason}")
        self.status = status
        self.reason = reason
        self.code = code


class InterchangeError(TinkerScriptError):
    pass


class UnknownEpisodeError(InterchangeError):
    pass


class UnknownWeightsError(InterchangeError):
    pass


class NotTheOwnerError(InterchangeError):
    pass


class ConflictError(InterchangeError):
    pass


class QuotaError(InterchangeError):
    """The caller may retry after `retry_after_s`."""

    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class UnauthorizedError(InterchangeError):
    """`status` is 401 or 403."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class StoreError(InterchangeError):
    pass


class GatewayError(TinkerScriptError):
    """A model call cannot be served.

    `status` is the HTTP status, for the caller's retry logic, `code` a stable identifier such as
    `invalid_api_key`, and `param` the offending field.
    """

    def __init__(self, status: int, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param


class LinkError(TinkerScriptError):
    pass


class EngineError(TinkerScriptError):
    pass


class EngineRequestError(EngineError):
    """The engine cannot serve the request; a retry would fail again."""


class WireError(EngineError):
    """`status` suits the SDK's retries."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AlignmentError(TinkerScriptError):
    """`name` is the error's name in the alignment report, or empty."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class NoSuccessError(TinkerScriptError):
    pass


class NotRecordedError(TinkerScriptError):
    pass


class ConversionError(TinkerScriptError):
    pass


class IsolationError(TinkerScriptError):
    pass


class UploadError(TinkerScriptError):
    pass


class WorkerError(TinkerScriptError):
    pass


class WrongTaskError(WorkerError):
    """The worker does not run this episode's task. It hands the episode back and exits."""

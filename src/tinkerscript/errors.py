"""TinkerScript's errors, one class per boundary.

    TinkerScriptError
    ├── ConfigError              a config, task path or option that cannot be used
    ├── ClientError              for rollout programs
    │   ├── ServerUnreachableError   no response from the interchange server
    │   ├── NoEpisodeError           nothing to claim within the given time
    │   ├── RunFinishedError         nothing to claim, ever
    │   │   └── RunFailedError       the run has failed
    │   ├── ClaimLostError           the claim no longer holds the episode's lease
    │   ├── ClientClosedError        the client was closed while it waited
    │   └── RequestRefusedError      the server refused the request
    ├── InterchangeError         refusals by the server
    │   ├── UnknownEpisodeError      no such episode
    │   ├── UnknownWeightsError      no such weights, or no such file in them
    │   ├── NotTheOwnerError         the caller's claim does not hold the lease
    │   ├── ConflictError            same id with different content, or an illegal transition
    │   ├── QuotaError               the caller is at its limit and may retry later
    │   ├── UnauthorizedError        the token is missing, wrong, or lacks the role
    │   └── StoreError               the ledger cannot be read or written
    ├── GatewayError             a model call cannot be served
    ├── LinkError                the connection between trainer and server failed
    ├── EngineError              sampling or training failed
    │   ├── EngineRequestError       the request would always fail
    │   └── WireError                a refusal by the Tinker API server
    ├── AlignmentError           training data differs from what was sampled
    ├── NoSuccessError           every episode of a batch failed
    ├── NotRecordedError         the ledger has no such data, or the query is malformed
    ├── ConversionError          another trainer's format cannot hold a rollout
    ├── IsolationError           a sandbox cannot be made, or has ended
    ├── UploadError              the run's folder could not be copied to its URL
    └── WorkerError              a worker cannot run its script or task
        └── WrongTaskError           the worker does not run the episode's task

A `Failure` (see `protocol`) is an episode's recorded failure.
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
    """The server refused a request.

    `status` is the HTTP status, `reason` the server's message, and `code` an identifier such as
    `context_length_exceeded` or empty.
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
    def __init__(self, reason: str, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class UnauthorizedError(InterchangeError):
    """`status` is 401 for a missing or wrong token, 403 for an insufficient role."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class StoreError(InterchangeError):
    pass


class GatewayError(TinkerScriptError):
    """`status` is the HTTP status, for the caller's retry logic. `code` is an identifier such as
    `invalid_api_key`. `param` names the offending field.
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
    pass


class WireError(EngineError):
    """`status` tells the SDK whether to retry."""

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
    """The worker hands the episode back and exits."""

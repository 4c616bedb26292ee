"""The bridge's errors, one class per boundary.

    BridgeError
    ├── TaskError                 a task that cannot be loaded or used
    │   ├── TaskNotFoundError         no such file, name in a file, or registered task
    │   ├── TaskArgumentsError        arguments that the task does not take
    │   └── InvalidTaskError          loaded, but not usable for episodes
    ├── EnvironmentConfigError    an option of `load_environment` that cannot be used
    ├── UnsupportedError          a message or setting that cannot be expressed exactly
    ├── SandboxError              a sandbox that is not available here
    ├── RunnerError               the eval that drives the episodes cannot start, died or was closed
    └── EpisodeError              one episode that ended without a reward
        ├── TaskFailedError           its solver or scorer raised, or there is no usable score
        ├── EpisodeAbandonedError     it was cancelled before it ended
        └── SelfGradingError          its scorer asked the policy to grade its own answer

A failed episode is an error, never a reward of 0.
"""

from __future__ import annotations

from numbers import Integral

__all__ = [
    "BridgeError",
    "EnvironmentConfigError",
    "EpisodeAbandonedError",
    "EpisodeError",
    "InvalidTaskError",
    "RunnerError",
    "SandboxError",
    "SelfGradingError",
    "TaskArgumentsError",
    "TaskError",
    "TaskFailedError",
    "TaskNotFoundError",
    "UnsupportedError",
    "require_counts",
]


class BridgeError(Exception):
    """Base class of this package's errors."""


class TaskError(BridgeError): ...


class TaskNotFoundError(TaskError):
    """The message lists what exists."""


class TaskArgumentsError(TaskError): ...


class InvalidTaskError(TaskError): ...


class EnvironmentConfigError(BridgeError, ValueError):
    """The message says what is allowed."""


class UnsupportedError(BridgeError):
    """The target format cannot express a message, tool or setting exactly."""


class SandboxError(BridgeError):
    """An unknown provider, or an engine that does not respond."""


class RunnerError(BridgeError): ...


class EpisodeError(BridgeError):
    """Base class of errors that end one episode without a reward."""


class TaskFailedError(EpisodeError):
    """`cause` is what happened; `traceback` is Inspect's text, or empty."""

    def __init__(self, sample_id: int | str, cause: str, traceback: str = "") -> None:
        super().__init__(sample_id, cause, traceback)
        self.sample_id = sample_id
        self.cause = cause
        self.traceback = traceback

    def __str__(self) -> str:
        return f"the episode of sample {self.sample_id!r} failed: {self.cause}"


class EpisodeAbandonedError(EpisodeError):
    """The episode was cancelled; its later model calls are refused."""


class SelfGradingError(EpisodeError):
    """Such scores teach the policy to praise itself."""

    REMEDY = (
        "a scorer called the policy to grade the policy's own answer. Name another model as the grader: "
        "pass model_roles={'grader': 'provider/model'}, or give the scorer its own model"
    )

    def __init__(self, message: str = REMEDY) -> None:
        super().__init__(message)


def require_counts(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise EnvironmentConfigError(f"{name} is {value!r}; it must be an integer of at least 1")

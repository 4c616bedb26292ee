"""`SlowCallNotifier`: waiting for a service, and saying so.

Tinker's SDK waits by itself: it asks again for minutes when a request cannot be sent, for as long as it
takes when a result does not come, and for an hour when billing pauses a job. Here is who tells the user
about it, and what is raised when the SDK has given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import Any, Generic, TypeVar

import tinker

from tinkerscript.errors import EngineError

T = TypeVar("T")

SAY_AFTER_S = 20.0
SAY_AGAIN_S = 60.0


class SlowCallNotifier:
    """Waits for calls of one service; `note` is told when one takes long."""

    def __init__(
        self, service: str, note: Callable[[str], None], *, say_after_s: float = SAY_AFTER_S
    ) -> None:
        self._service = service
        self._note = note
        self._say_after_s = say_after_s

    async def wait(self, call: Awaitable[T], what: str) -> T:
        """The call's result. Raises EngineError for what the service refuses or cannot do."""
        waiting = asyncio.ensure_future(call)
        loop = asyncio.get_running_loop()
        began, patience = loop.time(), self._say_after_s
        try:
            while not (await asyncio.wait({waiting}, timeout=patience))[0]:
                patience = SAY_AGAIN_S
                self._note(f"waiting for {self._service}: {what}, {loop.time() - began:.0f} s so far")
            return waiting.result()
        except tinker.TinkerError as error:
            raise EngineError(f"{self._service}: {what}: {error}") from error
        finally:
            waiting.cancel()


class Waited(Generic[T]):
    """A call that was sent, waited for when it is awaited."""

    def __init__(self, patience: SlowCallNotifier, call: Awaitable[T], what: str) -> None:
        self._patience = patience
        self._call = call
        self._what = what

    def __await__(self) -> Generator[Any, None, T]:
        return self._patience.wait(self._call, self._what).__await__()


class PatientClient:
    """A training client whose results are waited for with patience. Calls are sent when they are made."""

    def __init__(
        self,
        client: tinker.TrainingClient,
        patience: SlowCallNotifier,
        save: Callable[[str], Awaitable[tinker.types.SaveWeightsResponse]],
    ) -> None:
        self._client = client
        self._patience = patience
        self._save = save

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        return self._wait(self._client.forward(data, loss_fn, loss_fn_config), "forward")

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> Awaitable[tinker.ForwardBackwardOutput]:
        return self._wait(self._client.forward_backward(data, loss_fn, loss_fn_config), "forward_backward")

    def optim_step(self, optim_params: tinker.AdamParams) -> Awaitable[tinker.types.OptimStepResponse]:
        return self._wait(self._client.optim_step(optim_params), "optim_step")

    def save_weights_and_get_sampling_client(self) -> Awaitable[tinker.SamplingClient]:
        future = self._client.save_weights_and_get_sampling_client()
        return self._wait(future, "save_weights_and_get_sampling_client")

    def save_state(self, name: str) -> Awaitable[tinker.types.SaveWeightsResponse]:
        return self._save(name)

    def _wait(self, future: Awaitable[T], what: str) -> Waited[T]:
        return Waited(self._patience, future, what)

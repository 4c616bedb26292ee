"""`EmbeddedTrainingClient`: Tinker's TrainingClient over one model of the embedded engine.

Every call runs on the engine's thread in the order in which it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import tinker
from tinker import APIFuture
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from tinkerscript.engine.checkpoint import load_optimizer_state, load_weights, save_checkpoint
from tinkerscript.engine.context import EngineContext
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient, freeze
from tinkerscript.engine.training import Trainer
from tinkerscript.errors import EngineRequestError


class EmbeddedTrainingClient:
    """Trains the weights of `trainer`, which are its own."""

    def __init__(self, host: EngineContext, trainer: Trainer, checkpoint_dir: Path) -> None:
        self._host = host
        self._trainer = trainer
        self._checkpoint_dir = checkpoint_dir

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """The loss and log probabilities without gradients."""
        return self._run(data, loss_fn, loss_fn_config, backward=False)

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """Accumulate gradients of the loss, a sum over tokens."""
        return self._run(data, loss_fn, loss_fn_config, backward=True)

    def _run(
        self,
        data: list[tinker.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        return AwaitableConcurrentFuture(
            self._host.thread.call_in_slices(
                lambda: self._trainer.slices(data, loss_fn, config, backward=backward)
            )
        )

    def optim_step(self, optim_params: tinker.AdamParams) -> APIFuture[tinker.types.OptimStepResponse]:
        """One AdamW step over what was accumulated; none if a part of it failed (`Trainer.optim_step`)."""
        return AwaitableConcurrentFuture(
            self._host.thread.call(lambda: self._trainer.optim_step(optim_params))
        )

    def save_state(self, name: str) -> APIFuture[tinker.types.SaveWeightsResponse]:
        """Write weights and optimizer state under `name`; the response has the folder's path."""
        target = self._checkpoint_dir / name

        def job() -> tinker.types.SaveWeightsResponse:
            if not name or Path(name).name != name:
                raise EngineRequestError(f"checkpoint name {name!r} must be a plain file name")
            self._save(target, optimizer=True, notes={})
            return tinker.types.SaveWeightsResponse(path=str(target))

        return AwaitableConcurrentFuture(self._host.thread.call(job))

    def save_to(self, target: Path, *, optimizer: bool, notes: Mapping[str, str]) -> Future[None]:
        """Write a checkpoint folder; `notes` are small text files in it, by name."""
        return self._host.thread.call(lambda: self._save(target, optimizer=optimizer, notes=notes))

    def _save(self, target: Path, *, optimizer: bool, notes: Mapping[str, str]) -> None:
        state = self._trainer.optimizer_state() if optimizer else None
        save_checkpoint(self._trainer.model, self._host.folder, target, optimizer=state, notes=notes)

    def load_state(self, path: str | Path) -> APIFuture[None]:
        """Take the weights of a checkpoint; the optimizer starts anew."""
        return AwaitableConcurrentFuture(
            self._host.thread.call(lambda: self._load(Path(path), optimizer=False))
        )

    def load_state_with_optimizer(self, path: str | Path) -> APIFuture[None]:
        """Take the weights and the optimizer state of a checkpoint.

        Raises EngineRequestError, and changes nothing, for a checkpoint without optimizer state.
        """
        return AwaitableConcurrentFuture(
            self._host.thread.call(lambda: self._load(Path(path), optimizer=True))
        )

    def _load(self, folder: Path, *, optimizer: bool) -> None:
        state = load_optimizer_state(folder) if optimizer else None
        load_weights(self._trainer.model, folder)
        self._trainer.reset_optimizer()
        if state is not None:
            self._trainer.load_optimizer_state(state)

    def save_weights_and_get_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        """A sampling client over a copy of the weights as of now."""
        return AwaitableConcurrentFuture(
            self._host.thread.call(lambda: freeze(self._host, self._trainer.model))
        )

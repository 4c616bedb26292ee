"""`EmbeddedTrainingClient`: Tinker's TrainingClient over one set of weights of the embedded engine.

Invariant: calls take effect on the engine's thread, in the order in which they were made.
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
    """Trains the weights of `trainer`.

    Takes and returns the `tinker` package's own types; futures can be awaited or asked for `.result()`, and
    carry the errors. A datum has `model_input`, ids [T], and `loss_fn_inputs`, each [T], which the loss
    names: `loss_fn` is a name of `losses.LOSSES`, or `module:name` of a loss of your own.
    """

    def __init__(self, context: EngineContext, trainer: Trainer, checkpoint_dir: Path) -> None:
        self._context = context
        self._trainer = trainer
        self._checkpoint_dir = checkpoint_dir

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """`forward_backward` without gradients."""
        return self._run(data, loss_fn, loss_fn_config, backward=False)

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """Accumulate the gradients of the loss, a sum over the tokens of `data`.

        The result has `logprobs` float32 [T] per datum, of its target tokens, and the metric `loss:sum`.
        Raises EngineRequestError, with nothing changed, for data or a loss that cannot be used.
        """
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
            self._context.thread.call_in_slices(
                lambda: self._trainer.slices(data, loss_fn, config, backward=backward)
            )
        )

    def optim_step(self, optim_params: tinker.AdamParams) -> APIFuture[tinker.types.OptimStepResponse]:
        """One AdamW step on the accumulated gradients, which are then cleared; the metric is `grad_norm`.

        Raises EngineError, and takes no step, if a `forward_backward` failed midway since the last step, or
        if the gradient is not finite.
        """
        return self._context.run(lambda: self._trainer.optim_step(optim_params))

    def save_state(self, name: str) -> APIFuture[tinker.types.SaveWeightsResponse]:
        """Write weights and optimizer state to a folder `name` in the checkpoint folder; returns its path."""
        target = self._checkpoint_dir / name

        def job() -> tinker.types.SaveWeightsResponse:
            if not name or Path(name).name != name:
                raise EngineRequestError(f"checkpoint name {name!r} must be a plain file name")
            self._save(target, optimizer=True, notes={})
            return tinker.types.SaveWeightsResponse(path=str(target))

        return self._context.run(job)

    def save_to(self, target: Path, *, optimizer: bool, notes: Mapping[str, str]) -> Future[None]:
        """Write a checkpoint to `target`; `notes` are small text files to put in it, by name."""
        return self._context.thread.call(lambda: self._save(target, optimizer=optimizer, notes=notes))

    def _save(self, target: Path, *, optimizer: bool, notes: Mapping[str, str]) -> None:
        state = self._trainer.optimizer_state() if optimizer else None
        save_checkpoint(self._trainer.model, self._context.folder, target, optimizer=state, notes=notes)

    def load_state(self, path: str | Path) -> APIFuture[None]:
        """Load the weights of a checkpoint; the optimizer starts fresh. Raises EngineError."""
        return self._context.run(lambda: self._load(Path(path), optimizer=False))

    def load_state_with_optimizer(self, path: str | Path) -> APIFuture[None]:
        """Load the weights and the optimizer state of a checkpoint.

        Raises EngineRequestError, with nothing changed, for a checkpoint without optimizer state.
        """
        return self._context.run(lambda: self._load(Path(path), optimizer=True))

    def _load(self, folder: Path, *, optimizer: bool) -> None:
        state = load_optimizer_state(folder) if optimizer else None
        load_weights(self._trainer.model, folder)
        self._trainer.reset_optimizer()
        if state is not None:
            self._trainer.load_optimizer_state(state)

    def save_weights_and_get_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        """A sampling client over a copy of the weights as they are now."""
        return self._context.run(lambda: freeze(self._context, self._trainer.model))

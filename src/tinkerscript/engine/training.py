"""`Trainer`: a trainable model with its gradients and optimizer. `EmbeddedTrainingClient`: Tinker's
TrainingClient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tinker
import torch
from tinker import APIFuture
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from tinkerscript.engine.context import EngineContext, exact_context
from tinkerscript.engine.decoder import Decoder, HubDecoder, text_config_of
from tinkerscript.engine.image_features import IdsWithImages, ImageFeatures, ImageReader
from tinkerscript.engine.losses import (
    CANDIDATE_LOGPROBS,
    CANDIDATES,
    CHOSEN_EXPERTS,
    ENTROPY,
    MASK,
    OPTIONAL_INPUTS,
    SEQUENCE,
    SKIPPED_STEPS,
    TEACHER,
    TEMPERATURES,
    ConfiguredLoss,
    resolve_loss,
    target_logprobs,
)
from tinkerscript.engine.packing import (
    Packed,
    TokenTree,
    chain,
    microbatches,
    pack,
    pair_cost,
    takes_segments,
    token_trees,
)
from tinkerscript.engine.routing import Routing
from tinkerscript.engine.sampling_client import EmbeddedSamplingClient, freeze
from tinkerscript.engine.weights import load_optimizer_state, load_same_model, save_checkpoint
from tinkerscript.errors import EngineError, EngineRequestError

MICROBATCH_TOKENS = 4096

MICROBATCH_TOKENS_OF_DEVICES = 16_384


def tokens_of_microbatch(device: torch.device) -> int:
    """A longer sequence is a microbatch by itself."""
    return MICROBATCH_TOKENS if device.type == "cpu" else MICROBATCH_TOKENS_OF_DEVICES


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    index: int
    ids: np.ndarray
    """int64 [T]"""

    inputs: dict[str, np.ndarray]
    """[T] each, with `MASK` and `TEMPERATURES`"""

    experts: np.ndarray | None = None
    """uint8 [T, bytes]: experts to choose."""

    images: Sequence[ImageFeatures] = ()
    """Held while `ids` stand for them."""


class Weights(ABC):
    """A whole model's weights, or a LoRA adapter's over a shared base."""

    model: PreTrainedModel
    parameters: list[Parameter]

    @abstractmethod
    def activate(self) -> None:
        pass

    @abstractmethod
    def decoder(self) -> Decoder:
        """Return a decoder of the current weights, unaffected by later training."""

    @abstractmethod
    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: of the files, for a sampler that rounds to it."""

    @abstractmethod
    def read(self, folder: Path) -> None:
        """Load a checkpoint. Raises EngineError for another model or kind."""


class AllWeights(Weights):
    def __init__(
        self, model: PreTrainedModel, make_decoder: Callable[[PreTrainedModel], Decoder] = HubDecoder
    ) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self._make_decoder = make_decoder

    def activate(self) -> None:
        pass

    def decoder(self) -> Decoder:
        return self._make_decoder(self.model)

    def write(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        made: dict[int, torch.Tensor] = {}  # Tied tensors stay tied.
        state = {
            name: made.setdefault(value.data_ptr(), value.to(dtype) if value.is_floating_point() else value)
            for name, value in self.model.state_dict().items()
        }
        self.model.save_pretrained(folder, state_dict=state)

    def read(self, folder: Path) -> None:
        other = load_same_model(self.model, folder)
        self.model.load_state_dict(other.state_dict())


class Trainer:
    """Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        weights: Weights,
        *,
        microbatch_tokens: int | None = None,
        share_prefixes: bool = False,
        compute_dtype: torch.dtype = torch.float32,
        routing: Routing | None = None,
        top: int = 0,
        images: ImageReader | None = None,
    ) -> None:
        """`share_prefixes`: only if `packing.shares_prefixes` proved the model. `compute_dtype`: of matrix
        products (torch's autocast); weights and moments stay float32. `routing`: replays `CHOSEN_EXPERTS`.
        `top`: how many of the most probable tokens to return. `images`: None refuses images.
        """
        self.weights = weights
        self.model = model = weights.model
        self._microbatch_tokens = microbatch_tokens or tokens_of_microbatch(model.device)
        self._pair_cost = pair_cost(model) if share_prefixes else None
        self._segments = takes_segments(model)
        self._compute_dtype, self._top = compute_dtype, top
        self._routing = routing
        self._images = images
        self._max_context = exact_context(model.config)
        self.reset_optimizer()

    def forward_backward(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> tinker.ForwardBackwardOutput:
        return run_to_end(self.slices(data, loss_fn, config, backward=backward, entropies=not backward))

    def slices(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        backward: bool,
        entropies: bool = True,
    ) -> Generator[None, None, tinker.ForwardBackwardOutput]:
        """Accumulate the gradients of the summed loss, or without `backward` compute it. Yields after
        microbatches.

        Returns per datum `logprobs` and, if wanted, `entropies` float32 [T] in nats, and the metric
        `loss:sum`. Raises EngineRequestError, with nothing changed, for data that cannot train. A later
        failure clears all gradients and fails the next `optim_step`, which may already be queued.
        """
        loss = resolve_loss(loss_fn)
        losses_of = loss.configured(loss_fn, config)
        examples = [self._check(i, datum, loss_fn, loss.inputs) for i, datum in enumerate(data)]
        try:
            named = loss_fn, config
            return (yield from self._pass(examples, losses_of, named, backward=backward, entropies=entropies))
        except BaseException as error:
            if backward:
                self._failure = f"{type(error).__name__}: {error}"
                self._drop_gradients()
            raise

    def _pass(
        self,
        examples: list[Example],
        losses_of: ConfiguredLoss,
        named: tuple[str, Mapping[str, float | str] | None],
        *,
        backward: bool,
        entropies: bool,
    ) -> Generator[None, None, tinker.ForwardBackwardOutput]:
        del named
        rows = self._rows(examples, self._microbatch_tokens)
        batches = microbatches(rows, self._microbatch_tokens, segments=self._segments)
        outputs, loss_sum = yield from self._compute(
            examples, batches, losses_of, backward=backward, entropies=entropies
        )
        return self._output(outputs, loss_sum)

    def _compute(
        self,
        examples: list[Example],
        batches: list[list[TokenTree]],
        losses_of: ConfiguredLoss,
        *,
        backward: bool,
        entropies: bool,
    ) -> Generator[None, None, tuple[list[np.ndarray], float]]:
        """Return each example's logprobs float32 [T], with entropies [2, T], and the loss."""
        outputs: list[np.ndarray] = [np.empty(0, np.float32)] * len(examples)
        loss_sum = 0.0
        for batch in batches:
            packed = pack(batch, self.model, segments=self._segments)
            self.weights.activate()  # Sampling may have run in between.
            with self._replayed(packed):
                with torch.set_grad_enabled(backward):
                    logprobs, loss = self._loss(packed, examples, losses_of, entropies=entropies)
                if backward:
                    self._backward(loss)
            loss_sum += float(loss.detach())
            lengths = [length for _, length in packed.sequences]
            parts = logprobs.detach().float().cpu().split(lengths, dim=-1)
            for (index, _), part in zip(packed.sequences, parts, strict=True):
                outputs[index] = part.numpy()
            yield
        return outputs, loss_sum

    def _replayed(self, packed: Packed) -> AbstractContextManager[None]:
        if self._routing is None or packed.experts is None:
            return nullcontext()
        ids = torch.from_numpy(self._routing.unpacked(packed.experts)).to(self.model.device)
        return self._routing.replayed(self.model, ids)

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    @staticmethod
    def _output(outputs: list[np.ndarray], loss_sum: float) -> tinker.ForwardBackwardOutput:
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[
                {name: tinker.TensorData.from_numpy(row) for name, row in _named(np.atleast_2d(rows))}
                for rows in outputs
            ],
            metrics={"loss:sum": loss_sum},
        )

    def _check(self, index: int, datum: tinker.Datum, loss_fn: str, expected: frozenset[str]) -> Example:
        ids = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
        given = frozenset[str](datum.loss_fn_inputs)
        if given - OPTIONAL_INPUTS != expected - OPTIONAL_INPUTS:
            raise EngineRequestError(
                f"datum {index}: {loss_fn} needs loss_fn_inputs {sorted(expected)}, got {sorted(given)}"
            )
        inputs = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
        experts = self._experts(f"datum {index}", len(ids), inputs.pop(CHOSEN_EXPERTS, None))
        self._check_forms(f"datum {index}", ids, inputs)
        weights = inputs.get(MASK, inputs.get("advantages", inputs.get("weights", np.ones(len(ids)))))
        inputs[MASK] = weights != 0
        temperatures = inputs.setdefault(TEMPERATURES, np.ones(len(ids), np.float32))
        if not (temperatures > 0).all():
            raise EngineRequestError(
                f"datum {index}: loss_fn_inputs.temperatures must be above 0, as logits are divided by them; "
                f"got {float(temperatures.min())}"
            )
        vocabulary = text_config_of(self.model).vocab_size
        for name, tokens in (
            ("model_input", ids),
            *((name, inputs[name]) for name in ("target_tokens", CANDIDATES) if name in inputs),
        ):
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise EngineRequestError(f"datum {index}: {name} has ids outside [0, {vocabulary})")
        images: Sequence[ImageFeatures] = ()
        if isinstance(datum.model_input, IdsWithImages):
            if self._images is None:
                raise EngineRequestError(f"datum {index}: this trainer takes no images")
            read, images = self._images.read(ids.tolist(), datum.model_input.images)
            ids = np.asarray(read, np.int64)
        return Example(index, ids, inputs, experts, images)

    def _experts(self, where: str, length: int, given: np.ndarray | None) -> np.ndarray | None:
        routing = self._routing
        if given is None:
            return None if routing is None else routing.unknown(length)
        if routing is None:
            raise EngineRequestError(
                f"{where}: loss_fn_inputs.{CHOSEN_EXPERTS} cannot be replayed: engine.routing_replay is off"
            )
        width = -(-routing.token_bytes // 8)
        if given.shape != (length, width) or given.dtype != np.int64:
            raise EngineRequestError(
                f"{where}: loss_fn_inputs.{CHOSEN_EXPERTS} must be int64 of shape {[length, width]}, for "
                f"{routing.token_bytes} bytes per token; it is {given.dtype} of shape {list(given.shape)}"
            )
        rows = np.ascontiguousarray(given).view(np.uint8)[:, : routing.token_bytes]
        try:
            routing.unpacked(rows)
        except ValueError as error:
            raise EngineRequestError(f"{where}: {error}") from error
        return rows

    def _check_forms(self, where: str, ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
        """The last token is only a target, so the model reads T of T + 1."""
        if not 0 < len(ids) <= self._max_context:
            raise EngineRequestError(
                f"{where}: model_input has {len(ids)} tokens; the context holds {self._max_context}, "
                "and at least one is needed"
            )
        for name, value in inputs.items():
            shape = value.shape[:1] if name in (CANDIDATES, TEACHER) else value.shape
            if shape != ids.shape:
                raise EngineRequestError(
                    f"{where}: model_input has {len(ids)} tokens, so loss_fn_inputs.{name} must have "
                    f"shape [{len(ids)}]; it has shape {list(value.shape)}"
                )
        targets = inputs["target_tokens"]
        if targets.dtype.kind not in "iu":
            raise EngineRequestError(
                f"{where}: loss_fn_inputs.target_tokens must be integers; they are {targets.dtype}"
            )

    def _rows(self, examples: list[Example], budget: int) -> list[TokenTree]:
        if self._pair_cost is None:
            return [chain(example.index, example.ids, example.experts) for example in examples]
        experts = [example.experts for example in examples if example.experts is not None]
        return token_trees(
            [example.ids for example in examples],
            experts=experts or None,
            pair_cost=self._pair_cost,
            budget=budget,
            segments=self._segments,
        )

    def _loss(
        self, packed: Packed, examples: list[Example], losses_of: ConfiguredLoss, *, entropies: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the targets' logprobs (S,), or (2, S) with entropies, and the loss."""
        device = self.model.device
        members = [examples[index] for index, _ in packed.sequences]
        arrays = {name: np.concatenate([e.inputs[name] for e in members]) for name in members[0].inputs}
        temperatures = arrays.pop(TEMPERATURES).astype(np.float32, copy=False)
        places, targets = packed.places, arrays["target_tokens"]
        if (candidates := arrays.pop(CANDIDATES, None)) is not None:
            number = candidates.shape[1]
            targets = np.concatenate([targets, candidates.astype(np.int64).reshape(-1)])
            places = np.concatenate([places, places.repeat(number)])
            temperatures = np.concatenate([temperatures, temperatures.repeat(number)])
        inputs = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        lengths = torch.tensor([length for _, length in packed.sequences])
        inputs[SEQUENCE] = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
        with torch.autocast(device.type, self._compute_dtype, enabled=self._compute_dtype != torch.float32):
            found = target_logprobs(
                self.model,
                packed.inputs,
                places,
                torch.from_numpy(targets).to(device),
                temperatures=temperatures,
                with_entropies=entropies,
                entropy_gradients=losses_of.needs_entropy,
                top=self._top,
            )
        if candidates is not None:
            found, others = found.split([len(packed.places), candidates.size], -1)
            inputs[CANDIDATE_LOGPROBS] = (others if others.dim() == 1 else others[0]).view(candidates.shape)
        if found.dim() == 1:
            return found, losses_of(found, inputs).sum()
        if self._top:
            return found, losses_of(found[0], inputs).sum()
        logprobs, inputs[ENTROPY] = found
        return found, losses_of(logprobs, inputs).sum()

    def optim_step(self, params: tinker.AdamParams) -> tinker.OptimStepResponse:
        """Take one AdamW step and clear the gradients.

        Metrics: `grad_norm` before clipping, and `update_ratio`, the change's norm over the weights'. If the
        gradient is not finite, nothing changes and the only metric is `skipped_steps`. Raises EngineError
        after a failed backward pass.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            self._drop_gradients()
            raise EngineError(
                f"the step was not taken, because a forward_backward since the last step failed ({failure}); "
                "the gradients of the others are cleared too, so send all of them again"
            )
        norm = self._step(params)
        if not math.isfinite(norm):
            return tinker.types.OptimStepResponse(metrics={SKIPPED_STEPS: 1.0})
        metrics = {"grad_norm": norm, "update_ratio": self._update_ratio}
        return tinker.types.OptimStepResponse(metrics=metrics)

    def _step(self, params: tinker.AdamParams) -> float:
        """Returns the gradient's norm. Takes no step if that is not finite."""
        for group in self._optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        norm = self._clipped_norm(params.grad_clip_norm or float("inf"))
        if math.isfinite(norm):
            self._optimizer.step()
            update, weights = self._squares().sqrt().tolist()
            self._update_ratio = update / weights if weights else 0.0
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    @torch.no_grad()
    def _squares(self) -> Tensor:
        """float32 [2]: squared norms of the last change, and of the weights."""
        # From the optimizer's state, to save a copy of the weights.
        total = torch.zeros(2, device=self.model.device)
        (group,) = self._optimizer.param_groups
        rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
        for parameter in self.weights.parameters:
            weights = self._local(parameter)
            total[1] += weights.float().square().sum()
            if parameter.grad is None:
                continue
            state = self._optimizer.state[parameter]
            mean, square = self._local(state["exp_avg"]), self._local(state["exp_avg_sq"])
            done = float(state["step"])
            spread = (square / (1 - beta2**done)).sqrt_().add_(group["eps"])
            update = (mean / (1 - beta1**done)).div_(spread).mul_(rate)
            if decay:
                update.add_((weights + update) / (1 - rate * decay), alpha=rate * decay)
            total[0] += update.float().square_().sum()
        return total

    def _local(self, tensor: Tensor) -> Tensor:
        return tensor

    def _clipped_norm(self, limit: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.weights.parameters, limit, foreach=True))

    def optimizer_state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def load(self, folder: Path, *, optimizer: bool) -> None:
        state = load_optimizer_state(folder) if optimizer else None
        self.weights.read(folder)
        self.reset_optimizer()
        if state is not None:
            self.load_optimizer_state(state)

    def drop_gradients(self) -> None:
        self._drop_gradients()

    def reset_optimizer(self) -> None:
        self._failure: str | None = None
        self._update_ratio = 0.0
        self._drop_gradients()
        self._optimizer = torch.optim.AdamW(self.weights.parameters, lr=1e-4, weight_decay=0.0, foreach=True)

    def _drop_gradients(self) -> None:
        for parameter in self.weights.parameters:
            parameter.grad = None


def _named(rows: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """`rows` are (1, T), (2, T) with entropies, or (1 + 2 K, T) with the most probable tokens."""
    top = len(rows) // 2 if len(rows) > 2 else 0
    yield "logprobs", rows[0]
    if len(rows) == 2:
        yield "entropies", rows[1]
    if top:
        yield "top_logprobs", rows[1 : top + 1].T.copy()
        yield "top_ids", rows[top + 1 :].T.astype(np.int64)


def run_to_end(work: Generator[None, None, T]) -> T:
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


class EmbeddedTrainingClient:
    """Trains the weights of `trainer`. Futures can be awaited or asked for `.result()`, and carry errors.

    A datum has ids [T] as `model_input`, and the loss's `loss_fn_inputs`, each [T], such as `target_tokens`
    int64, `logprobs` and `advantages` float32. `loss_fn` is in `losses.LOSSES`, or `module:name` of a user's
    loss.
    """

    def __init__(
        self,
        context: EngineContext,
        trainer: Trainer,
        checkpoint_dir: Path,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self._notes = notes or {}
        self._context = context
        self._trainer = trainer
        self._checkpoint_dir = checkpoint_dir

    def forward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        return self._run(data, loss_fn, loss_fn_config, backward=False)

    def forward_backward(
        self,
        data: list[tinker.Datum],
        loss_fn: tinker.types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
        *,
        entropies: bool = False,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        """See `Trainer.slices`."""
        return self._run(data, loss_fn, loss_fn_config, backward=True, entropies=entropies)

    def drop_gradients(self) -> APIFuture[None]:
        return self._context.run(self._trainer.drop_gradients)

    def _run(
        self,
        data: list[tinker.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        backward: bool,
        entropies: bool = True,
    ) -> APIFuture[tinker.ForwardBackwardOutput]:
        return AwaitableConcurrentFuture(
            self._context.thread.call_in_slices(
                lambda: self._trainer.slices(data, loss_fn, config, backward=backward, entropies=entropies)
            )
        )

    def optim_step(self, optim_params: tinker.AdamParams) -> APIFuture[tinker.types.OptimStepResponse]:
        """See `Trainer.optim_step`."""
        return self._context.run(lambda: self._trainer.optim_step(optim_params))

    def save_state(self, name: str) -> APIFuture[tinker.types.SaveWeightsResponse]:
        target = self._checkpoint_dir / name

        def job() -> tinker.types.SaveWeightsResponse:
            if not name or Path(name).name != name:
                raise EngineRequestError(f"checkpoint name {name!r} must be a plain file name")
            self._save(target, optimizer=True, notes=self._notes)
            return tinker.types.SaveWeightsResponse(path=str(target))

        return self._context.run(job)

    def save_to(self, target: Path, *, optimizer: bool, notes: Mapping[str, str]) -> Future[None]:
        return self._context.thread.call(lambda: self._save(target, optimizer=optimizer, notes=notes))

    def _save(self, target: Path, *, optimizer: bool, notes: Mapping[str, str]) -> None:
        state = self._trainer.optimizer_state() if optimizer else None
        save_checkpoint(
            self._trainer.weights.write, self._context.folder, target, optimizer=state, notes=notes
        )

    def load_state(self, path: str | Path) -> APIFuture[None]:
        return self._context.run(lambda: self._trainer.load(Path(path), optimizer=False))

    def load_state_with_optimizer(self, path: str | Path) -> APIFuture[None]:
        """Raises EngineRequestError, with nothing changed, without an optimizer state."""
        return self._context.run(lambda: self._trainer.load(Path(path), optimizer=True))

    def save_weights_and_get_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        return self._context.run(lambda: freeze(self._context, self._trainer.weights.decoder))

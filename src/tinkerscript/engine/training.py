"""Gradients and the optimizer: `Trainer` owns the trainable model.

Sequences that begin alike share their prefix, and rows of similar length make a microbatch within a token
budget. Losses are sums over tokens, so none of this changes the gradient.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkerscript.engine.context import exact_context
from tinkerscript.engine.losses import ConfiguredLoss, resolve_loss
from tinkerscript.engine.packing import (
    Packed,
    TokenTree,
    chain,
    microbatches,
    pack,
    packed_logits,
    pair_cost,
    target_logprobs,
    token_trees,
)
from tinkerscript.errors import EngineError, EngineRequestError

MICROBATCH_TOKENS = 4096
"""Padded tokens of one microbatch at most, on a processor; a longer sequence is one by itself."""

MICROBATCH_TOKENS_OF_DEVICES = 16_384
"""The same on a device with parallel units to fill."""


@dataclass(frozen=True, slots=True)
class Example:
    """One checked Datum: T positions."""

    index: int
    ids: np.ndarray
    """int64 [T]"""

    inputs: dict[str, np.ndarray]
    """loss_fn_inputs, each [T]"""


class Trainer:
    """Owns the model's gradients and optimizer. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        microbatch_tokens: int | None = None,
        share_prefixes: bool = False,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`share_prefixes` is for models that `packed.shares_prefixes` proved. With `compute_dtype`
        bfloat16, matrix products run in it (torch's autocast) over weights and moments in float32."""
        self.model = model
        on_cpu = model.device.type == "cpu"
        self._microbatch_tokens = microbatch_tokens or (
            MICROBATCH_TOKENS if on_cpu else MICROBATCH_TOKENS_OF_DEVICES
        )
        self._pair_cost = pair_cost(model) if share_prefixes else None
        self._compute_dtype = compute_dtype
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
        """`slices` in one piece."""
        work = self.slices(data, loss_fn, config, backward=backward)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return end.value

    def slices(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> Generator[None, None, tinker.ForwardBackwardOutput]:
        """Accumulate gradients of the summed loss; `backward=False` only computes it.

        Yields after every microbatch. Returns per datum `logprobs` float32 [T], and the metric `loss:sum`.
        Raises EngineRequestError for data that cannot train, before anything is computed: that changes
        nothing. A backward pass that fails later takes all gradients with it, since its own part of them is
        not known, and the next `optim_step` takes no step: it may have been asked for already.
        """
        loss = resolve_loss(loss_fn)
        losses_of = loss.configured(loss_fn, config)
        examples = [self._check(i, datum, loss_fn, loss.inputs) for i, datum in enumerate(data)]
        try:
            return (yield from self._pass(examples, losses_of, backward=backward))
        except BaseException as error:
            if backward:
                self._failure = f"{type(error).__name__}: {error}"
                self.model.zero_grad(set_to_none=True)
            raise

    def _pass(
        self, examples: list[Example], losses_of: ConfiguredLoss, *, backward: bool
    ) -> Generator[None, None, tinker.ForwardBackwardOutput]:
        outputs: list[np.ndarray] = [np.empty(0, np.float32)] * len(examples)
        loss_sum = 0.0
        for batch in microbatches(self._rows(examples), self._microbatch_tokens):
            packed = pack(batch, self.model.device, self.model.dtype)
            with torch.set_grad_enabled(backward):
                logprobs, loss = self._loss(packed, examples, losses_of)
            if backward:
                loss.backward()
            loss_sum += float(loss.detach())
            parts = logprobs.detach().float().cpu().split([length for _, length in packed.sequences])
            for (index, _), part in zip(packed.sequences, parts, strict=True):
                outputs[index] = part.numpy()
            yield
        return tinker.ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=[{"logprobs": tinker.TensorData.from_numpy(row)} for row in outputs],
            metrics={"loss:sum": loss_sum},
        )

    def _check(self, index: int, datum: tinker.Datum, loss_fn: str, expected: frozenset[str]) -> Example:
        ids = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
        given = frozenset[str](datum.loss_fn_inputs)
        if given != expected:
            raise EngineRequestError(
                f"datum {index}: {loss_fn} needs loss_fn_inputs {sorted(expected)}, got {sorted(given)}"
            )
        inputs = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
        self._check_forms(f"datum {index}", ids, inputs)
        vocabulary = int(self.model.config.vocab_size)
        for name, tokens in (("model_input", ids), ("target_tokens", inputs["target_tokens"])):
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise EngineRequestError(f"datum {index}: {name} has ids outside [0, {vocabulary})")
        return Example(index, ids, inputs)

    def _check_forms(self, where: str, ids: np.ndarray, inputs: Mapping[str, np.ndarray]) -> None:
        """Lengths, shapes and types. A text's last token is only a target: the model reads T of T + 1."""
        if not 0 < len(ids) <= self._max_context:
            raise EngineRequestError(
                f"{where}: model_input has {len(ids)} tokens; the context holds {self._max_context}, "
                "and at least one is needed"
            )
        for name, value in inputs.items():
            if value.shape != ids.shape:
                raise EngineRequestError(
                    f"{where}: model_input has {len(ids)} tokens, so loss_fn_inputs.{name} must have "
                    f"shape [{len(ids)}]; it has shape {list(value.shape)}"
                )
        targets = inputs["target_tokens"]
        if targets.dtype.kind not in "iu":
            raise EngineRequestError(
                f"{where}: loss_fn_inputs.target_tokens must be integers; they are {targets.dtype}"
            )

    def _rows(self, examples: list[Example]) -> list[TokenTree]:
        if self._pair_cost is None:
            return [chain(example.index, example.ids) for example in examples]
        return token_trees(
            [example.ids for example in examples], pair_cost=self._pair_cost, budget=self._microbatch_tokens
        )

    def _loss(
        self, packed: Packed, examples: list[Example], losses_of: ConfiguredLoss
    ) -> tuple[Tensor, Tensor]:
        """Log probabilities of the targets (S,) and the summed loss of one microbatch."""
        device = self.model.device
        members = [examples[index] for index, _ in packed.sequences]
        inputs = {
            name: torch.from_numpy(np.concatenate([e.inputs[name] for e in members])).to(device)
            for name in members[0].inputs
        }
        with torch.autocast(device.type, self._compute_dtype, enabled=self._compute_dtype != torch.float32):
            logits = packed_logits(self.model, packed)
        logprobs = target_logprobs(logits, packed, inputs["target_tokens"])
        return logprobs, losses_of(logprobs, inputs).sum()

    def optim_step(self, params: tinker.AdamParams) -> tinker.OptimStepResponse:
        """One AdamW step; gradients are cleared. The metric `grad_norm` is before clipping.

        Raises EngineError, and takes no step, after a backward pass that failed since the last step, and for
        a gradient that is not finite.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            self.model.zero_grad(set_to_none=True)
            raise EngineError(
                f"the step was not taken: a forward_backward since the last step failed ({failure}), and the "
                "gradients of the others are cleared; send them all again"
            )
        for group in self._optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        limit = params.grad_clip_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit, foreach=True)
        if not torch.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise EngineError(f"the gradient norm is {float(norm)}; the step was not taken")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return tinker.types.OptimStepResponse(metrics={"grad_norm": float(norm)})

    def optimizer_state(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def reset_optimizer(self) -> None:
        """Forget moments, gradients and that a pass failed."""
        self._failure: str | None = None
        self.model.zero_grad(set_to_none=True)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, foreach=True)

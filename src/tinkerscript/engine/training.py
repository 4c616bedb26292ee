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

from tinkerscript.engine.losses import REQUIRED_INPUTS, LossSettings, loss_settings, token_losses
from tinkerscript.engine.packed import Packed, pack, packed_logits, pair_cost, target_logprobs
from tinkerscript.engine.prefix_tree import TokenTree, chain, microbatches, token_trees
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
        """
        settings = loss_settings(loss_fn, config)
        examples = [self._check(i, datum, loss_fn) for i, datum in enumerate(data)]
        outputs: list[np.ndarray] = [np.empty(0, np.float32)] * len(examples)
        loss_sum = 0.0
        for batch in microbatches(self._rows(examples), self._microbatch_tokens):
            packed = pack(batch, self.model.device, self.model.dtype)
            with torch.set_grad_enabled(backward):
                logprobs, loss = self._loss(packed, examples, settings)
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

    def _check(self, index: int, datum: tinker.Datum, loss_fn: str) -> Example:
        ids = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
        expected, given = set(REQUIRED_INPUTS[loss_fn]), set[str](datum.loss_fn_inputs)
        if given != expected:
            raise EngineRequestError(
                f"datum {index}: {loss_fn} needs loss_fn_inputs {sorted(expected)}, got {sorted(given)}"
            )
        inputs = {key: value.to_numpy() for key, value in datum.loss_fn_inputs.items()}
        lengths = {key: len(value) for key, value in inputs.items() if len(value) != len(ids)}
        if lengths or not len(ids):
            raise EngineRequestError(
                f"datum {index}: model_input has {len(ids)} tokens, loss_fn_inputs have {lengths}"
            )
        vocabulary = int(self.model.config.vocab_size)
        for name, tokens in (("model_input", ids), ("target_tokens", inputs["target_tokens"])):
            if tokens.min() < 0 or tokens.max() >= vocabulary:
                raise EngineRequestError(f"datum {index}: {name} has ids outside [0, {vocabulary})")
        return Example(index, ids, inputs)

    def _rows(self, examples: list[Example]) -> list[TokenTree]:
        if self._pair_cost is None:
            return [chain(example.index, example.ids) for example in examples]
        return token_trees(
            [example.ids for example in examples], pair_cost=self._pair_cost, budget=self._microbatch_tokens
        )

    def _loss(self, packed: Packed, examples: list[Example], settings: LossSettings) -> tuple[Tensor, Tensor]:
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
        return logprobs, token_losses(settings, logprobs, inputs).sum()

    def optim_step(self, params: tinker.AdamParams) -> tinker.OptimStepResponse:
        """One AdamW step; gradients are cleared. The metric `grad_norm` is before clipping."""
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
        """Forget moments and gradients."""
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, foreach=True)

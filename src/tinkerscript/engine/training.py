"""Gradients and the optimizer: `Trainer` owns the trainable model.

Batches are split into microbatches by a token budget; losses are sums over tokens, so the split does not
change the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tinkerscript.engine.losses import REQUIRED_INPUTS, LossSettings, loss_settings, token_losses
from tinkerscript.errors import EngineError, EngineRequestError

MICROBATCH_TOKENS = 8192
"""Padded tokens of one microbatch at most; a longer sequence is one by itself."""


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

    def __init__(self, model: PreTrainedModel, *, microbatch_tokens: int = MICROBATCH_TOKENS) -> None:
        self.model = model
        self._microbatch_tokens = microbatch_tokens
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, foreach=True)

    def forward_backward(
        self,
        data: Sequence[tinker.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        *,
        backward: bool,
    ) -> tinker.ForwardBackwardOutput:
        """Accumulate gradients of the summed loss; `backward=False` only computes it.

        Returns per datum `logprobs` float32 [T], and the metric `loss:sum`.
        """
        settings = loss_settings(loss_fn, config)
        examples = [self._check(i, datum, loss_fn) for i, datum in enumerate(data)]
        outputs: list[np.ndarray] = [np.empty(0, np.float32)] * len(examples)
        loss_sum = 0.0
        for batch in _microbatches(examples, self._microbatch_tokens):
            with torch.set_grad_enabled(backward):
                logprobs, loss = self._loss(batch, settings)
            if backward:
                loss.backward()
            loss_sum += float(loss.detach())
            for row, example in zip(logprobs.detach().cpu().numpy(), batch, strict=True):
                outputs[example.index] = row[: len(example.ids)].astype(np.float32)
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

    def _loss(self, batch: list[Example], settings: LossSettings) -> tuple[Tensor, Tensor]:
        """Log probabilities of the targets (B, T) and the summed loss of one microbatch."""
        device = self.model.device
        ids = _padded([e.ids for e in batch]).to(device)
        inputs = {name: _padded([e.inputs[name] for e in batch]).to(device) for name in batch[0].inputs}
        # Right padding: causal attention keeps real positions from seeing the padding.
        output: Any = self.model(input_ids=ids, use_cache=False)
        logprobs = torch.log_softmax(output.logits.float(), dim=-1)
        logprobs = logprobs.gather(-1, inputs["target_tokens"][..., None])[..., 0]
        losses = token_losses(settings, logprobs, inputs)
        present = _padded([np.ones(len(e.ids), np.float32) for e in batch]).to(device)
        return logprobs, (losses * present).sum()

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


def _microbatches(examples: list[Example], budget: int) -> list[list[Example]]:
    """Examples of similar length together, each batch at most `budget` padded tokens."""
    batches: list[list[Example]] = []
    for example in sorted(examples, key=lambda e: len(e.ids)):
        # Sorted by length: the newest example is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * len(example.ids) <= budget:
            batches[-1].append(example)
        else:
            batches.append([example])
    return batches


def _padded(arrays: list[np.ndarray]) -> Tensor:
    """Right-padded with zeros: B arrays [T_b] -> (B, max T)."""
    width = max(len(a) for a in arrays)
    out = np.zeros((len(arrays), width), dtype=arrays[0].dtype)
    for row, array in zip(out, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(out)

"""`EmbeddedEngine`: one model on one thread of this process, with the methods of Tinker's clients.

It takes and returns Tinker's own types. A sampling client holds its own copy of the weights, so what
was sampled under a policy version stays under it while training goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import APIFuture
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tinkerscript.engine.batch import Report, Request, RunningBatch, SampledRow
from tinkerscript.engine.checkpoint import (
    load_model,
    load_optimizer_state,
    load_weights,
    save_checkpoint,
)
from tinkerscript.engine.constraints import Grammars
from tinkerscript.engine.decoder import Decoder, decoder_for
from tinkerscript.engine.training import Trainer
from tinkerscript.engine.worker_thread import EngineThread
from tinkerscript.errors import EngineError


class EmbeddedEngine:
    """Loads a Hugging Face causal model from `folder` and serves one training run.

    Checkpoints go to `checkpoint_dir`. `threads` are torch's threads of this process. Use as a context
    manager, or call `close()`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        checkpoint_dir: Path,
        seed: int = 0,
        threads: int = 1,
        max_batch: int = 128,
        device: str = "cpu",
    ) -> None:
        torch.set_num_threads(threads)
        self.folder = folder
        self.checkpoint_dir = checkpoint_dir
        self._model = load_model(folder, device=device)
        self._make_decoder = decoder_for(self._model)
        self._max_batch = max_batch
        self._random = np.random.default_rng(seed)
        self._tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config: Any = self._model.config
        self.max_context: int = config.max_position_embeddings
        """Tokens of prompt and response together, at most."""

        self.vocabulary: int = config.vocab_size
        self.eos_ids: frozenset[int] = _eos_ids(self._model)
        self.grammars = Grammars(
            folder / "tokenizer.json", vocabulary=self.vocabulary, end_id=min(self.eos_ids, default=0)
        )
        """Constraints over this model's vocabulary."""

        self.thread = EngineThread()
        self._trainer = Trainer(self._model)

    def __enter__(self) -> EmbeddedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Fail what is unfinished and end the engine's thread."""
        self.thread.close()

    def create_training_client(self) -> EmbeddedTrainingClient:
        return EmbeddedTrainingClient(self, self._trainer)

    def create_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        """A client that samples from the weights as they are when the engine gets to it."""
        return AwaitableConcurrentFuture(self.thread.call(self._freeze))

    def _freeze(self) -> EmbeddedSamplingClient:
        with torch.no_grad():
            decoder = self._make_decoder(self._model)
        batch = RunningBatch(
            decoder,
            max_rows=self._max_batch,
            max_length=self.max_context,
            decode=self._decode,
            random=self._random,
        )
        return EmbeddedSamplingClient(self, decoder, batch)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def save(self, name: str, *, optimizer: bool) -> Path:
        """Runs on the engine's thread: write a checkpoint folder and return it."""
        if not name or Path(name).name != name:
            raise EngineError(f"checkpoint name {name!r} must be a plain file name")
        target = self.checkpoint_dir / name
        state = self._trainer.optimizer_state() if optimizer else None
        save_checkpoint(self._model, self.folder, target, optimizer=state)
        return target

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Runs on the engine's thread: take the weights (and optimizer state) of a checkpoint."""
        load_weights(self._model, folder)
        self._trainer.reset_optimizer()
        if optimizer:
            self._trainer.load_optimizer_state(load_optimizer_state(folder))


class EmbeddedTrainingClient:
    """Tinker's TrainingClient over the embedded engine."""

    def __init__(self, engine: EmbeddedEngine, trainer: Trainer) -> None:
        self._engine = engine
        self._trainer = trainer

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
        def job() -> tinker.ForwardBackwardOutput:
            return self._trainer.forward_backward(data, loss_fn, config, backward=backward)

        return AwaitableConcurrentFuture(self._engine.thread.call(job))

    def optim_step(self, optim_params: tinker.AdamParams) -> APIFuture[tinker.types.OptimStepResponse]:
        """One AdamW step over what was accumulated."""
        return AwaitableConcurrentFuture(
            self._engine.thread.call(lambda: self._trainer.optim_step(optim_params))
        )

    def save_state(self, name: str) -> APIFuture[tinker.types.SaveWeightsResponse]:
        """Write weights and optimizer state under `name`; the response has the folder's path."""

        def job() -> tinker.types.SaveWeightsResponse:
            return tinker.types.SaveWeightsResponse(path=str(self._engine.save(name, optimizer=True)))

        return AwaitableConcurrentFuture(self._engine.thread.call(job))

    def load_state(self, path: str | Path) -> APIFuture[None]:
        """Take the weights of a checkpoint; the optimizer starts anew."""
        return AwaitableConcurrentFuture(
            self._engine.thread.call(lambda: self._engine.load(Path(path), optimizer=False))
        )

    def load_state_with_optimizer(self, path: str | Path) -> APIFuture[None]:
        """Take the weights and the optimizer state of a checkpoint."""
        return AwaitableConcurrentFuture(
            self._engine.thread.call(lambda: self._engine.load(Path(path), optimizer=True))
        )

    def save_weights_and_get_sampling_client(self) -> APIFuture[EmbeddedSamplingClient]:
        """A sampling client over a copy of the weights as of now."""
        return self._engine.create_sampling_client()


class EmbeddedSamplingClient:
    """Tinker's SamplingClient over the embedded engine: frozen weights, continuous batching.

    Log probabilities are of the distribution after temperature, before top-k and top-p.
    """

    def __init__(self, engine: EmbeddedEngine, decoder: Decoder, batch: RunningBatch) -> None:
        self._engine = engine
        self._decoder = decoder
        self._batch = batch
        self._names = itertools.count()

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> APIFuture[tinker.SampleResponse]:
        """Sample sequences; identical prompts that arrive together are prefilled once.

        Raises EngineError for a prompt that does not fit the context or settings out of range.
        """
        ids = prompt.to_ints()
        request = self._request(ids, num_samples, sampling_params)
        prompt_future = self._prompt_logprobs(ids) if include_prompt_logprobs else None
        response: Future[tinker.SampleResponse] = Future()
        response.add_done_callback(lambda f: request.future.cancel() if f.cancelled() else None)
        request.future.add_done_callback(lambda rows: self._respond(response, rows, prompt_future))
        self._engine.thread.sample(self._batch, request)
        return AwaitableConcurrentFuture(response)

    def sample_rows(
        self,
        ids: list[int],
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        *,
        stop_ids: Sequence[int] = (),
        report: Report | None = None,
        top_logprobs: int = 0,
        grammar: str | None = None,
    ) -> Future[list[SampledRow]]:
        """`sample`, with what Tinker's method does not have. Cancelling the future ends the sampling.

        `stop_ids` stop beside the stop strings; `report` is told of every token on the engine's thread;
        `top_logprobs` alternatives are told of each position; `grammar` says which tokens may come.
        Raises EngineError as `sample` does, GrammarError for a grammar that cannot be used.
        """
        request = self._request(ids, num_samples, sampling_params)
        request.stop_ids |= frozenset(stop_ids)
        request.report, request.top_logprobs = report, top_logprobs
        if grammar is not None:
            request.matchers = [self._engine.grammars.matcher(grammar) for _ in range(num_samples)]
        self._engine.thread.sample(self._batch, request)
        return request.future

    def compile_grammar(self, grammar: str) -> None:
        """Get `grammar` ready: `sample_rows` with it is quick then. Raises GrammarError."""
        self._engine.grammars.matcher(grammar)

    async def sample_async(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> tinker.SampleResponse:
        """`await sample(...)`, for code written for Tinker's older method."""
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

    def compute_logprobs(self, prompt: tinker.ModelInput) -> APIFuture[list[float | None]]:
        """Log probability of each prompt token given those before it; None for the first."""
        ids = self._checked_prompt(prompt.to_ints(), room=0)

        def job() -> list[float | None]:
            return [None, *self._score(ids)[1:].tolist()]

        return AwaitableConcurrentFuture(self._engine.thread.call(job))

    def _prompt_logprobs(self, ids: list[int]) -> Future[np.ndarray]:
        return self._engine.thread.call(lambda: self._score(ids))

    def _score(self, ids: list[int]) -> np.ndarray:
        """float32 [P], NaN at the first position."""
        tokens = torch.tensor([ids], device=self._decoder.device)
        with torch.inference_mode():
            logits = self._decoder.score(tokens)[0].float()
            picked = torch.log_softmax(logits[:-1], -1).gather(-1, tokens[0, 1:, None])[:, 0]
        return np.concatenate([[np.nan], picked.cpu().numpy()]).astype(np.float32)

    def _respond(
        self,
        response: Future[tinker.SampleResponse],
        rows: Future[list[SampledRow]],
        prompt: Future[np.ndarray] | None,
    ) -> None:
        if not response.set_running_or_notify_cancel():
            return
        error = rows.exception() or (prompt.exception() if prompt else None)
        if error is not None:
            response.set_exception(error)
            return
        sequences = [self._sequence(row) for row in rows.result()]
        logprobs = prompt.result() if prompt else None
        response.set_result(tinker.SampleResponse(sequences=sequences, prompt_logprobs_np=logprobs))

    def _sequence(self, row: SampledRow) -> tinker.types.SampledSequence:
        stop: tinker.types.StopReason = "stop" if row.stop_reason == "stop" else "length"
        return tinker.types.SampledSequence(
            stop_reason=stop,
            sequence_id=f"{id(self):x}-{next(self._names)}",
            tokens_np=np.asarray(row.ids, np.int32),
            logprobs_np=np.asarray(row.logprobs, np.float32),
        )

    def _checked_prompt(self, ids: list[int], *, room: int) -> list[int]:
        engine = self._engine
        if not ids:
            raise EngineError("the prompt is empty")
        if len(ids) + room > engine.max_context:
            raise EngineError(f"the prompt has {len(ids)} tokens; the context holds {engine.max_context}")
        if min(ids) < 0 or max(ids) >= engine.vocabulary:
            raise EngineError(f"the prompt has ids outside [0, {engine.vocabulary})")
        return ids

    def _request(self, ids: list[int], num_samples: int, params: tinker.SamplingParams) -> Request:
        self._checked_prompt(ids, room=1)
        if num_samples < 1:
            raise EngineError(f"num_samples must be at least 1, got {num_samples}")
        if params.temperature < 0 or not 0 < params.top_p <= 1:
            raise EngineError(
                f"temperature {params.temperature} must be >= 0 and top_p {params.top_p} in (0, 1]"
            )
        room = self._engine.max_context - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if max_tokens < 1:
            raise EngineError(f"max_tokens must be at least 1, got {params.max_tokens}")
        stop_ids, stop_strings = _stops(params.stop, self._engine.eos_ids)
        return Request(
            prompt=tuple(ids),
            num_samples=num_samples,
            max_tokens=max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            seed=params.seed,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
        )


def _stops(stop: Any, eos_ids: frozenset[int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Tinker's `stop`: None keeps the end-of-text ids, [] stops at nothing, else ids or strings."""
    if stop is None:
        return eos_ids, ()
    if isinstance(stop, str):
        return eos_ids, (stop,)
    ids = frozenset(item for item in stop if isinstance(item, int))
    strings = tuple(item for item in stop if isinstance(item, str) and item)
    return ids | eos_ids if strings else ids, strings


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """End-of-text ids from the generation config, else the model's own."""
    configured: Any = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = model.config.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)

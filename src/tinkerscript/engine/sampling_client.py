from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tinker
import torch
from numpy.typing import NDArray
from tinker import APIFuture
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from tinkerscript.engine.context import EngineContext
from tinkerscript.engine.decoder import Decoder
from tinkerscript.engine.image_features import Placed
from tinkerscript.engine.prefix_store import PrefixStore
from tinkerscript.engine.running_batch import Report, Request, RunningBatch, SampledRow
from tinkerscript.engine.sampling import PromptScores, score_prompt
from tinkerscript.errors import EngineRequestError


class EmbeddedSamplingClient:
    """Tinker's SamplingClient over frozen weights of the embedded engine, with continuous batching.

    Logprobs are float32, one per sampled id, from after temperature and before top-k and top-p.
    """

    def __init__(self, context: EngineContext, decoder: Decoder, prefixes: PrefixStore | None = None) -> None:
        self._context = context
        self._decoder = decoder
        self._prefixes = prefixes or PrefixStore(context.budget)
        self._batch = RunningBatch(
            decoder,
            max_rows=context.max_batch,
            max_length=context.max_context,
            decode=context.decode,
            random=context.random,
            budget=context.budget,
            prefixes=self._prefixes,
            images=context.images,
        )
        self._names = itertools.count()

    def apart(self) -> EmbeddedSamplingClient:
        """Return a client of the same weights that is `cut` separately."""
        return EmbeddedSamplingClient(self._context, self._decoder, self._prefixes)

    def sample(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> APIFuture[tinker.SampleResponse]:
        """Sequences have `tokens` [T], including the id that ended them, `logprobs` [T] and a `stop_reason`,
        "stop" or "length". `prompt_logprobs` are [P], NaN at 0. Raises EngineRequestError for a prompt
        without room, and settings out of range.
        """
        ids = prompt.to_ints()
        request = self._request(ids, num_samples, sampling_params)
        prompt_future = self._prompt_logprobs(ids) if include_prompt_logprobs else None
        response: Future[tinker.SampleResponse] = Future()
        response.add_done_callback(lambda f: request.future.cancel() if f.cancelled() else None)
        request.future.add_done_callback(lambda rows: self._respond_after(prompt_future, response, rows))
        self._context.thread.sample(self._batch, request)
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
        min_p: float = 0.0,
        sampled: int = 0,
        known: int = 0,
        images: Sequence[Placed] = (),
    ) -> Future[list[SampledRow]]:
        """`sample` with options that Tinker's method lacks (see also `Request`). To stop it, cancel the
        future.


        Raises EngineRequestError as `sample` does, and GrammarError.

        Args:
            stop_ids: Added to `sampling_params.stop`.
            top_logprobs: Alternatives per position.
            min_p: Share of the most probable token's probability.
        """
        if not 0 <= known <= len(ids):
            raise EngineRequestError(f"known must be 0 to {len(ids)}, the prompt's tokens, got {known}")
        request = self._request(ids, num_samples, sampling_params)
        request.images = images
        request.stop_ids |= frozenset(stop_ids)
        request.report, request.top_logprobs, request.min_p = report, top_logprobs, min_p
        request.sampled, request.known = sampled, known
        if grammar is not None:
            request.matchers = [self._context.grammars.matcher(grammar) for _ in range(num_samples)]
            for matcher in request.matchers:
                for token in ids[len(ids) - sampled :]:
                    matcher.take(token)
        self._context.thread.sample(self._batch, request)
        return request.future

    def cut(self) -> None:
        """End all current and future samples with `stop_reason` `cut`."""
        self._context.thread.cut(self._batch)

    def compile_grammar(self, grammar: str) -> None:
        self._context.grammars.matcher(grammar)

    async def sample_async(
        self,
        prompt: tinker.ModelInput,
        num_samples: int,
        sampling_params: tinker.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> tinker.SampleResponse:
        return await self.sample(prompt, num_samples, sampling_params, include_prompt_logprobs)

    def compute_logprobs(self, prompt: tinker.ModelInput) -> APIFuture[list[float | None]]:
        """Each prompt token's logprob given all before it, None for the first."""
        ids = self._context.checked_prompt(prompt.to_ints(), room=0)

        def job() -> list[float | None]:
            return [None, *score_prompt(self._decoder, ids).logprobs[1:].tolist()]

        return self._context.run(job)

    def score(
        self,
        prompt: tinker.ModelInput,
        *,
        last: int | None = None,
        top: int = 0,
        chosen: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> APIFuture[PromptScores]:
        ids = self._context.checked_prompt(prompt.to_ints(), room=0)
        return self._context.run(lambda: score_prompt(self._decoder, ids, last=last, top=top, chosen=chosen))

    def _prompt_logprobs(self, ids: list[int]) -> Future[NDArray[np.float32]]:
        return self._context.thread.call(lambda: score_prompt(self._decoder, ids).logprobs)

    def _respond_after(
        self,
        prompt: Future[NDArray[np.float32]] | None,
        response: Future[tinker.SampleResponse],
        rows: Future[list[SampledRow]],
    ) -> None:
        # Callbacks, because this is the engine's thread.
        if prompt is None:
            self._respond(response, rows, None)
        else:
            prompt.add_done_callback(lambda scored: self._respond(response, rows, scored))

    def _respond(
        self,
        response: Future[tinker.SampleResponse],
        rows: Future[list[SampledRow]],
        prompt: Future[NDArray[np.float32]] | None,
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

    def _request(self, ids: list[int], num_samples: int, params: tinker.SamplingParams) -> Request:
        self._context.checked_prompt(ids, room=1)
        if num_samples < 1:
            raise EngineRequestError(f"num_samples must be at least 1, got {num_samples}")
        if params.temperature < 0 or not 0 < params.top_p <= 1:
            raise EngineRequestError(
                f"temperature {params.temperature} must be >= 0 and top_p {params.top_p} in (0, 1]"
            )
        room = self._context.max_context - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if max_tokens < 1:
            raise EngineRequestError(f"max_tokens must be at least 1, got {params.max_tokens}")
        stop_ids, stop_strings = _stops(params.stop, self._context.eos_ids)
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
    """Tinker's `stop`: None means end-of-text ids, [] no stop, else ids or strings."""
    if stop is None:
        return eos_ids, ()
    if isinstance(stop, str):
        return eos_ids, (stop,)
    ids = frozenset(item for item in stop if isinstance(item, int))
    strings = tuple(item for item in stop if isinstance(item, str) and item)
    return ids | eos_ids if strings else ids, strings


def freeze(context: EngineContext, make_decoder: Callable[[], Decoder]) -> EmbeddedSamplingClient:
    """Call this on the engine's thread."""
    with torch.no_grad():
        return EmbeddedSamplingClient(context, make_decoder())

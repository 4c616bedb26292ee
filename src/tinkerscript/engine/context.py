"""`EngineContext`: what all clients of one engine share. `EngineThread`: the one thread that owns torch.

Jobs run in order. A long one yields to sampling after each slice, for as long as the slice took. Every future
resolves.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tinker import APIFuture
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture
from tokenizers import Tokenizer
from transformers import PreTrainedConfig, PreTrainedModel

from tinkerscript.engine.decoder import text_config_of
from tinkerscript.engine.grammars import Grammars
from tinkerscript.engine.image_features import ImageReader
from tinkerscript.engine.kv_cache import CacheBudget
from tinkerscript.engine.running_batch import Request, RunningBatch
from tinkerscript.errors import EngineError, EngineRequestError

LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")


LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16", "arm_bf16")
"""Processor features, named as in torch, with which bfloat16 is no slower than float32."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineContext:
    folder: Path
    thread: EngineThread
    decode: Callable[[list[int]], str]
    random: np.random.Generator
    max_batch: int
    max_context: int
    vocabulary: int
    eos_ids: frozenset[int]
    grammars: Grammars
    images: ImageReader

    budget: CacheBudget

    def run(self, job: Callable[[], T]) -> APIFuture[T]:
        return AwaitableConcurrentFuture(self.thread.call(job))

    def checked_prompt(self, ids: list[int], *, room: int) -> list[int]:
        if not ids:
            raise EngineRequestError("prompt: the prompt is empty")
        if len(ids) + room > self.max_context:
            raise EngineRequestError(
                f"prompt: the prompt has {len(ids)} tokens; the context holds {self.max_context}"
            )
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise EngineRequestError(f"prompt: the prompt has ids outside [0, {self.vocabulary})")
        return ids


def open_context(
    model: PreTrainedModel,
    folder: Path,
    *,
    seed: int,
    max_batch: int,
    budget: CacheBudget,
    max_context: int,
    images: ImageReader,
    thread: EngineThread | None = None,
) -> EngineContext:
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = text_config_of(model).vocab_size
    eos_ids = eos_ids_of(model)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    return EngineContext(
        folder=folder,
        decode=decode,
        random=np.random.default_rng(seed),
        max_batch=max_batch,
        max_context=max_context,
        vocabulary=vocabulary,
        eos_ids=eos_ids,
        budget=budget,
        images=images,
        grammars=Grammars(folder / "tokenizer.json", vocabulary=vocabulary, end_id=min(eos_ids, default=0)),
        # Last, because nothing could close it if a later step raised.
        thread=thread or EngineThread(),
    )


def exact_context(config: PreTrainedConfig) -> int:
    """Return the length up to which rotary embeddings stay the same, so that a decoder equals the model."""
    return min(_limits(config))[0]


def short_context(config: PreTrainedConfig) -> str | None:
    (own, _), *_ = limits = _limits(config)
    held, reason = min(limits)
    if 2 * held >= own:
        return None
    return (
        f"{config.model_type}: prompt and reply together hold {held:,} tokens here, of this model's {own:,}: "
        f"{reason}. For longer conversations choose a model with full attention in all layers, such as "
        "Qwen 3 or Llama"
    )


def _limits(config: PreTrainedConfig) -> list[tuple[int, str]]:
    settings: Any = config.get_text_config()
    lengths = [value for name in LENGTHS if isinstance(value := getattr(settings, name, None), int)]
    if not lengths:
        raise EngineError(f"the config of model type {config.model_type!r} has no context length")
    limits = [(lengths[0], "the model was made for this length")]
    rope: dict[str, Any] = getattr(settings, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        original = int(rope.get("original_max_position_embeddings") or lengths[0])
        limits.append((original, "beyond that, its rotary embedding changes with the length of the text"))
    return limits


def check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise EngineError(
            f"engine.device: {device!r} cannot be used with torch {torch.__version__} here: {reason}; "
            "'cpu' works everywhere"
        ) from error


def compute_dtype(name: str, device: str) -> torch.dtype:
    """`auto`: bfloat16 if `device` has it in hardware, else float32."""
    if name == "auto":
        return torch.bfloat16 if _has_bfloat16(torch.device(device)) else torch.float32
    if name not in DTYPES:
        raise EngineError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return device.type == "cpu" and any(capabilities.get(unit, False) for unit in BFLOAT16_UNITS)


def eos_ids_of(model: PreTrainedModel) -> frozenset[int]:
    configured: Any = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = text_config_of(model).eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)


Slices = Generator[None, None, T]


@dataclass(frozen=True, slots=True)
class Job:
    begin: Callable[[], Slices[Any]]
    future: Future[Any]


Sampling = tuple[RunningBatch, Request | None]
"""A batch and a request for it. None: cut the batch."""


class EngineThread:
    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Job | Sampling | None] = queue.SimpleQueue()
        self._jobs: deque[Job] = deque()
        self._running: tuple[Slices[Any], Future[Any]] | None = None
        self._batches: list[RunningBatch] = []
        self._ended = False
        self._closed = False
        # Nothing may follow the item that closes the engine.
        self._entrance = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tinkerscript-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        def whole() -> Slices[T]:
            return function()
            yield

        return self.call_in_slices(whole)

    def call_in_slices(self, begin: Callable[[], Slices[T]]) -> Future[T]:
        """Sampling runs whenever the generator yields; other jobs wait."""
        future: Future[T] = Future()
        self._put(Job(begin, future))
        return future

    def sample(self, batch: RunningBatch, request: Request) -> None:
        self._put((batch, request))

    def cut(self, batch: RunningBatch) -> None:
        """End the rows of `batch` between two tokens, ahead of queued jobs."""
        self._put((batch, None))

    def close(self) -> None:
        with self._entrance:
            if not self._closed:
                self._closed = True
                self._inbox.put(None)
        self._thread.join()

    def _put(self, item: Job | Sampling) -> None:
        with self._entrance:
            if self._closed:
                raise EngineError("the engine is closed")
            self._inbox.put(item)

    def _run(self) -> None:
        while not self._ended:
            self._receive(block=not (self._batches or self._jobs or self._running))
            began = time.monotonic()
            self._work()
            self._decode(time.monotonic() - began)
        self._fail_rest(EngineError("the engine is closed"))

    def _receive(self, *, block: bool) -> None:
        while not self._ended:
            try:
                item = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if item is None:
                self._ended = True
            elif isinstance(item, Job):
                self._jobs.append(item)
            else:
                self._join(*item)

    def _join(self, batch: RunningBatch, request: Request | None) -> None:
        if request is None:
            batch.cut()
            return
        batch.submit(request)
        if batch not in self._batches:
            self._batches.append(batch)

    def _work(self) -> None:
        while self._running is None and self._jobs and not self._ended:
            job = self._jobs.popleft()
            if job.future.set_running_or_notify_cancel():
                self._running = job.begin(), job.future
        if self._running is None or self._ended:
            return
        slices, future = self._running
        try:
            next(slices)
        except StopIteration as end:
            self._running = None
            future.set_result(end.value)
        except BaseException as error:  # noqa: BLE001 - the future carries it
            self._running = None
            future.set_exception(error)

    def _decode(self, seconds: float) -> None:
        until = time.monotonic() + (seconds if self._running or self._jobs else 0)
        while self._batches and not self._ended:
            for batch in list(self._batches):
                self._advance(batch)
            if time.monotonic() >= until:
                return
            self._receive(block=False)

    def _advance(self, batch: RunningBatch) -> None:
        try:
            batch.advance()
        except Exception as error:  # noqa: BLE001 - the futures carry it
            batch.fail(error)
        if not batch.busy:
            self._batches.remove(batch)

    def _fail_rest(self, error: EngineError) -> None:
        for batch in self._batches:
            batch.fail(error)
        if self._running is not None:
            self._running[1].set_exception(error)
        for job in self._jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)

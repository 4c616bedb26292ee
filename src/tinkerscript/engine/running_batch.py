"""`RunningBatch`: the rows that one set of weights is decoding (continuous batching).

Requests join between two steps, and rows leave as they finish. A prompt is prefilled once for all requests
that share it: its keys and values are kept while a row with it runs, and for a while after (`PromptCache`:
up to a number of tokens, the least recently used evicted first).

Invariants: rows [0, n) are contiguous; the last row moves into the place of one that leaves. An error in one
row fails its request alone, and leaves the ids and the log probabilities of all others as they would be.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tinkerscript.engine.decoder import Decoder
from tinkerscript.engine.grammars import Matcher
from tinkerscript.engine.kv_cache import KVCache, RowState
from tinkerscript.engine.sampling import Chosen, RowSettings, choose
from tinkerscript.errors import EngineError

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What decoding needs of a prompt of P tokens."""

    logits: Tensor
    """(V,): after the last token."""

    state: RowState


class PromptCache:
    """Prefilled prompts of one set of weights, `max_tokens` in all. Not thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._prompts: OrderedDict[Prompt, Prefilled] = OrderedDict()

    def get(self, prompt: Prompt) -> Prefilled | None:
        found = self._prompts.get(prompt)
        if found is not None:
            self._prompts.move_to_end(prompt)
        return found

    def missing(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The `prompts` that are not cached, without duplicates."""
        return [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]

    def put(self, prompt: Prompt, prefilled: Prefilled) -> None:
        self._prompts[prompt] = prefilled
        self._tokens += len(prompt)

    def trim(self) -> None:
        """Evict the least recently used prompts until at most `max_tokens` are left."""
        while self._tokens > self._max_tokens:
            prompt, _ = self._prompts.popitem(last=False)
            self._tokens -= len(prompt)


PROMPT_CACHE_TOKENS = 8192
"""Prompt tokens whose keys and values are kept for later requests with the same prompt."""


PREFILL_TOKENS = 8192
"""Most padded tokens in one prefill; a longer prompt is prefilled alone."""


Alternatives = Sequence[tuple[int, float]]
"""The most probable ids at one position with their log probabilities, best first."""


Report = Callable[[int, int, int, float, Alternatives], None]
"""(index, offset, token, logprob, top): sample `index` drew `token` after `offset` others. Called on the
engine's thread for every sampled token, so it must not block."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    ids: list[int]
    logprobs: list[float]
    stop_reason: str
    """`stop` or `length`; `cut`: it is not complete (`RunningBatch.cut`)."""

    top: list[Alternatives]
    """One for each sampled id, if the request asked for alternatives."""

    constrained: bytes = b""
    """`sampling.FREE`, `CUT` or `FORCED` for each sampled id, if the request has a grammar."""


@dataclass(slots=True)
class Request:
    """One sampling request: `num_samples` rows over one prompt."""

    prompt: Prompt
    num_samples: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    report: Report | None = None
    top_logprobs: int = 0
    """How many alternatives to report per position."""

    min_p: float = 0.0

    sampled: int = 0
    """How many of the prompt's last ids are the beginning of the reply, by other weights: stop strings may
    begin there."""

    matchers: list[Matcher] | None = None
    """The state of each sample in the request's grammar, if it has one."""

    future: Future[list[SampledRow]] = field(default_factory=Future[list[SampledRow]])
    finished: dict[int, SampledRow] = field(default_factory=dict[int, SampledRow])
    """Finished rows by sample index."""

    def finish(self, index: int, row: SampledRow) -> None:
        self.finished[index] = row
        if len(self.finished) < self.num_samples:
            return
        try:
            self.future.set_result([self.finished[i] for i in range(self.num_samples)])
        except InvalidStateError:
            return  # The caller cancelled.


@dataclass(slots=True, eq=False)
class RunningRow:
    """One sequence that is being decoded."""

    request: Request
    index: int
    random: np.random.Generator
    prompt_logits: Tensor
    """(V,): after the prompt."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[Alternatives] = field(default_factory=list[Alternatives])
    constrained: bytearray = field(default_factory=bytearray)

    @property
    def matcher(self) -> Matcher | None:
        return self.request.matchers[self.index] if self.request.matchers else None

    def take(self, token: int, logprob: float, top: Alternatives, constraint: int) -> None:
        """Append a sampled token; `constraint`: what the grammar did to it, if there is one.

        Raises EngineError for one of a distribution that is none.
        """
        if math.isnan(logprob):
            raise EngineError(
                "the model's logits are not finite here: its weights or the request's settings are not"
            )
        if self.request.report is not None:
            self.request.report(self.index, len(self.ids), token, logprob, top)
        self.ids.append(token)
        self.logprobs.append(logprob)
        if top:
            self.top.append(top)
        if self.matcher is not None:
            self.matcher.take(token)
            self.constrained.append(constraint)

    def finish(self, stop_reason: str) -> None:
        row = SampledRow(self.ids, self.logprobs, stop_reason, self.top, bytes(self.constrained))
        self.request.finish(self.index, row)


class RunningBatch:
    """Decodes with one frozen `Decoder`. Not thread-safe: the engine's thread owns it.

    `decode` gives the text of ids, in which stop strings are looked for. `random` draws for rows
    of requests without a seed.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int,
        max_length: int,
        decode: Callable[[list[int]], str],
        random: np.random.Generator,
        prompt_cache_tokens: int = PROMPT_CACHE_TOKENS,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.device
        self._max_rows = max_rows
        self._max_length = max_length
        self._decode = decode
        self._random = random
        self._cache = KVCache()
        self._prompts = PromptCache(prompt_cache_tokens)
        self._waiting: deque[tuple[Request, int]] = deque()
        self._rows: list[RunningRow] = []
        self._lengths: list[int] = []
        """Positions already in the cache, by row."""

        self._settings: RowSettings | None = None
        self._is_cut = False

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; its future resolves to its rows in sample order."""
        self._waiting.extend((request, index) for index in range(request.num_samples))
        if self._is_cut:
            self.cut()

    def cut(self) -> None:
        """End every row where it is, and each that is submitted from now on before its first token: newer
        weights go on with them."""
        self._is_cut = True
        rows, waiting = self._drop_all()
        for row in rows:
            row.finish("cut")
        for request, index in waiting:
            request.finish(index, SampledRow([], [], "cut", []))

    def fail(self, error: BaseException) -> None:
        """Fail every running and waiting request with `error`."""
        rows, waiting = self._drop_all()
        for request in [*(row.request for row in rows), *(request for request, _ in waiting)]:
            _fail(request, error)

    def _drop_all(self) -> tuple[list[RunningRow], list[tuple[Request, int]]]:
        """All rows, and those that wait, which leave. The cache goes with them: a failure may have left it
        half grown."""
        rows, waiting = self._rows, list(self._waiting)
        self._rows, self._lengths, self._settings = [], [], None
        self._waiting.clear()
        self._cache = KVCache()
        return rows, waiting

    @torch.inference_mode()
    def advance(self) -> None:
        """Sample one token for every running row, then admit waiting rows and sample their first token.

        What fails for one row fails its request alone; what raises is the failure of all.
        """
        self._drop_done()
        if self._rows:
            self._step()
        first = len(self._rows)
        self._admit()
        if len(self._rows) > first:
            self._take(torch.stack([row.prompt_logits for row in self._rows[first:]]), first=first)

    def _step(self) -> None:
        ids = torch.tensor([row.ids[-1] for row in self._rows], device=self._device)
        longest = max(self._lengths)
        lengths = torch.tensor(self._lengths, device=self._device)
        try:
            self._cache.reserve(len(self._rows), longest + 1)
            logits = self._decoder.step(ids, lengths, longest, self._cache)
        except RuntimeError as error:
            # Most likely there is no memory, and the longest row needs most. The others take this step again:
            # it has changed nothing but the position that it writes, unless there are states.
            longest_row = self._rows[self._lengths.index(longest)]
            for row in self._rows if self._cache.is_recurrent else [longest_row]:
                _fail(row.request, error)
            self._drop_done()
            return
        self._lengths = [length + 1 for length in self._lengths]
        self._take(logits, first=0)

    def _drop_done(self) -> None:
        """Drop all rows of requests that were cancelled or have failed."""
        if self._waiting and any(request.future.done() for request, _ in self._waiting):
            self._waiting = deque(item for item in self._waiting if not item[0].future.done())
        self._remove([i for i, row in enumerate(self._rows) if row.request.future.done()])

    def _admit(self) -> None:
        """Prefill waiting rows while there is room, and let them run.

        A row leaves the queue only when it runs or has failed, so `fail` finds it whatever raises here.
        """
        admitted = list(islice(self._waiting, self._max_rows - len(self._rows)))
        if not admitted:
            return
        failed = self._fill(self._prompts.missing([request.prompt for request, _ in admitted]))
        for request, index in admitted:
            try:
                if request.prompt in failed:
                    raise failed[request.prompt]
                self._run(request, index)
            except Exception as error:  # noqa: BLE001 - the request's future carries it
                _fail(request, error)
            self._waiting.popleft()
        self._settings = None
        self._prompts.trim()

    def _run(self, request: Request, index: int) -> None:
        found = self._prompts.get(request.prompt)
        assert found is not None
        row = RunningRow(request, index, self._generator(request, index), found.logits)
        self._settings_of([row])  # One that torch does not take must not meet the rows that run.
        self._cache.reserve(len(self._rows) + 1, len(request.prompt), found.state)
        self._cache.put(len(self._rows), found.state, len(request.prompt))
        self._rows.append(row)
        self._lengths.append(len(request.prompt))

    def _fill(self, prompts: list[Prompt]) -> dict[Prompt, Exception]:
        """Put `prompts` into the prompt cache, from running rows that have them or prefilled: those that
        failed, and why."""
        failed: dict[Prompt, Exception] = {}
        running = {row.request.prompt: i for i, row in enumerate(self._rows)}
        kept: set[Prompt] = set()
        for prompt in running.keys() & set(prompts):
            row = running[prompt]
            try:
                state = self._cache.copy_of(row, self._lengths[row], len(prompt))
            except RuntimeError as error:
                failed[prompt] = error
                continue
            if state is not None:
                self._prompts.put(prompt, Prefilled(self._rows[row].prompt_logits, state))
                kept.add(prompt)
        for batch in _similar_lengths([prompt for prompt in prompts if prompt not in kept | failed.keys()]):
            try:
                self._prefill(batch)
            except Exception:  # noqa: BLE001 - each of them alone says whose it is
                for prompt in batch:
                    try:
                        self._prefill([prompt])
                    except Exception as error:  # noqa: BLE001 - the request's future carries it
                        failed[prompt] = error
        return failed

    def _prefill(self, prompts: list[Prompt]) -> None:
        """Prefill prompts together: the last one is the longest."""
        lengths = torch.tensor([len(p) for p in prompts], device=self._device)
        ids = torch.zeros(len(prompts), len(prompts[-1]), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt)] = torch.tensor(prompt)
        logits, states = self._decoder.prefill(ids.to(self._device), lengths)
        for i, (prompt, state) in enumerate(zip(prompts, states, strict=True)):
            self._prompts.put(prompt, Prefilled(logits[i], state))

    def _generator(self, request: Request, index: int) -> np.random.Generator:
        if request.seed is None:
            return self._random
        return np.random.default_rng([request.seed & 0xFFFF_FFFF_FFFF_FFFF, index])

    def _take(self, logits: Tensor, *, first: int) -> None:
        """Sample one token for rows [first, n) from their logits, and remove finished rows."""
        rows = self._rows[first:]
        settings = self._row_settings() if first == 0 else self._settings_of(rows)
        uniforms = torch.tensor([row.random.random() for row in rows], dtype=torch.float32)
        uniforms = uniforms.to(self._device)
        chosen = choose(logits, uniforms, settings, self._allowed(rows, logits.shape[-1]))
        finished: list[int] = []
        pairs = zip(chosen.ids.tolist(), chosen.logprobs.tolist(), strict=True)
        constraints = [0] * len(rows) if chosen.constraints is None else chosen.constraints.tolist()
        for i, (row, (token, logprob), top, constraint) in enumerate(
            zip(rows, pairs, _alternatives(rows, chosen), constraints, strict=True)
        ):
            if row.request.future.done():
                continue
            try:
                row.take(token, logprob, top, constraint)
                reason = self._stop_reason(row, token, len(row.request.prompt) + len(row.ids))
            except Exception as error:  # noqa: BLE001 - the request's future carries it
                _fail(row.request, error)
                continue
            if reason is not None:
                row.finish(reason)
                finished.append(first + i)
        self._remove(finished)
        self._drop_done()

    def _allowed(self, rows: list[RunningRow], vocabulary: int) -> Tensor | None:
        """The ids that grammars allow next, bool (n, V); None if no row has a grammar. A grammar that allows
        none fails its request, whose row is free to sample what nobody takes."""
        if all(row.matcher is None for row in rows):
            return None
        allowed = np.ones((len(rows), vocabulary), dtype=np.bool_)
        for i, row in enumerate(rows):
            if row.matcher is not None and not row.request.future.done():
                try:
                    allowed[i] = row.matcher.allowed()
                except Exception as error:  # noqa: BLE001 - the request's future carries it
                    _fail(row.request, error)
        return torch.from_numpy(allowed).to(self._device)

    def _stop_reason(self, row: RunningRow, token: int, length: int) -> str | None:
        request = row.request
        if token in request.stop_ids or (request.stop_strings and self._ends_with_stop_string(row)):
            return "stop"
        if len(row.ids) >= request.max_tokens or length >= self._max_length:
            return "length"
        return None

    def _ends_with_stop_string(self, row: RunningRow) -> bool:
        """Whether the newest token completed a stop string; an earlier one would have ended the row."""
        window = max(len(s.encode()) for s in row.request.stop_strings) + 8
        ids = row.ids[-window:]
        if len(ids) < window and (sampled := row.request.sampled):
            ids = [*row.request.prompt[-sampled:], *ids][-window:]
        text = self._decode(ids)
        return any(stop in text for stop in row.request.stop_strings)

    def _row_settings(self) -> RowSettings:
        if self._settings is None:
            self._settings = self._settings_of(self._rows)
        return self._settings

    def _remove(self, rows: list[int]) -> None:
        for hole in sorted(rows, reverse=True):
            last = len(self._rows) - 1
            if hole != last:
                self._cache.move(last, hole, self._lengths[last])
                self._rows[hole], self._lengths[hole] = self._rows[last], self._lengths[last]
            self._rows.pop()
            self._lengths.pop()
        if rows:
            self._settings = None

    def _settings_of(self, rows: list[RunningRow]) -> RowSettings:
        requests = [row.request for row in rows]
        return RowSettings(
            temperature=torch.tensor([r.temperature for r in requests], device=self._device),
            top_p=torch.tensor([r.top_p for r in requests], device=self._device),
            top_k=torch.tensor([r.top_k for r in requests], device=self._device),
            min_p=torch.tensor([r.min_p for r in requests], device=self._device),
            plain=all(r.temperature == 1 and not _is_truncated(r) for r in requests),
            truncated=any(_is_truncated(r) for r in requests),
            top=max((r.top_logprobs for r in requests), default=0),
        )


def _fail(request: Request, error: BaseException) -> None:
    try:
        request.future.set_exception(error)
    except InvalidStateError:
        return  # The caller cancelled, or another of its rows failed.


def _is_truncated(request: Request) -> bool:
    return request.top_p < 1 or request.top_k > 0 or request.min_p > 0


def _alternatives(rows: list[RunningRow], chosen: Chosen) -> list[Alternatives]:
    """Per row, as many as its request asked for."""
    if chosen.top_ids is None or chosen.top_logprobs is None:
        return [()] * len(rows)
    both = zip(chosen.top_ids.tolist(), chosen.top_logprobs.tolist(), strict=True)
    return [
        list(zip(ids, logprobs, strict=True))[: row.request.top_logprobs]
        for row, (ids, logprobs) in zip(rows, both, strict=True)
    ]


def _similar_lengths(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Batches of rising length: at most `PREFILL_TOKENS` padded, at least half of them real tokens."""
    batches: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=len):
        batch = batches[-1] if batches else []
        padded = (len(batch) + 1) * len(prompt)
        if batch and padded <= PREFILL_TOKENS and padded <= 2 * (sum(map(len, batch)) + len(prompt)):
            batch.append(prompt)
        else:
            batches.append([prompt])
    return batches

"""`RunningBatch`: the rows that one set of weights is decoding (continuous batching).

docs/engine.md describes batching and its memory. Rows are in their cache's order. An error in one row fails
only its request, and does not change the others' ids and log probabilities.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from tinkerscript.engine.decoder import Decoder
from tinkerscript.engine.grammars import Matcher
from tinkerscript.engine.image_features import ImageFeatures, ImageReader, Placed
from tinkerscript.engine.kv_cache import CacheBudget, KVCache, RowState, cut, stored_tokens
from tinkerscript.engine.prefix_store import WORTH_TOKENS, Ids, Prefilled, PrefixStore, common_length
from tinkerscript.engine.sampling import Chosen, RowSettings, choose
from tinkerscript.errors import EngineError

PREFILL_TOKENS = 2048
"""Padded tokens per prefill; a longer prompt takes several prefills."""


SHARED_TOKENS = 16
"""Sequences that wait together compute a common prefix of this length once."""


STEP_TOKENS = 16
"""A step of one row takes as long as prefilling this many tokens."""


Alternatives = Sequence[tuple[int, float]]


Report = Callable[[int, int, int, float, Alternatives], None]
"""(index, offset, token, logprob, top): sample `index` drew `token` after `offset` others. Called on the
engine's thread, so it must not block.
"""


@dataclass(frozen=True, slots=True)
class SampledRow:
    ids: list[int]
    logprobs: list[float]
    stop_reason: str
    """`stop`, `length`, or `cut` (`RunningBatch.cut`)."""

    top: list[Alternatives]
    constrained: bytes = b""
    """`sampling.FREE`, `CUT` or `FORCED` per sampled id, with a grammar."""

    experts: bytes = b""
    """`Routing.packed`: experts at the position before each token, from `Request.known` on."""


@dataclass(slots=True)
class Request:
    prompt: Ids
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
    min_p: float = 0.0

    sampled: int = 0
    """Number of the prompt's last ids that other weights sampled for the reply. Stops may begin there."""

    known: int = 0
    """Number of the prompt's first ids that need no experts."""

    matchers: list[Matcher] | None = None
    images: Sequence[Placed] = ()
    """Images of `prompt`. `submit` replaces their placeholders by their ids."""

    held: Sequence[ImageFeatures] = ()
    future: Future[list[SampledRow]] = field(default_factory=Future[list[SampledRow]])
    finished: dict[int, SampledRow] = field(default_factory=dict[int, SampledRow])

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
    request: Request
    index: int
    random: np.random.Generator | None = None
    admitted: int = 0
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    top: list[Alternatives] = field(default_factory=list[Alternatives])
    constrained: bytearray = field(default_factory=bytearray)

    @property
    def sequence(self) -> Ids:
        return (*self.request.prompt, *self.ids) if self.ids else self.request.prompt

    @property
    def matcher(self) -> Matcher | None:
        return self.request.matchers[self.index] if self.request.matchers else None

    def take(self, token: int, logprob: float, top: Alternatives, constraint: int) -> None:
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

    def finish(self, stop_reason: str, experts: bytes = b"") -> None:
        row = SampledRow(self.ids, self.logprobs, stop_reason, self.top, bytes(self.constrained), experts)
        self.request.finish(self.index, row)


class RunningBatch:
    """Decodes with one frozen `Decoder`. Not thread-safe: the engine's thread owns it.

    `decode` finds stop strings. `random` draws for requests without a seed.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rows: int,
        max_length: int,
        decode: Callable[[list[int]], str],
        random: np.random.Generator,
        budget: CacheBudget | None = None,
        prefixes: PrefixStore | None = None,
        images: ImageReader | None = None,
    ) -> None:
        self._decoder = decoder
        self._images = images
        self._device = decoder.device
        self._max_rows = max_rows
        self._max_length = max_length
        self._decode = decode
        self._random = random
        self._budget = budget or CacheBudget()
        self._cache: KVCache[RunningRow] = KVCache(self._budget, decoder.spread)
        self._prefixes = prefixes or PrefixStore(self._budget)
        self._waiting: deque[RunningRow] = deque()
        self._filling: tuple[Ids, int, RowState] | None = None
        """A partly prefilled prompt, how many of its tokens are done, and their state."""

        self._admitted = itertools.count()
        self._settings: RowSettings | None = None
        self._is_cut = False
        self.prefilled_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._cache.groups or self._waiting)

    def submit(self, request: Request) -> None:
        """The future resolves to the rows in sample order."""
        if request.images:
            try:
                assert self._images is not None
                ids, request.held = self._images.read(request.prompt, request.images)
            except Exception as error:  # noqa: BLE001 - the request's future carries it
                _fail(request, error)
                return
            request.prompt = tuple(ids)
        self._waiting.extend(RunningRow(request, index) for index in range(request.num_samples))
        if self._is_cut:
            self.cut()

    def cut(self) -> None:
        """End all rows, future ones too: newer weights continue them."""
        self._is_cut = True
        experts = {row: self._experts(row) for row in [*self._cache.rows, *self._waiting] if row.ids}
        for row in self._drop_all():
            row.finish("cut", experts.get(row, b""))

    def fail(self, error: BaseException) -> None:
        for row in self._drop_all():
            _fail(row.request, error)

    def _drop_all(self) -> list[RunningRow]:
        rows = [*self._cache.rows, *self._waiting]
        self._waiting.clear()
        self._cache.clear()
        self._settings = self._filling = None
        return rows

    @torch.inference_mode()
    def advance(self) -> None:
        """Sample one token per running row, then admit waiting rows and sample their first.

        If this raises, all requests have failed.
        """
        self._drop_done()
        if self._cache.groups:
            self._step()
        if self._waiting:
            self._admit()

    def _step(self) -> None:
        try:
            self._make_room()
            if not (rows := self._cache.rows):
                return
            ids = torch.tensor([row.ids[-1] for row in rows], device=self._device)
            logits = self._decoder.step(ids, self._cache.groups)
        except RuntimeError as error:
            # Probably out of memory, and the longest row needs most. The others repeat this step, which
            # without states has changed only the position that it writes.
            rows, lengths = self._cache.rows, self._cache.lengths
            longest = rows[lengths.index(max(lengths))]
            for row in rows if self._cache.is_recurrent else [longest]:
                _fail(row.request, error)
            self._drop_done()
            return
        self._cache.advance()
        self._take(rows, logits, self._row_settings())

    def _make_room(self) -> None:
        while not self._cache.grow():
            newest = max(self._cache.rows, key=lambda row: row.admitted)
            self._remove([newest])
            self._waiting.appendleft(newest)

    def _drop_done(self) -> None:
        if self._waiting and any(row.request.future.done() for row in self._waiting):
            self._waiting = deque(row for row in self._waiting if not row.request.future.done())
        self._remove([row for row in self._cache.rows if row.request.future.done()])

    def _admit(self) -> None:
        """Running rows wait for one prefill only."""
        others = bool(self._cache.rows)
        while rows := self._admissible():
            ready = self._prefilled(list(dict.fromkeys(row.sequence for row in rows)))
            waiting = len(self._waiting)
            self._run(rows, ready)
            if others or len(self._waiting) == waiting:
                return

    def _admissible(self) -> list[RunningRow]:
        found: list[RunningRow] = []
        wanted = 0
        for row in islice(self._waiting, self._max_rows - len(self._cache.rows)):
            more = self._cache.row_bytes(stored_tokens([len(row.sequence) + 1], self._decoder.spread))
            if more > self._budget.total:
                _fail(row.request, _never_fits(len(row.sequence), more, self._budget.total))
                continue
            wanted += more
            if not self._budget.has_room(wanted):
                break
            found.append(row)
        return found

    def _prefilled(self, sequences: list[Ids]) -> dict[Ids, Prefilled | Exception]:
        """Return known sequences, and those that `PREFILL_TOKENS` more tokens complete, or their errors."""
        found: dict[Ids, Prefilled | Exception] = {}
        for sequence in sequences:
            try:
                if kept := self._prefixes.complete(sequence):
                    found[sequence] = kept
            except RuntimeError as error:
                found[sequence] = error
        until = self.prefilled_tokens + PREFILL_TOKENS
        for sequence in sequences:
            if sequence in found:
                continue
            if self.prefilled_tokens >= until:
                break
            batch, shared = self._batch_with(sequence, [each for each in sequences if each not in found])
            if self._is_long(sequence) or (len(batch) == 1 and self._worth(sequence)):
                found |= self._prefill_chunk(sequence)
            else:
                found |= self._prefill_each(batch, shared)
            if sequence not in found:
                break
        return found

    def _batch_with(self, sequence: Ids, waiting: list[Ids]) -> tuple[list[Ids], int]:
        """Return the sequences to prefill with `sequence`, and how many first ids to compute once for all.

        A sequence with much more than the shared ids in the store is prefilled alone.
        """
        short = [each for each in waiting if not self._is_long(each)]
        alike = [each for each in short if each[:SHARED_TOKENS] == sequence[:SHARED_TOKENS]]
        shared = 0
        if not self._decoder.is_recurrent and len(alike) > 1:
            shared = min(common_length(sequence[:-1], each[:-1]) for each in alike)
        if shared < SHARED_TOKENS:
            alike, shared = short, 0
        fresh = [each for each in alike if self._worth(each) < (shared + WORTH_TOKENS if shared else 1)]
        batches = _similar_lengths(fresh, shared)
        batch = next((each for each in batches if sequence in each), [sequence])
        return batch, shared if len(batch) > 1 else 0

    def _is_long(self, sequence: Ids) -> bool:
        return len(sequence) > PREFILL_TOKENS and not self._decoder.is_recurrent

    def _worth(self, sequence: Ids) -> int:
        known = self._prefixes.worth(sequence[:-1])
        if self._decoder.is_recurrent and STEP_TOKENS * (len(sequence) - known) > len(sequence):
            return 0
        return known

    def _prefill_chunk(self, sequence: Ids) -> dict[Ids, Prefilled | Exception]:
        try:
            if self._filling is not None and self._filling[0] == sequence:
                (_, known, past), self._filling = self._filling, None
            else:
                known, past = self._prefixes.longest(sequence[:-1])
            end = min(len(sequence), known + PREFILL_TOKENS) if self._is_long(sequence) else len(sequence)
            logits, (state,) = self._prefill([sequence[known:end]], past, known)
        except Exception as error:  # noqa: BLE001 - the request's future carries it
            return {sequence: error}
        if end < len(sequence):
            self._filling = sequence, end, state
            return {}
        return {sequence: self._kept(sequence, logits[0], state)}

    def _prefill_each(self, sequences: list[Ids], shared: int = 0) -> dict[Ids, Prefilled | Exception]:
        """If it fails for all together, prefill one by one to find the faulty sequences."""
        try:
            past = self._prefix(sequences[0][:shared]) if shared else None
            logits, states = self._prefill([each[shared:] for each in sequences], past, shared)
        except Exception as error:  # noqa: BLE001 - the request's future carries it
            failure = error.with_traceback(None)  # Its frames hold tensors, and may hold all the memory.
        else:
            return {
                sequence: self._kept(sequence, of_row, state)
                for sequence, of_row, state in zip(sequences, logits, states, strict=True)
            }
        if len(sequences) == 1:
            return {sequences[0]: failure}
        return {each: found for one in sequences for each, found in self._prefill_each([one]).items()}

    def _prefix(self, ids: Ids) -> RowState:
        if found := self._prefixes.complete(ids):
            return found.state
        known, past = self._prefixes.longest(ids[:-1])
        logits, (state,) = self._prefill([ids[known:]], past, known)
        return self._kept(ids, logits[0], state).state

    def _prefill(
        self, parts: list[Ids], past: RowState | None = None, begin: int = 0
    ) -> tuple[Tensor, list[RowState]]:
        lengths = torch.tensor([len(part) for part in parts], device=self._device)
        ids = torch.zeros(len(parts), len(parts[-1]), dtype=torch.long)
        for i, part in enumerate(parts):
            ids[i, : len(part)] = torch.tensor(part)
        found = self._decoder.prefill(ids.to(self._device), lengths, past, begin)
        self.prefilled_tokens += sum(map(len, parts))
        return found

    def _kept(self, sequence: Ids, logits: Tensor, state: RowState) -> Prefilled:
        self._prefixes.keep(sequence, lambda begin: cut(state, begin), logits)
        return Prefilled(logits, state)

    def _run(self, rows: list[RunningRow], ready: dict[Ids, Prefilled | Exception]) -> None:
        """A row leaves the queue only when it runs or has failed, so `fail` finds it."""
        prefilled = {ids: each for ids, each in ready.items() if isinstance(each, Prefilled)}
        failed = [row for row in rows if row.sequence in ready and row.sequence not in prefilled]
        fitting = [row for row in rows if row.sequence in prefilled]
        if fitting:
            later = [row for row in rows if row.sequence not in ready]
            lengths = [len(row.sequence) for row in [*fitting, *later]]
            like = next(iter(prefilled.values())).state
            count = self._cache.fit(lengths, like)
            with suppress(RuntimeError):
                self._cache.reserve(lengths[:count], like)
            fitting = fitting[:count]
        rows = [*failed, *fitting]
        running: list[RunningRow] = []
        for _, each in itertools.groupby(rows, key=lambda row: (id(row.request), row.sequence)):
            alike = list(each)
            try:
                running += self._begin(alike, ready[alike[0].sequence])
            except Exception as error:  # noqa: BLE001 - the request's future carries it
                _fail(alike[0].request, error)
        left = set(rows)
        self._waiting = deque(row for row in self._waiting if row not in left)
        self._settings = None
        if running:
            order = {row: i for i, row in enumerate(self._cache.rows)}
            running.sort(key=order.__getitem__)
            logits = torch.stack([prefilled[row.sequence].logits for row in running])
            self._take(running, logits, self._settings_of(running))

    def _begin(self, rows: list[RunningRow], prefilled: Prefilled | Exception) -> list[RunningRow]:
        if isinstance(prefilled, Exception):
            raise prefilled
        for row in rows:
            row.random = row.random or self._generator(row.request, row.index)
            row.admitted = next(self._admitted)
        self._settings_of(rows)  # Invalid settings must not reach the running rows.
        self._cache.add(rows, prefilled.state, len(rows[0].sequence))
        return rows

    def _generator(self, request: Request, index: int) -> np.random.Generator:
        if request.seed is None:
            return self._random
        return np.random.default_rng([request.seed & 0xFFFF_FFFF_FFFF_FFFF, index])

    def _take(self, rows: list[RunningRow], logits: Tensor, settings: RowSettings) -> None:
        uniforms = torch.tensor([_random_of(row).random() for row in rows], dtype=torch.float32)
        uniforms = uniforms.to(self._device)
        chosen = choose(logits, uniforms, settings, self._allowed(rows, logits.shape[-1]))
        finished: list[RunningRow] = []
        pairs = zip(chosen.ids.tolist(), chosen.logprobs.tolist(), strict=True)
        constraints = [0] * len(rows) if chosen.constraints is None else chosen.constraints.tolist()
        for row, (token, logprob), top, constraint in zip(
            rows, pairs, _alternatives(rows, chosen), constraints, strict=True
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
                row.finish(reason, self._experts(row))
                finished.append(row)
        for row in finished:
            self._prefixes.keep(row.sequence[:-1], partial(self._cache.state, row))
        self._remove(finished)

    def _experts(self, row: RunningRow) -> bytes:
        """Unknown before the first token, and while a row waits for memory."""
        routing = self._decoder.routing
        if routing is None:
            return b""
        kept = self._cache.last_layer(row, max(0, row.request.known - 1))
        experts = routing.unknown(len(row.sequence) - row.request.known)
        if kept is not None:
            chosen = routing.packed(kept)
            experts[len(experts) - len(chosen) :] = chosen
        return experts.tobytes()

    def _allowed(self, rows: list[RunningRow], vocabulary: int) -> Tensor | None:
        """Return the ids that grammars allow next, bool (n, V), or None without grammars.

        If a grammar allows none, its request fails, and the row may sample anything.
        """
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
        """Only the newest token can complete a string: an earlier one would have ended the row."""
        window = max(len(s.encode()) for s in row.request.stop_strings) + 8
        ids = row.ids[-window:]
        if len(ids) < window and (sampled := row.request.sampled):
            ids = [*row.request.prompt[-sampled:], *ids][-window:]
        text = self._decode(ids)
        return any(stop in text for stop in row.request.stop_strings)

    def _row_settings(self) -> RowSettings:
        if self._settings is None:
            self._settings = self._settings_of(self._cache.rows)
        return self._settings

    def _remove(self, rows: list[RunningRow]) -> None:
        for row in reversed(rows):  # Backward, because the last row takes a leaving row's place.
            self._cache.remove(row)
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


def _random_of(row: RunningRow) -> np.random.Generator:
    assert row.random is not None
    return row.random


def _never_fits(tokens: int, needed: int, total: float) -> EngineError:
    return EngineError(
        f"prompt: {tokens} tokens of prompt and reply need {needed / 2**20:,.0f} MiB of keys and values, and "
        f"all rows together may have {total / 2**20:,.0f} MiB; raise engine.cache_tokens, or send less"
    )


def _fail(request: Request, error: BaseException) -> None:
    try:
        request.future.set_exception(error.with_traceback(None))  # Its frames hold tensors.
    except InvalidStateError:
        return  # The caller cancelled, or another row failed.


def _is_truncated(request: Request) -> bool:
    return request.top_p < 1 or request.top_k > 0 or request.min_p > 0


def _alternatives(rows: list[RunningRow], chosen: Chosen) -> list[Alternatives]:
    if chosen.top_ids is None or chosen.top_logprobs is None:
        return [()] * len(rows)
    both = zip(chosen.top_ids.tolist(), chosen.top_logprobs.tolist(), strict=True)
    return [
        list(zip(ids, logprobs, strict=True))[: row.request.top_logprobs]
        for row, (ids, logprobs) in zip(rows, both, strict=True)
    ]


def _similar_lengths(prompts: list[Ids], shared: int) -> list[list[Ids]]:
    """Batch by rising length, without `shared` ids: at most `PREFILL_TOKENS` padded, at least half real."""
    batches: list[list[Ids]] = []
    for prompt in sorted(prompts, key=len):
        batch = batches[-1] if batches else []
        new = [len(each) - shared for each in [*batch, prompt]]
        padded = len(new) * new[-1]
        if batch and padded <= PREFILL_TOKENS and padded <= 2 * sum(new):
            batch.append(prompt)
        else:
            batches.append([prompt])
    return batches

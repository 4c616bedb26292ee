"""`Policy`: the newest published weights, and the policy version that names them.

Versions only increase, even across restarts, because each is in the ledger before it is used. The n-th
request for a prompt to a step's weights has its own seed, so timing does not change tokens. A logprob is
always from the weights that sampled the token.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

from msgspec import structs

from tinkerscript.errors import AlignmentError, GatewayError
from tinkerscript.gateway.sampled_model import sample_all
from tinkerscript.ledger.history import RowWriter
from tinkerscript.ledger.rows import PublicationRow
from tinkerscript.rollouts.call import IntArray, PlacedImage, unpack_ids
from tinkerscript.sampler import (
    Progress,
    ProgressCallback,
    SampledSequence,
    SampledTokens,
    Sampler,
    SampleRequest,
    SampleResult,
    fitted,
)
from tinkerscript.train.backends.backend import FrozenModel, Publisher
from tinkerscript.train.occupancy import Occupancy
from tinkerscript.trainer_link.messages import EpisodeAccepted, Outcome


@dataclass(eq=False)
class SeededSampler(Sampler):
    """Belongs to one event loop."""

    sampler: Sampler
    seed: int | None = field(kw_only=True)
    step: int = field(kw_only=True)
    max_context: int = field(kw_only=True)
    key: str = ""
    used: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self._prefix = None if self.seed is None else f"{self.key}{self.seed}/{self.step}".encode()
        self._requests: Counter[bytes] = Counter()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Raises AlignmentError, and GatewayError for a prompt without room."""
        request = fitted(request, self.max_context, "the engine")
        if request.seed is None and self._prefix is not None:
            seed = self.seed_for(unpack_ids(request.prompt), request.images)
            request = structs.replace(request, seed=seed)
        result = await self.sampler.sample(request, progress)
        for sequence in result.sequences:
            check_lengths(len(sequence.sampled) // 4, len(sequence.logprobs) // 4)
        return result

    def cut(self) -> None:
        self.sampler.cut()

    def seed_for(self, prompt: IntArray, images: Sequence[PlacedImage] = ()) -> int:
        """The next seed for this prompt (int32 [P]), in [0, 2^31)."""
        assert self._prefix is not None
        whole = hashlib.blake2b(self._prefix + prompt.tobytes(), digest_size=16)
        for image in images:
            whole.update(image.data)
        digest = whole.digest()
        while True:
            number = self._requests[digest]
            self._requests[digest] += 1
            mixed = hashlib.blake2b(digest + number.to_bytes(8, "big"), digest_size=4).digest()
            seed = int.from_bytes(mixed, "big") >> 1
            if seed not in self.used:
                return seed


def check_lengths(tokens: int, logprobs: int) -> None:
    if tokens != logprobs:
        raise AlignmentError(
            f"lengths_differ: the sampler returned {tokens} token ids and {logprobs} logprobs: "
            "one was cut short, or the ids were made from text",
            name="lengths_differ",
        )


@dataclass
class _Weights:
    publisher: Publisher
    key: str
    sampler: SeededSampler | None = None
    used: set[int] = field(default_factory=set[int])


class Policy:
    """An AlignmentError while sampling ends the run: `failed` raises it."""

    def __init__(
        self,
        publisher: Publisher,
        ledger: RowWriter,
        *,
        seed: int = 0,
        version: int = -1,
        in_flight: bool = False,
    ) -> None:
        """`version`: newest of earlier processes. `in_flight`: new weights continue running calls."""
        self._ledger = ledger
        self._in_flight = in_flight
        self.version = version
        self._seed = seed
        self._own = _Weights(publisher, key="")

        self._trained = {"": self._own}
        self._frozen: dict[str, SeededSampler] = {}

        self._pinned: dict[str, Mapping[str, SeededSampler]] = {}

        # True while the newest version is for pinned episodes only.
        self._is_past = False

        self.calls = Occupancy()
        self._broken = asyncio.Event()
        self._fault: AlignmentError | None = None

    def publish_to(self, publisher: Publisher) -> None:
        self._own.publisher = publisher

    def add_frozen(self, role: str, model: FrozenModel) -> None:
        self._frozen[role] = SeededSampler(
            model.sampler,
            seed=self._seed if self._own.publisher.seeds else None,
            step=0,
            max_context=model.max_context,
        )

    def add_trained(self, role: str, publisher: Publisher) -> None:
        self._trained[role] = _Weights(publisher, key=f"{role}/")

    @property
    def holds(self) -> int:
        return min(each.publisher.holds for each in self._trained.values())

    @contextmanager
    def pinned(self, episodes: Collection[str]) -> Generator[int]:
        """Answer these episodes' calls from the newest version, which it yields, with separate seeds."""
        with ExitStack() as stack:
            samplers = dict[str, SeededSampler]()
            for role, weights in self._trained.items():
                assert weights.sampler is not None
                held = stack.enter_context(weights.sampler.sampler.hold())
                samplers[role] = replace(weights.sampler, sampler=held, used=set[int]())
            self._pinned |= dict.fromkeys(episodes, samplers)
            try:
                yield self.version
            finally:
                for each in episodes:
                    del self._pinned[each]

    async def publish(self, step: int = 0, *, is_past: bool = False) -> int:
        """Make all trained weights the newest version. `step`: their training steps.

        With `is_past`, only pinned episodes sample from it, and another version follows.
        """
        version = self.version + 1
        samplers = [await each.publisher.publish(version) for each in self._trained.values()]
        await self._ledger.commit([PublicationRow(policy_version=version, step=step, time=time.time())])
        self.version = version
        self._is_past = is_past
        older = [weights.sampler for weights in self._trained.values() if weights.sampler is not None]
        for weights, sampler in zip(self._trained.values(), samplers, strict=True):
            used = set[int]()
            if not is_past:
                used, weights.used = weights.used, used
            weights.sampler = SeededSampler(
                sampler,
                seed=self._seed if weights.publisher.seeds else None,
                step=step,
                max_context=weights.publisher.max_context,
                key=weights.key,
                used=used,
            )
        if not is_past:
            for weights in self._trained.values():
                await weights.publisher.announce(version)
        if self._in_flight:
            for each in older:
                each.cut()
        return version

    def resting(self) -> AbstractAsyncContextManager[None]:
        return self._own.publisher.resting()

    def note(self, outcome: Outcome) -> None:
        """Never reuse an episode's seeds: a resumed run keeps results of the same weights."""
        for weights in self._trained.values():
            weights.publisher.ended(outcome.episode_uuid)
        if isinstance(outcome, EpisodeAccepted) and outcome.episode_uuid not in self._pinned:
            for call in outcome.all_calls:
                if call.seed is not None and (weights := self._trained.get(call.role)) is not None:
                    sampler = None if self._is_past else weights.sampler
                    (weights if sampler is None else sampler).used.add(call.seed)

    @property
    def sampler(self) -> SeededSampler:
        return self._newest(self._own)

    def _newest(self, weights: _Weights) -> SeededSampler:
        if weights.sampler is None or self._is_past:
            raise GatewayError(503, "engine_unavailable", "no weights have been published yet; retry")
        return weights.sampler

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Serve from the newest version, a pinned episode's, or the role's model.

        Raises GatewayError 503 before the first `publish`, and 404 for an unknown role.
        """
        self.calls.number += 1
        try:
            return await self._sample(request, progress)
        finally:
            self.calls.number -= 1

    async def _sample(self, request: SampleRequest, progress: ProgressCallback | None) -> SampleResult:
        if frozen := self._frozen.get(request.role):
            return await frozen.sample(request, progress)
        weights = self._trained.get(request.role)
        if weights is None:
            message = (
                f"the trainer neither trains nor holds a role {request.role!r}; its config and the server's "
                "differ"
            )
            raise GatewayError(404, "model_not_found", message, param="model")
        try:
            if pinned := self._pinned.get(request.affinity):
                return await pinned[request.role].sample(request, progress)
            result = await self._newest(weights).sample(request, progress)
            sequences = [
                _joined(_NOTHING, each, result.policy_version) if each.is_cut else each
                for each in result.sequences
            ]
            while cut := [index for index, each in enumerate(sequences) if each.is_cut]:
                rest = [self._rest(request, result.seed, index, sequences[index]) for index in cut]
                moved = progress and _moved(progress, [(i, len(sequences[i].sampled) // 4) for i in cut])
                parts = await sample_all(self._newest(weights), rest, moved)
                for index, part in zip(cut, parts, strict=True):
                    sequences[index] = _joined(sequences[index], part.sequences[0], part.policy_version)
            return structs.replace(result, sequences=sequences)
        except AlignmentError as fault:
            self._fault = fault
            self._broken.set()
            raise

    def _rest(
        self, request: SampleRequest, seed: int | None, index: int, whole: SampledSequence
    ) -> SampleRequest:
        if seed is not None:
            origin = f"{seed}/{index}/{self.version}/{len(whole.sampled)}"
            digest = hashlib.blake2b(origin.encode(), digest_size=4).digest()
            seed = int.from_bytes(digest, "big") | 1 << 31  # Differs from all seeds of `seed_for`.
        return structs.replace(
            request,
            prompt=request.prompt + whole.sampled,
            sampled=len(whole.sampled) // 4,
            max_tokens=request.max_tokens - len(whole.sampled) // 4,
            num_samples=1,
            seed=seed,
            known=(len(request.prompt) + len(whole.sampled)) // 4 if whole.sampled else request.known,
        )

    async def failed(self) -> NoReturn:
        await self._broken.wait()
        assert self._fault is not None
        raise self._fault


_ARRAYS = (*SampledTokens.__struct_fields__, "constrained", "experts")

_NOTHING = SampledSequence(stop_reason="length", is_cut=True)


def _joined(whole: SampledSequence, part: SampledSequence, version: int) -> SampledSequence:
    spans = whole.spans
    if part.sampled and (not spans or spans[-1][0] != version):
        spans = [*spans, (version, len(whole.sampled) // 4)]
    return structs.replace(
        part,
        spans=spans,
        **{name: getattr(whole, name) + getattr(part, name) for name in _ARRAYS},
    )


def _moved(progress: ProgressCallback, places: Sequence[tuple[int, int]]) -> ProgressCallback:
    def report(news: Progress) -> None:
        index, before = places[news.index]
        progress(structs.replace(news, index=index, offset=before + news.offset))

    return report

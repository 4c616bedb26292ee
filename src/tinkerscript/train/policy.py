"""`Policy`: the newest published weights, and the policy version that names them.

Invariants: versions only increase, even across restarts: each is in the journal, on disk, before it is used.
What is sampled depends on the run's seed and on what is asked, not on when: the n-th request for a prompt to
the weights of a step has a seed of its own, so that a run gets the same tokens with any backend, network or
number of workers, and after a restart, up to the rounding of log probabilities.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import NoReturn

from msgspec import structs

from tinkerscript.errors import AlignmentError, GatewayError
from tinkerscript.gateway.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.rollouts.call import IntArray, unpack_ids, unpack_logprobs
from tinkerscript.train.backends.backend import FrozenModel, Publisher
from tinkerscript.train.journal import EpisodeAccepted, Journal, Outcome, PolicyPublished


class SeededSampler(Sampler):
    """A backend's sampler for one policy version: fills in seeds, checks room and results.

    Belongs to one event loop.
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        seed: int | None,
        step: int,
        max_context: int,
        used: set[int] | None = None,
    ) -> None:
        """`seed`: the run's; None: requests get none. `step`: training steps behind the weights;
        `max_context`: tokens of prompt and response together; `used`: seeds to skip.
        """
        self.sampler = sampler
        self.used = used if used is not None else set[int]()
        self._max_context = max_context
        self._key = None if seed is None else f"{seed}/{step}".encode()
        self._requests: Counter[bytes] = Counter()

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Raises GatewayError for a prompt that leaves no room, and AlignmentError (see `check_lengths`)."""
        prompt = unpack_ids(request.prompt)
        request = structs.replace(request, max_tokens=self._fitted(len(prompt), request.max_tokens))
        if request.seed is None and self._key is not None:
            request = structs.replace(request, seed=self.seed_for(prompt))
        result = await self.sampler.sample(request, progress)
        for sequence in result.sequences:
            check_lengths(len(unpack_ids(sequence.sampled)), len(unpack_logprobs(sequence.logprobs)))
        return result

    def seed_for(self, prompt: IntArray) -> int:
        """The seed of the next request for these ids (int32 [P]), in [0, 2^31)."""
        assert self._key is not None
        digest = hashlib.blake2b(self._key + prompt.tobytes(), digest_size=16).digest()
        while True:
            number = self._requests[digest]
            self._requests[digest] += 1
            mixed = hashlib.blake2b(digest + number.to_bytes(8, "big"), digest_size=4).digest()
            seed = int.from_bytes(mixed, "big") >> 1
            if seed not in self.used:
                return seed

    def _fitted(self, prompt_tokens: int, max_tokens: int) -> int:
        """How many tokens may follow a prompt: `max_tokens`, or what the context has room for.

        Raises GatewayError 400 `context_length_exceeded` if there is no room.
        """
        if prompt_tokens >= self._max_context:
            raise GatewayError(
                400,
                "context_length_exceeded",
                f"the engine's context holds {self._max_context} tokens; the prompt has {prompt_tokens}",
                param="messages",
            )
        return min(max_tokens, self._max_context - prompt_tokens)


def check_lengths(tokens: int, logprobs: int) -> None:
    """Raises AlignmentError if a sampled sequence's token and logprob counts differ."""
    if tokens != logprobs:
        raise AlignmentError(
            f"lengths_differ: the sampler answered {tokens} token ids and {logprobs} log probabilities: "
            "one of them was cut short, or the ids were made from text",
            name="lengths_differ",
        )


class Policy:
    """What samples now. `publish` makes the backend's current weights the next version.

    An AlignmentError while sampling breaks the policy: `failed` raises it, which ends the run.
    """

    def __init__(self, publisher: Publisher, journal: Journal, *, seed: int = 0) -> None:
        """`seed`: the run's."""
        self._publisher = publisher
        self._journal = journal
        self._seed = seed
        self._sampler: SeededSampler | None = None
        self._used: set[int] = set()
        """Seeds that the next published sampler must skip."""

        self._roles: dict[str, SeededSampler] = {}
        """Samplers of models that do not change."""

        self._broken = asyncio.Event()
        self._fault: AlignmentError | None = None

    def publish_to(self, publisher: Publisher) -> None:
        """Publish the next versions to `publisher`."""
        self._publisher = publisher

    def add_role(self, name: str, model: FrozenModel) -> None:
        """Sample from `model` for requests with the role `name`."""
        self._roles[name] = SeededSampler(
            model.sampler,
            seed=self._seed if self._publisher.seeds else None,
            step=0,
            max_context=model.max_context,
        )

    async def publish(self, step: int = 0) -> int:
        """Freeze the current weights as the next policy version and sample from them from now on.

        `step`: training steps behind them, which together with the run's seed decides what is sampled.
        """
        version = self.version + 1
        sampler = await self._publisher.publish(version)
        self._journal.write([PolicyPublished(policy_version=version, step=step)], durable=True)
        used, self._used = self._used, set()
        self._sampler = SeededSampler(
            sampler,
            seed=self._seed if self._publisher.seeds else None,
            step=step,
            max_context=self._publisher.max_context,
            used=used,
        )
        await self._publisher.announce(version)
        return version

    def resting(self) -> AbstractAsyncContextManager[None]:
        """While the context is open, model calls may wait: the weights train."""
        return self._publisher.resting()

    def note(self, outcome: Outcome) -> None:
        """Never reuse the seeds of this episode.

        Matters to a resumed run, which keeps results that the same weights gave before it was interrupted.
        """
        self._publisher.ended(outcome.episode_uuid)
        if isinstance(outcome, EpisodeAccepted):
            used = self._used if self._sampler is None else self._sampler.used
            used.update(call.seed for call in outcome.calls if call.seed is not None)

    @property
    def version(self) -> int:
        """The newest version, also of an earlier process of this run; -1 before the first."""
        return self._journal.policy_version

    @property
    def sampler(self) -> SeededSampler:
        """The newest version's sampler. Raises GatewayError 503 before the first `publish`."""
        if self._sampler is None:
            raise GatewayError(503, "engine_unavailable", "no weights have been published yet; retry")
        return self._sampler

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """Serve one request of the gateway: from the newest version, or from the model of its role.

        Raises as `SeededSampler.sample` does, and GatewayError 404 for a role that the run does not have.
        """
        if request.role:
            if request.role not in self._roles:
                message = (
                    f"the trainer has no frozen role {request.role!r}; its config and the server's differ"
                )
                raise GatewayError(404, "model_not_found", message, param="model")
            return await self._roles[request.role].sample(request, progress)
        try:
            return await self.sampler.sample(request, progress)
        except AlignmentError as fault:
            self._fault = fault
            self._broken.set()
            raise

    async def failed(self) -> NoReturn:
        """Wait until sampling breaks, then raise its AlignmentError."""
        await self._broken.wait()
        assert self._fault is not None
        raise self._fault

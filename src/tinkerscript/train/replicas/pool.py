"""`ReplicaPool`: publishes each version of the weights to all replicas, and sends every model call to one.

An episode stays with one replica, whose cache has its earlier turns; replicas are chosen by load, and chosen
again when one fails. A replica that is new, or was lost and is back, samples once it has shown that adapters
act on every kind of module, and has the versions that are live.

Invariants: a call is sampled by one version, which its result names. A replica samples from a version only
after it has loaded it by a name with the digest of its files and was not found to have another one. A call
that a lost replica did not answer is made again elsewhere: nothing of it was recorded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shutil
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from tinkerscript.config import InferenceConfig
from tinkerscript.errors import ConfigError, EngineError, GatewayError
from tinkerscript.rollouts.call import FloatArray, IntArray, unpack_ids
from tinkerscript.sampler import ProgressCallback, Sampler, SampleRequest, SampleResult
from tinkerscript.train.replicas.proof import Evidence, Scores, judge
from tinkerscript.train.replicas.replica import LostError, Replica

PINS = 100_000
"""Episodes whose replica is remembered; the one that called longest ago is forgotten first."""

RECENT_PROMPTS = 32
"""Prompts after which the most likely tokens are compared to prove a version, the most recent ones."""

PROOF_TOKENS = 512
"""Of each, at most: its last ones."""

PROMPTS, RANDOM_TOKENS = 16, 32
"""Random prompts, for canaries and where there are no recent ones."""

LOAD_S = 1800.0
"""What a replica that the run starts may take to load the model. Its death is noticed at once."""

PROVE_S = 120.0
"""In which a replica has to load a version and prove it, or it samples no more."""

HANG_S = 60.0
"""Without a sampled token: then a replica with requests counts as hung."""

RESTART_RETRY_S = 1.0
"""Before a replica that could not begin tries again."""

Scorer = Callable[[Path, Sequence[IntArray], Sequence[NDArray[np.int64]]], Awaitable[list[FloatArray]]]
"""The trainer's own log probabilities of next tokens (int64 [N]) after prompts (int32 [P]) by the weights in
a folder: float32 [N] each."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the weights."""

    version: int
    folder: Path

    @property
    def name(self) -> str:
        """What replicas know it by."""
        return self.folder.name


@dataclass(slots=True)
class Pin:
    """Where an episode samples."""

    replica: Replica
    version: int


@dataclass(eq=False)
class ReplicaPool(Sampler):
    """The replicas of one run. Belongs to one event loop."""

    replicas: list[Replica]
    config: InferenceConfig
    keep: int
    """Newest versions to sample from. One more is held, since calls of it may still wait for an answer."""

    model_folder: Path
    vocabulary: int
    max_context: int
    canaries: Sequence[Path]
    """Weights to start from, and adapters that are exaggerated in one kind of module."""

    score: Scorer
    exact: bool
    """Whether `score` computes in float32."""

    restart: Callable[[Replica], None]
    """Starts a replica again if the run started it."""

    record: Path
    """File that gets a line for each proof."""

    note: Callable[[str], None]
    timeout_s: float
    """Of one model call."""

    load_s: float = LOAD_S
    prove_s: float = PROVE_S
    hang_s: float = HANG_S

    def __post_init__(self) -> None:
        self._start, *self._adapters = self.canaries
        self._live: list[Published] = []
        self._held = Counter[int]()
        """Versions that are sampled from even if they are too old for `keep`."""

        self._newest = -1
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._recent: deque[IntArray] = deque(maxlen=RECENT_PROMPTS)
        self._prompt_tokens = min(PROOF_TOKENS, self.max_context - 1)
        self._rng = np.random.default_rng(0)
        size = PROMPTS, min(RANDOM_TOKENS, self._prompt_tokens)
        self._random: list[IntArray] = list(self._rng.integers(0, self.vocabulary, size).astype(np.int32))
        self._changed = asyncio.Condition()
        self.is_awake = asyncio.Event()
        """Set unless the devices' memory is the trainer's."""

        self.is_awake.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing = asyncio.Lock()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why_lost = ""
        self.counts = {"lost": 0, "moved": 0, "proved": 0, "unchanged": 0, "undecidable": 0, "refused": 0}
        self.max_gap = 0.0

    # Replicas come and go

    async def begin(self) -> None:
        """Wait until all replicas can sample. Raises ConfigError for one that cannot be used."""
        try:
            await asyncio.gather(*(self._begin(replica, self._limit) for replica in self.replicas))
        except GatewayError as error:
            raise ConfigError(f"a replica cannot be used: {error.message}") from error
        for replica in self.replicas:
            self._in_background(self._watch(replica), f"watch {replica.name}")

    @property
    def _limit(self) -> float:
        """Seconds that all replicas may take to begin."""
        return self.load_s if self.config.launch.replicas else self.config.start_timeout_s

    async def failed(self) -> NoReturn:
        """Never returns; raises what broke the pool itself."""
        await asyncio.shield(self._failure)
        raise AssertionError("a pool has no result")

    async def _begin(self, replica: Replica, timeout_s: float) -> None:
        """Raises ConfigError, GatewayError, LostError and TimeoutError."""
        facts = await replica.begin(self.model_folder, timeout_s)
        logger.info("replica.probed name=%s facts=%s", replica.name, facts.describe())
        for canary in self._adapters:
            async with asyncio.timeout(self.prove_s):
                await self._try_canary(replica, canary)
        async with self._publishing:
            older = None
            for published in self._live:
                async with asyncio.timeout(self.prove_s):
                    # A server that was lost may have something else under this name.
                    await replica.retire(published.version, published.name)
                    await self._admit(replica, published, older)
                older = published
            replica.serving = True
        await self._tell()

    async def _try_canary(self, replica: Replica, canary: Path) -> None:
        began = time.monotonic()
        evidence = await self._compare(replica, self._start, canary, self._random)
        self._write(replica, None, canary.name, evidence, time.monotonic() - began)
        if evidence.verdict != "proved":
            raise ConfigError(
                f"{replica.name} at {replica.url} does not apply adapters as the trainer does: {canary.name} "
                f"changes one kind of module, and of what that changes in the trainer's log probabilities "
                f"{evidence.slope:.2f} ± {evidence.error:.2f} changed in the replica's"
            )
        await replica.retire(-1, canary.name)

    def lose(self, replica: Replica, why: str, *, hangs: bool = False) -> None:
        """Sample no more from a replica; begin with it again in the background."""
        if not replica.serving:
            return
        self.counts["lost"] += 1
        self._why_lost = f"{replica.name} {why}"
        self.note(f"{self._why_lost}; its model calls go to other replicas")
        replica.lose()
        for key in [key for key, pin in self._pins.items() if pin.replica is replica]:
            del self._pins[key]
        self._in_background(self._revive(replica, hangs=hangs), f"revive {replica.name}")

    async def _revive(self, replica: Replica, *, hangs: bool) -> None:
        timeout_s = self.load_s if replica.is_launched else self.config.start_timeout_s
        while True:
            if hangs:
                self.restart(replica)
            await self.is_awake.wait()
            try:
                await self._begin(replica, timeout_s)
                self.note(f"{replica.name} samples again")
                return
            except (ConfigError, GatewayError, LostError, TimeoutError) as error:
                why = f"{replica.name} is not back: {error or type(error).__name__}"
            if why != self._why_lost:
                self.note(why)
            self._why_lost = why
            hangs = True
            await asyncio.sleep(RESTART_RETRY_S)

    async def _watch(self, replica: Replica) -> None:
        """Lose the replica when its server does not respond, has requests and samples nothing, or has been
        started again: it counts its tokens from 0 then, and has its own weights."""
        pause = min(2.0, self.hang_s / 4)
        moved_at = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            if not replica.serving:
                moved_at = now
                continue
            why, before = "", replica.tokens
            try:
                sampled = await replica.tokens_sampled()
                if sampled < before:
                    self.lose(replica, "has been started again")
                if sampled != before or not replica.in_flight.total():
                    moved_at = now
                else:
                    why = f"has sampled nothing for {now - moved_at:.0f} s"
            except (GatewayError, TimeoutError) as error:
                why = f"has not responded for {now - moved_at:.0f} s ({error or type(error).__name__})"
            if time.monotonic() - moved_at > self.hang_s:
                self.lose(replica, why, hangs=True)

    # Versions

    async def publish(self, published: Published) -> None:
        """Load and prove a version on every replica that serves; `sample` may ask for it afterwards.

        A replica that does not prove it is lost. Raises EngineError if none has it and none comes back.
        """
        async with self._publishing:
            kept = self._live[-self.keep :]
            for each in [each for each in self._live if each not in kept and not self._held[each.version]]:
                self._live.remove(each)
                await self._retire(each)
            older = self._live[-1] if self._live else None
            serving = [replica for replica in self.replicas if replica.serving]
            for replica in serving:
                self._free_a_slot(replica)
            await asyncio.gather(*(self._try_to_admit(replica, published, older) for replica in serving))
            self._live.append(published)
        await self._some_replica(published)

    async def _try_to_admit(self, replica: Replica, published: Published, older: Published | None) -> None:
        try:
            async with asyncio.timeout(self.prove_s):
                await self._admit(replica, published, older)
        except TimeoutError:
            self.lose(replica, f"did not prove version {published.version} within {self.prove_s:g} s")
        except LostError as error:
            self.lose(replica, f"did not take version {published.version}: {error}", hangs=True)
        except GatewayError as error:
            self.lose(replica, f"did not take version {published.version}: {error}")

    async def _admit(self, replica: Replica, published: Published, older: Published | None) -> None:
        """Raises LostError if the replica has another version than `published`."""
        began = time.monotonic()
        prompts = list(self._recent) if len(self._recent) >= PROMPTS else self._random
        evidence = await self._compare(
            replica, older.folder if older else self._start, published.folder, prompts
        )
        self._write(replica, published.version, published.name, evidence, time.monotonic() - began)
        self.counts[evidence.verdict] += 1
        self.max_gap = max(self.max_gap, evidence.gap)
        if evidence.verdict == "undecidable" and self.counts["undecidable"] == 1:
            self.note(
                f"{replica.name}: version {published.version} changes less than rounding does, so only its "
                f"digest shows that it is what samples ({evidence}); replicas.jsonl has all checks"
            )
        if evidence.verdict == "refused":
            raise LostError(f"it samples from another version ({evidence})")
        replica.offer(published.version, published.name)

    async def _compare(
        self, replica: Replica, older: Path, newer: Path, prompts: Sequence[IntArray]
    ) -> Evidence:
        await replica.take(older)
        before = await replica.likeliest(older, prompts)
        await replica.take(newer)
        after = await replica.likeliest(newer, prompts)
        ids = [sorted(one.keys() & other.keys()) for one, other in zip(before, after, strict=True)]
        tokens = [np.array(each, np.int64) for each in ids]
        return judge(
            Scores(_chosen(before, ids), _chosen(after, ids)),
            Scores(await self.score(older, prompts, tokens), await self.score(newer, prompts, tokens)),
            exact=self.exact,
        )

    def _free_a_slot(self, replica: Replica) -> None:
        """Move the calls that hold the oldest adapters, if a new one would have to wait for them."""
        calls = replica.in_flight
        for version in sorted(calls)[: max(0, len(calls) + 1 - self.config.max_loras)]:
            self.counts["moved"] += calls[version]
            replica.abandon(version)

    async def _retire(self, published: Published) -> None:
        for replica in self.replicas:
            if replica.serving:
                try:
                    await replica.retire(published.version, published.name)
                except GatewayError as error:  # The watch decides whether it is lost.
                    logger.warning("replica.not_retired name=%s error=%s", replica.name, error)
        shutil.rmtree(published.folder)

    async def _some_replica(self, published: Published) -> None:
        """Wait until a replica samples from `published`. Raises EngineError if none comes back in time."""
        try:
            await self._least_loaded(
                asyncio.get_running_loop().time() + self._limit, version=published.version
            )
        except GatewayError as error:
            raise EngineError(f"version {published.version}: {error.message}") from None

    # Sharing devices with the trainer

    async def sleep(self) -> None:
        """Have the replicas give up their devices' memory. Calls wait until `wake`. A replica that does not
        serve is ended, as it has memory or is about to take it; it may be started again after `wake`."""
        self.is_awake.clear()
        await self._everywhere(Replica.sleep, "did not go to sleep")
        for replica in self.replicas:
            if not replica.serving:
                self.restart(replica)

    async def wake(self) -> None:
        """Let the replicas take their memory back, and sample."""
        await self._everywhere(Replica.wake, "did not wake up")
        self.is_awake.set()
        await self._tell()

    async def _everywhere(self, act: Callable[[Replica], Awaitable[None]], failure: str) -> None:
        async def one(replica: Replica) -> None:
            try:
                await act(replica)
            except GatewayError as error:
                self.lose(replica, f"{failure}: {error}", hangs=True)

        await asyncio.gather(*(one(replica) for replica in self.replicas if replica.serving))

    # Model calls

    async def announce(self, version: int) -> None:
        """`version`, which is published, may be sampled from."""
        self._newest = max(version, self._newest)
        await self._tell()

    def cut(self) -> None:
        for replica in self.replicas:
            replica.cut(self._newest)

    @contextmanager
    def hold(self) -> Generator[Sampler]:
        version = self._live[-1].version
        self._held[version] += 1
        try:
            yield HeldVersion(self, version)
        finally:
            self._held[version] -= 1

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        """By the newest version that may be sampled from, or the one that the episode finishes with.

        Raises GatewayError: 503 if no replica came back in time, and whatever a replica answers.
        """
        return await self.sample_by(request)

    async def sample_by(self, request: SampleRequest, held: int | None = None) -> SampleResult:
        """`sample`, or by the version `held`."""
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        failed: Replica | None = None
        while True:
            pin = await self._pin(request.affinity, deadline, avoid=failed, held=held)
            failed = pin.replica
            try:
                result = await pin.replica.sample(request, pin.version, is_held=held is not None)
            except LostError:
                continue
            except GatewayError as error:
                if error.status != 503:
                    raise
                self.lose(pin.replica, f"failed: {error.message}")
                continue
            self._remember(request, result)
            return result

    async def _pin(
        self, affinity: str, deadline: float, *, avoid: Replica | None = None, held: int | None = None
    ) -> Pin:
        """Where an episode's next call goes. Raises GatewayError 503."""
        pin = self._pins.get(affinity)
        if pin is None:
            replica = await self._least_loaded(deadline, version=held, avoid=avoid)
            pin = Pin(replica, self._newest if held is None else held)
            if affinity:
                self._unpin(affinity)  # Another call of the episode may have been faster.
                self._pins[affinity] = pin
                pin.replica.pinned += 1
                while len(self._pins) > PINS:
                    self._unpin(next(iter(self._pins)))
            return pin
        self._pins.move_to_end(affinity)
        if held is None and (self.config.on_publish != "finish" or pin.version not in self._versions):
            pin.version = self._newest
        if not self._may_sample(pin.replica, pin.version):
            self._unpin(affinity)
            return await self._pin(affinity, deadline, avoid=avoid, held=held)
        return pin

    @property
    def _versions(self) -> set[int]:
        return {published.version for published in self._live[-self.keep :]}

    def _may_sample(self, replica: Replica, version: int) -> bool:
        return self.is_awake.is_set() and replica.serving and version in replica.versions

    def _unpin(self, affinity: str) -> None:
        pin = self._pins.pop(affinity, None)
        if pin is not None:
            pin.replica.pinned -= 1

    async def _least_loaded(
        self, deadline: float, *, version: int | None = None, avoid: Replica | None = None
    ) -> Replica:
        """`version`: None for the newest, whatever that is by then."""

        def ready() -> list[Replica]:
            wanted = self._newest if version is None else version
            return [replica for replica in self.replicas if self._may_sample(replica, wanted)]

        try:
            async with asyncio.timeout_at(deadline), self._changed:
                await self._changed.wait_for(ready)
        except TimeoutError:
            message = f"no replica is available ({self._why_lost}); retry"
            raise GatewayError(503, "engine_unavailable", message) from None
        return min(ready(), key=lambda replica: (replica is avoid, *replica.load))

    def release(self, affinity: str) -> None:
        """An episode has ended."""
        self._unpin(affinity)

    def _remember(self, request: SampleRequest, result: SampleResult) -> None:
        """Keep a prompt from each sampled sequence: it ends at a random one of its tokens."""
        prompt = unpack_ids(request.prompt)
        for sequence in result.sequences[:1]:
            sampled = unpack_ids(sequence.sampled)
            end = int(self._rng.integers(0, max(1, len(sampled))))
            self._recent.append(np.concatenate([prompt, sampled[:end]])[-self._prompt_tokens :])

    # The rest

    def _write(
        self, replica: Replica, version: int | None, adapter: str, evidence: Evidence, seconds: float
    ) -> None:
        line = {
            "replica": replica.name,
            "version": version,
            "adapter": adapter,
            "verdict": evidence.verdict,
            "slope": _finite(evidence.slope),
            "error": _finite(evidence.error),
            "gap": _finite(evidence.gap),
            "tokens": evidence.tokens,
            "seconds": round(seconds, 3),
        }
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        logger.info("replica.evidence name=%s adapter=%s %s", replica.name, adapter, evidence)

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _in_background(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self._failure.done():
            self._failure.set_exception(error)

    async def aclose(self) -> None:
        """Cancel what runs, and close the connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure.done():
            self._failure.exception()  # Raised already, or too late to matter.
        await asyncio.gather(*(replica.aclose() for replica in self.replicas))


@dataclass(eq=False)
class HeldVersion(Sampler):
    """A version that the pool samples from, whatever is published later."""

    pool: ReplicaPool
    version: int

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        return await self.pool.sample_by(request, self.version)


def _chosen(likeliest: Sequence[dict[int, float]], ids: Sequence[list[int]]) -> list[FloatArray]:
    return [
        np.array([found[token] for token in chosen], np.float32)
        for found, chosen in zip(likeliest, ids, strict=True)
    ]


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else None

"""`ReplicaPool`: publishes each version of the weights to all replicas, and routes model calls to them.

A replica samples only from versions that pass the checks of docs/vllm.md#when-a-version-counts. A single
version samples a call. Unanswered calls of a lost replica are repeated elsewhere.
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

RECENT_PROMPTS = 32
PROOF_TOKENS = 512

PROMPTS, RANDOM_TOKENS = 16, 32

LOAD_S = 1800.0
"""Seconds to load the model. A replica's death is noticed at once."""

PROVE_S = 120.0
"""Seconds to load and prove a version; otherwise the replica is lost."""

HANG_S = 60.0
"""A replica with requests that samples nothing for so many seconds hangs."""

RESTART_RETRY_S = 1.0

Scorer = Callable[[Path, Sequence[IntArray], Sequence[NDArray[np.int64]]], Awaitable[list[FloatArray]]]
"""(weights folder, prompts int32 [P] each, next tokens int64 [N] each) -> the trainer's logprobs, float32 [N]
each.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Published:
    version: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass(slots=True)
class Pin:
    replica: Replica
    version: int


@dataclass(eq=False)
class ReplicaPool(Sampler):
    """Belongs to one event loop."""

    replicas: list[Replica]
    config: InferenceConfig
    keep: int
    """Newest versions to sample from. One more stays loaded."""

    model_folder: Path
    vocabulary: int
    max_context: int
    canaries: Sequence[Path]
    """The weights to start from, then adapters that exaggerate one kind of module each."""

    score: Scorer
    exact: bool
    restart: Callable[[Replica], None]
    record: Path
    note: Callable[[str], None]
    timeout_s: float
    load_s: float = LOAD_S
    prove_s: float = PROVE_S
    hang_s: float = HANG_S

    def __post_init__(self) -> None:
        self._start, *self._adapters = self.canaries
        self._live: list[Published] = []
        self._held = Counter[int]()  # Uses of versions beyond `keep`.

        self._newest = -1
        self._pins: OrderedDict[str, Pin] = OrderedDict()
        self._recent: deque[IntArray] = deque(maxlen=RECENT_PROMPTS)
        self._prompt_tokens = min(PROOF_TOKENS, self.max_context - 1)
        self._rng = np.random.default_rng(0)
        size = PROMPTS, min(RANDOM_TOKENS, self._prompt_tokens)
        self._random: list[IntArray] = list(self._rng.integers(0, self.vocabulary, size).astype(np.int32))
        self._changed = asyncio.Condition()
        self.is_awake = asyncio.Event()
        self.is_awake.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing = asyncio.Lock()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why_lost = ""
        self.counts = {"lost": 0, "moved": 0, "proved": 0, "unchanged": 0, "undecidable": 0, "refused": 0}
        self.max_gap = 0.0

    async def begin(self) -> None:
        """Wait until all replicas can sample."""
        try:
            await asyncio.gather(*(self._begin(replica, self._limit) for replica in self.replicas))
        except GatewayError as error:
            raise ConfigError(f"a replica cannot be used: {error.message}") from error
        for replica in self.replicas:
            self._in_background(self._watch(replica), f"watch {replica.name}")

    @property
    def _limit(self) -> float:
        return self.load_s if self.config.launch.replicas else self.config.start_timeout_s

    async def failed(self) -> NoReturn:
        await asyncio.shield(self._failure)
        raise AssertionError("a pool has no result")

    async def _begin(self, replica: Replica, timeout_s: float) -> None:
        facts = await replica.begin(self.model_folder, timeout_s)
        logger.info("replica.probed name=%s facts=%s", replica.name, facts.describe())
        for canary in self._adapters:
            async with asyncio.timeout(self.prove_s):
                await self._try_canary(replica, canary)
        async with self._publishing:
            older = None
            for published in self._live:
                async with asyncio.timeout(self.prove_s):
                    # A restarted server may have another version under this name.
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
                f"changes one kind of module, but the replica's logprobs show {evidence.slope:.2f} ± "
                f"{evidence.error:.2f} of the change in the trainer's"
            )
        await replica.retire(-1, canary.name)

    def lose(self, replica: Replica, why: str, *, hangs: bool = False) -> None:
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
                if sampled < before:  # A restart resets the counter, and loses the weights.
                    self.lose(replica, "has been started again")
                if sampled != before or not replica.in_flight.total():
                    moved_at = now
                else:
                    why = f"has sampled nothing for {now - moved_at:.0f} s"
            except (GatewayError, TimeoutError) as error:
                why = f"has not responded for {now - moved_at:.0f} s ({error or type(error).__name__})"
            if time.monotonic() - moved_at > self.hang_s:
                self.lose(replica, why, hangs=True)

    async def publish(self, published: Published) -> None:
        """Load and prove a version on every serving replica. Those that fail are lost.

        Raises EngineError if no replica has the version.
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
                f"{replica.name}: version {published.version} changes less than rounding does, so only the "
                f"digest of its files proves which weights sample ({evidence}); replicas.jsonl has all checks"
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
        calls = replica.in_flight
        for version in sorted(calls)[: max(0, len(calls) + 1 - self.config.max_loras)]:
            self.counts["moved"] += calls[version]
            replica.abandon(version)

    async def _retire(self, published: Published) -> None:
        for replica in self.replicas:
            if replica.serving:
                try:
                    await replica.retire(published.version, published.name)
                except GatewayError as error:
                    logger.warning("replica.not_retired name=%s error=%s", replica.name, error)
        shutil.rmtree(published.folder)

    async def _some_replica(self, published: Published) -> None:
        try:
            await self._least_loaded(
                asyncio.get_running_loop().time() + self._limit, version=published.version
            )
        except GatewayError as error:
            raise EngineError(f"version {published.version}: {error.message}") from None

    async def sleep(self) -> None:
        """Make replicas release memory, and kill those that do not serve yet. Calls wait until `wake`."""
        self.is_awake.clear()
        await self._everywhere(Replica.sleep, "did not go to sleep")
        for replica in self.replicas:
            if not replica.serving:
                self.restart(replica)

    async def wake(self) -> None:
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

    async def announce(self, version: int) -> None:
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
        """Sample from the newest announced version, or the episode's.

        Raises GatewayError: 503 if no replica is available in time, or the replica's own.
        """
        return await self.sample_by(request)

    async def sample_by(self, request: SampleRequest, held: int | None = None) -> SampleResult:
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
        pin = self._pins.get(affinity)
        if pin is None:
            replica = await self._least_loaded(deadline, version=held, avoid=avoid)
            pin = Pin(replica, self._newest if held is None else held)
            if affinity:
                self._unpin(affinity)
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
        self._unpin(affinity)

    def _remember(self, request: SampleRequest, result: SampleResult) -> None:
        """Keep a prompt for proofs, which ends at a random token of the reply."""
        prompt = unpack_ids(request.prompt)
        for sequence in result.sequences[:1]:
            sampled = unpack_ids(sequence.sampled)
            end = int(self._rng.integers(0, max(1, len(sampled))))
            self._recent.append(np.concatenate([prompt, sampled[:end]])[-self._prompt_tokens :])

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
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure.done():
            self._failure.exception()  # Keeps asyncio from logging it.
        await asyncio.gather(*(replica.aclose() for replica in self.replicas))


@dataclass(eq=False)
class HeldVersion(Sampler):
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
    return value if math.isfinite(value) else None

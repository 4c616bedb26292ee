"""The pool of replicas: who gets a call, what a version has to show, and what happens to those that fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from interchange_helpers import until
from tinkerscript.config import InferenceConfig
from tinkerscript.errors import EngineError, GatewayError
from tinkerscript.gateway.samplers.vllm import VllmServer
from tinkerscript.rollouts.call import FloatArray, IntArray, pack_ids, pack_logprobs
from tinkerscript.sampler import SampledSequence, SampleRequest, SampleResult
from tinkerscript.train.replicas.pool import Published, ReplicaPool
from tinkerscript.train.replicas.replica import Replica

VOCABULARY = 50
REQUEST = SampleRequest(prompt=pack_ids([1, 2, 3]), max_tokens=4, affinity="evaluation")


def logprobs(adapter: str, prompt: IntArray) -> NDArray[np.float64]:
    """What a model with this adapter says next, [VOCABULARY]."""
    base = np.random.default_rng(abs(int(prompt.sum()))).normal(0, 2, VOCABULARY)
    change = np.random.default_rng(sum(adapter.encode())).normal(0, 0.5, VOCABULARY)
    if adapter.startswith("canary-none"):
        change[:] = 0
    logits = base + change
    return logits - np.log(np.exp(logits).sum())


class ScriptedReplica(Replica):
    """Samples from `logprobs`; its faults are set by tests."""

    def __init__(self, name: str, config: InferenceConfig) -> None:
        super().__init__(name, f"http://{name}.invalid", config, timeout_s=5)
        self.lies: dict[str, str] = {}
        """Adapter -> the one that answers in its place."""

        self.answer: Callable[[int], Awaitable[None]] | None = None
        """Awaited by a call of a version before it is answered."""

        self.up = True
        self.began = 0
        self.waits_s = 0.0
        self.slow = asyncio.Event()
        self.slow.set()
        self.sampled = 0

    def check_up(self) -> None:
        if not self.up:
            raise GatewayError(503, "engine_unavailable", "down")

    def hang(self) -> asyncio.Event:
        """Calls are not answered any more; the event is set when one comes."""
        asked = asyncio.Event()

        async def answer(version: int) -> None:
            asked.set()
            await asyncio.Event().wait()

        self.answer = answer
        return asked

    async def begin(self, model_folder: Path, timeout_s: float) -> Any:
        self.began += 1
        self.tokens = 0.0
        self.waits_s = timeout_s
        self.check_up()
        return self

    def describe(self) -> str:
        return self.name

    async def likeliest(self, folder: Path, prompts: Sequence[IntArray]) -> list[dict[int, float]]:
        adapter = folder.name
        await self.slow.wait()
        self.check_up()
        answering = self.lies.get(adapter, adapter)
        rows = [logprobs(answering, prompt) for prompt in prompts]
        return [{int(i): float(row[i]) for i in np.argsort(row)[-20:]} for row in rows]

    def offer(self, version: int, adapter: str) -> None:
        self._samplers[version] = Answers(self, version)  # type: ignore[assignment]

    async def retire(self, version: int, adapter: str) -> None:
        self._samplers.pop(version, None)

    async def tokens_sampled(self) -> float:
        self.check_up()
        self.tokens = float(self.sampled)
        return self.tokens


class Answers:
    """Stands for the `RemoteSampler` of one version."""

    def __init__(self, replica: ScriptedReplica, version: int) -> None:
        self._replica, self._version = replica, version

    def uncut(self) -> Answers:
        return self

    async def sample(self, request: SampleRequest) -> SampleResult:
        if self._replica.answer is not None:
            await self._replica.answer(self._version)
        self._replica.check_up()
        self._replica.sampled += 1
        sequence = SampledSequence(
            sampled=pack_ids([4, 5]), logprobs=pack_logprobs([-1.0, -1.0]), stop_reason="stop"
        )
        return SampleResult(sequences=[sequence], policy_version=self._version)


class Bench:
    """A pool of scripted replicas over adapters on disk."""

    def __init__(
        self,
        folder: Path,
        number: int,
        live: int = 1,
        *,
        limits: dict[str, float] | None = None,
        **settings: Any,
    ) -> None:
        self.config = InferenceConfig(backend="vllm", **{"start_timeout_s": 2, **settings})
        self.folder = folder
        self.replicas = [ScriptedReplica(f"replica {i}", self.config) for i in range(number)]
        self.restarted: list[str] = []
        self.notes: list[str] = []
        canaries = [self.adapter("canary-none", 0), self.adapter("canary-q_proj", 0)]
        self.pool = ReplicaPool(
            self.replicas,
            self.config,
            keep=live,
            model_folder=folder,
            vocabulary=VOCABULARY,
            max_context=100,
            canaries=canaries,
            score=self.score,
            exact=True,
            restart=self.restart,
            record=folder / "replicas.jsonl",
            note=self.notes.append,
            timeout_s=5,
            **{"hang_s": 30, **(limits or {})},
        )

    def adapter(self, name: str, version: int) -> Path:
        path = self.folder / f"{name}-{version}"
        path.mkdir()
        return path

    async def score(
        self, folder: Path, prompts: Sequence[IntArray], tokens: Sequence[NDArray[np.int64]]
    ) -> list[FloatArray]:
        return [
            logprobs(folder.name, prompt)[chosen].astype(np.float32)
            for prompt, chosen in zip(prompts, tokens, strict=True)
        ]

    def restart(self, replica: Replica) -> None:
        self.restarted.append(replica.name)

    async def publish(self, version: int) -> None:
        await self.pool.publish(Published(version, self.adapter("policy", version)))

    async def ask(self, version: int, episode: str = "") -> int:
        """The version that answers a call."""
        request = SampleRequest(prompt=REQUEST.prompt, max_tokens=4, affinity=episode)
        await self.pool.announce(version)
        return (await self.pool.sample(request)).policy_version

    def proofs(self) -> list[tuple[str, int | None, str]]:
        lines = (self.folder / "replicas.jsonl").read_text().splitlines()
        return [(e["replica"], e["version"], e["verdict"]) for e in map(json.loads, lines)]


@asynccontextmanager
async def bench(folder: Path, number: int = 2, *, live: int = 1, **settings: Any) -> AsyncIterator[Bench]:
    made = Bench(folder, number, live, **settings)
    try:
        await made.pool.begin()
        yield made
    finally:
        await made.pool.aclose()


async def test_a_replica_that_does_not_apply_a_kind_of_module_is_refused(tmp_path: Path) -> None:
    made = Bench(tmp_path, 1)
    made.replicas[0].lies["canary-q_proj-0"] = "canary-none-0"
    with pytest.raises(Exception, match=r"does not apply adapters as the trainer does: canary-q_proj-0"):
        await made.pool.begin()
    await made.pool.aclose()


async def test_the_previous_version_in_the_place_of_a_new_one_does_not_sample(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.publish(0)
        made.replicas[1].lies["policy-1"] = "policy-0"
        await made.publish(1)
        assert ("replica 1", 1, "refused") in made.proofs()
        assert not made.replicas[1].serving
        answers = await asyncio.gather(*(made.ask(1, f"e{i}") for i in range(8)))
        assert set(answers) == {1}
        assert made.replicas[1].sampled == 0
        refused = ("replica 1", 1, "refused")
        await until(lambda: made.proofs().count(refused) >= 2, "it is asked again, and refused again")
        assert made.restarted
        del made.replicas[1].lies["policy-1"]
        await until(lambda: made.replicas[1].serving)
        assert made.notes[-1] == "replica 1 samples again"


async def test_an_episode_stays_with_its_replica_and_others_go_where_less_is_to_do(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.publish(0)
        for _ in range(5):
            for episode in ("a", "b", "c", "d"):
                await made.ask(0, episode)
        assert [replica.sampled for replica in made.replicas] == [10, 10]
        assert [replica.pinned for replica in made.replicas] == [2, 2]
        for episode in ("a", "b", "c", "d"):
            made.pool.release(episode)
        assert [replica.pinned for replica in made.replicas] == [0, 0]


@pytest.mark.parametrize(("on_publish", "second"), [("move", 1), ("finish", 0), ("continue", 1)])
async def test_an_episode_moves_or_finishes_with_its_version(
    tmp_path: Path, on_publish: str, second: int
) -> None:
    live = 2 if on_publish == "finish" else 1
    async with bench(tmp_path, live=live, on_publish=on_publish) as made:
        await made.publish(0)
        assert await made.ask(0, "a") == 0
        await made.publish(1)
        assert await made.ask(1, "a") == second
        assert await made.ask(1, "b") == 1
        await made.publish(2)
        assert await made.ask(2, "a") == 2, "what version 0 samples does not train any more"
        await made.publish(3)  # Version 0 is not held any more.
        assert not (tmp_path / "policy-0").exists()


@pytest.mark.parametrize("on_publish", ["move", "finish", "continue"])
async def test_a_version_that_is_held_is_sampled_from_whatever_is_published(
    tmp_path: Path, on_publish: str
) -> None:
    async with bench(tmp_path, on_publish=on_publish) as b:
        await b.publish(0)
        await b.pool.announce(0)
        with b.pool.hold() as sampler:
            for version in (1, 2, 3):
                await b.publish(version)
                assert await b.ask(version) == version
                assert (await sampler.sample(REQUEST)).policy_version == 0
            for replica in b.replicas:
                assert replica.versions == [0, 2, 3], "no others"
            b.pool.lose(b.replicas[0], "died")  # It has to load it again.
            await until(lambda: b.replicas[0].serving)
            assert {(await sampler.sample(REQUEST)).policy_version for _ in range(4)} == {0}
        await b.publish(4)
        assert {tuple(replica.versions) for replica in b.replicas} == {(3, 4)}


async def test_a_version_that_is_not_confirmed_yet_is_not_sampled_from(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.publish(0)
        await made.publish(1)
        assert await made.ask(0) == 0, "version 1 is not in the ledger yet"
        assert await made.ask(1) == 1
        assert await made.ask(0) == 1, "an older sampler gets what the newest one got"


async def test_a_call_that_a_replica_loses_is_answered_by_another(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        await made.publish(0)
        first, second = made.replicas
        asked = first.hang()
        call = asyncio.create_task(made.ask(0, "a"))
        await asked.wait()
        first.answer = None
        first.up = False
        made.pool.lose(first, "died (exit code -9)")
        assert await call == 0
        assert second.sampled == 1
        assert made.notes[0] == "replica 0 died (exit code -9); its model calls go to other replicas"
        await until(lambda: made.notes[1:] == ["replica 0 is not back: down"], "it says so once")
        first.up = True
        await until(lambda: first.serving)
        assert await made.ask(0, "b") == 0
        assert first.sampled == 1, "it has fewer episodes"


async def test_a_replica_that_refuses_connections_is_lost_and_one_that_refuses_a_request_is_not(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path, 1) as made:
        await made.publish(0)

        async def refuse(version: int) -> None:
            raise GatewayError(400, "context_length_exceeded", "too long")

        made.replicas[0].answer = refuse
        with pytest.raises(GatewayError, match="too long"):
            await made.ask(0)
        assert made.replicas[0].serving
        made.replicas[0].answer = None
        made.replicas[0].up = False
        call = asyncio.create_task(made.ask(0))
        await until(lambda: bool(made.notes))
        assert made.notes[0] == "replica 0 failed: down; its model calls go to other replicas"
        made.replicas[0].up = True
        assert await call == 0


async def test_a_replica_that_samples_nothing_is_restarted(tmp_path: Path) -> None:
    async with bench(tmp_path, limits={"hang_s": 0.2}) as made:
        await made.publish(0)
        first, second = made.replicas
        asked = first.hang()
        assert await made.ask(0, "a") == 0
        assert asked.is_set()
        assert second.sampled == 1
        assert made.restarted == ["replica 0"]
        assert "replica 0 has sampled nothing for " in made.notes[0]


async def test_a_replica_that_was_started_again_by_others_begins_again(tmp_path: Path) -> None:
    async with bench(tmp_path, 1, limits={"hang_s": 0.2}) as made:
        await made.publish(0)
        (replica,) = made.replicas
        replica.sampled = 5
        await until(lambda: replica.tokens == 5)
        replica.sampled = 0
        await until(lambda: replica.began == 2 and replica.serving)
        assert made.notes[0] == ("replica 0 has been started again; its model calls go to other replicas")
        assert made.restarted == []


async def test_a_replica_that_does_not_prove_in_time_is_lost_and_the_others_publish(tmp_path: Path) -> None:
    async with bench(tmp_path, limits={"prove_s": 0.2}) as made:
        await made.publish(0)
        made.replicas[0].slow.clear()
        await made.publish(1)
        assert made.notes[0].startswith("replica 0 did not prove version 1 within 0.2 s")
        assert await made.ask(1) == 1
        made.replicas[0].slow.set()
        await until(lambda: made.replicas[0].serving)
        assert made.replicas[0].versions == [0, 1]


async def test_calls_of_the_oldest_adapter_move_before_a_new_one_would_wait_for_them(tmp_path: Path) -> None:
    async with bench(tmp_path, 1, max_loras=2) as made:
        held, asked = asyncio.Event(), list[int]()

        async def hold(version: int) -> None:
            asked.append(version)
            if len(asked) < 3:
                await held.wait()

        await made.publish(0)
        made.replicas[0].answer = hold
        oldest = asyncio.create_task(made.ask(0, "a"))
        await until(lambda: len(asked) == 1)
        await made.publish(1)
        newer = asyncio.create_task(made.ask(1, "b"))
        await until(lambda: len(asked) == 2)
        await made.publish(2)
        assert await oldest == 1, "the newest that a sampler asked for"
        assert made.pool.counts["moved"] == 1
        held.set()
        assert await newer == 1


async def test_a_launched_replica_that_died_has_time_to_start_again(tmp_path: Path) -> None:
    async with bench(tmp_path, limits={"load_s": 77}) as made:
        await made.publish(0)
        made.replicas[0].is_launched = True
        for replica in made.replicas:
            made.pool.lose(replica, "died (exit code -9)")
        await until(lambda: all(replica.serving for replica in made.replicas))
        assert [replica.waits_s for replica in made.replicas] == [77, 2]
        assert made.restarted == [], "its supervisor starts it again"


async def test_a_replica_that_is_not_back_when_the_others_sleep_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as made:
        await made.publish(0)
        first, second = made.replicas

        async def done(server: VllmServer) -> None:
            pass

        monkeypatch.setattr(VllmServer, "sleep", done)
        monkeypatch.setattr(VllmServer, "wake", done)
        first.up = False
        made.pool.lose(first, "died (exit code -9)")
        await until(lambda: made.notes[1:] == ["replica 0 is not back: down"])
        made.restarted.clear()
        await made.pool.sleep()
        assert made.restarted[0] == "replica 0"
        assert second.name not in made.restarted
        assert not made.pool.is_awake.is_set(), "so that nothing is started yet"
        first.up = True
        await made.pool.wake()
        await until(lambda: first.serving)


async def test_no_replica_is_an_error_that_says_why(tmp_path: Path) -> None:
    async with bench(tmp_path, 1, start_timeout_s=0.3) as made:
        await made.publish(0)
        made.replicas[0].up = False
        with pytest.raises(EngineError, match=r"version 1: no replica is available \(replica 0"):
            await made.publish(1)


async def test_what_breaks_the_pool_itself_is_raised(tmp_path: Path) -> None:
    async with bench(tmp_path, 1) as made:
        failed = asyncio.create_task(made.pool.failed())

        async def broken() -> float:
            raise RuntimeError("a fault of ours")

        made.replicas[0].tokens_sampled = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await asyncio.wait_for(failed, 10)

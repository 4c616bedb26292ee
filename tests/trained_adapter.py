"""An engine that trains by hand, and the replicas that sample from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker

from run_ledger import KeptRows
from small_models import sft_datum
from tinkerscript.config import RunConfig
from tinkerscript.engine.embedded import EmbeddedEngine
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import pack_ids, unpack_ids, unpack_logprobs
from tinkerscript.sampler import SampledSequence, SampleRequest
from tinkerscript.train.backends.embedded_engine import EmbeddedBackend
from tinkerscript.train.policy import Policy
from tinkerscript.train.replicas.pool import HANG_S, PROVE_S, ReplicaPool
from tinkerscript.train.replicas.publisher import PROOFS, ReplicaPublisher, named, open_replicas

PROMPT = [5, 9, 13, 21, 34]


@dataclass
class Trained:
    folder: Path
    engine: EmbeddedEngine
    client: Any
    publisher: ReplicaPublisher
    notes: list[str]

    @property
    def pool(self) -> ReplicaPool:
        return self.publisher.pool

    async def step(self, learning_rate: float) -> None:
        rng = np.random.default_rng(3)
        data = [sft_datum(rng.integers(5, 400, 24)) for _ in range(8)]
        await self.client.forward_backward(data, "cross_entropy")
        await self.client.optim_step(tinker.AdamParams(learning_rate=learning_rate))

    async def written(self, version: int) -> Path:
        """The current adapter's folder, not published."""
        fresh = self.folder / "adapters" / "new"
        fresh.mkdir(parents=True)
        await self.engine.write_weights(fresh)
        return named(fresh, f"policy-by_hand-{version}")

    async def ask(self, version: int, *, max_tokens: int = 8, episode: str = "") -> int:
        """The version that samples a call."""
        await self.pool.announce(version)
        return (await self.pool.sample(self._request(max_tokens, affinity=episode))).policy_version

    def _request(self, max_tokens: int, **more: Any) -> SampleRequest:
        """With a stop id of its own, which is hardly ever sampled, an answer has all its tokens."""
        stop_ids = [self.engine.vocabulary - 1]
        return SampleRequest(prompt=pack_ids(PROMPT), max_tokens=max_tokens, stop_token_ids=stop_ids, **more)

    async def fly(
        self, publications: int, max_tokens: int, begun: Callable[[int], Awaitable[None]]
    ) -> tuple[SampledSequence, float]:
        """A call that new weights go on with, each published when `begun(version)` says that the version
        before it has sampled some, and the largest difference of a log probability to the trainer's."""
        policy = Policy(self.publisher, KeptRows(), in_flight=True)
        await policy.publish()
        scorers = [await self.engine.create_sampling_client()]
        call = asyncio.create_task(policy.sample(self._request(max_tokens)))
        for version in range(1, publications + 1):
            waiting = asyncio.ensure_future(begun(version))
            await asyncio.wait([call, waiting], return_when=asyncio.FIRST_COMPLETED)
            assert not call.done(), call.result()
            await waiting
            await self.step(1e-3)
            await policy.publish(version)
            scorers.append(await self.engine.create_sampling_client())
        await begun(publications + 1)
        (sequence,) = (await call).sequences
        ids = unpack_ids(sequence.sampled).tolist()
        known = tinker.ModelInput.from_ints([*PROMPT, *ids])
        scores = [(await each.compute_logprobs(known))[len(PROMPT) :] for each in scorers]
        sampled_by, firsts = zip(*sequence.spans, strict=True)
        versions = np.repeat(sampled_by, np.diff([*firsts, len(ids)]))
        wanted = np.array([scores[version][at] for at, version in enumerate(versions)])
        return sequence, float(np.abs(unpack_logprobs(sequence.logprobs) - wanted).max())

    def folder_of(self, version: int) -> Path:
        """Of a published version."""
        (found,) = (self.folder / "adapters").glob(f"policy-*-{version}-*")
        return found

    def verdicts(self, version: int) -> list[str]:
        lines = [json.loads(line) for line in (self.folder / PROOFS).read_text().splitlines()]
        return [line["verdict"] for line in lines if line["version"] == version]


@asynccontextmanager
async def trained(
    folder: Path,
    urls: list[str],
    *,
    dtype: str = "float32",
    rank: int = 8,
    prove_s: float = PROVE_S,
    hang_s: float = HANG_S,
    targets: Sequence[str] = ("attn", "mlp", "unembed"),
    **inference: Any,
) -> AsyncIterator[Trained]:
    """The tiny model; `folder`: the run's; `urls`: of the replicas, which serve it as `base`. With fewer
    `targets`, fewer canaries are tried when a replica begins."""
    lora = {"rank": rank, "targets": [*targets]}
    config = RunConfig.model_validate(
        {
            "engine": {"model": str(TINY_MODEL), "dtype": dtype, "lora": lora},
            "inference": {
                **{"backend": "vllm", "replicas": urls, "model": "base", "max_loras": 3},
                **{"start_timeout_s": 60, **inference},
            },
            "training": {"max_policy_lag": 1},
        }
    )
    notes: list[str] = []
    async with AsyncExitStack() as stack:
        model = Path(config.engine.model)
        opening = EmbeddedBackend.open(
            config.engine, model, checkpoint_dir=folder / "c", seed=1, note=notes.append
        )
        opened = await stack.enter_async_context(opening)
        await opened.start()
        publisher = await stack.enter_async_context(
            open_replicas(config, folder, opened, notes.append, prove_s=prove_s, hang_s=hang_s)
        )
        yield Trained(folder, opened.engine, opened.client, publisher, notes)

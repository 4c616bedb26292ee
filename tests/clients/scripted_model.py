"""`ScriptedModel`: the sampler behind the clients; it tells the story in random spellings and logs all of it.

Its log is the oracle of these tests: what is not in it was not sampled.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import story
from spelling import Speller

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import TokenConstraint, pack_ids, pack_logprobs, unpack_ids
from tinkerscript.sampler import (
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.testing import token_by_token
from tinkerscript.tokenizer import LightTokenizer

END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Logged:
    """One sequence as it was sampled; ids are int32 bytes, log probabilities float32 bytes."""

    prompt: bytes
    sampled: bytes
    logprobs: bytes


class ScriptedModel(Sampler):
    """Answers by the story."""

    def __init__(self, model: Path, *, seed: int) -> None:
        self._tokenizer = LightTokenizer(model)
        self._rng = random.Random(seed)
        self._speller = Speller(self._tokenizer, self._rng)
        self.log: list[Logged] = []
        self.requests: list[SampleRequest] = []
        self.refusals = 0
        """Requests that are to be refused with 503 before the next is answered."""

        self.hangs = False
        """Whether the next request stops halfway and waits until it is cancelled."""

    def reset(self) -> None:
        """Forget what was logged."""
        self.log.clear()
        self.requests.clear()
        self.refusals = 0
        self.hangs = False

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.requests.append(request)
        if self.refusals:
            self.refusals -= 1
            raise GatewayError(503, "engine_unavailable", "refused once, to be asked again")
        text = story.answer(self._tokenizer.decode(unpack_ids(request.prompt).tolist()))
        sequences = [self._sequence(text, request) for _ in range(request.num_samples)]
        if progress is not None:
            reports = list(token_by_token(sequences))
            for number, report in enumerate(reports):
                if self.hangs and number > len(reports) // 2:
                    self.hangs = False
                    await asyncio.Event().wait()
                progress(report)
                await asyncio.sleep(0)
        self.log += [Logged(request.prompt, each.sampled, each.logprobs) for each in sequences]
        return SampleResult(sequences=sequences, policy_version=0, logprob_kind="processed")

    def _sequence(self, text: str, request: SampleRequest) -> SampledSequence:
        ids = self._speller.spell(text + END)
        whole = len(ids) <= request.max_tokens
        ids = ids[: request.max_tokens]
        return SampledSequence(
            sampled=pack_ids(ids),
            logprobs=pack_logprobs([-self._rng.uniform(0.001, 9) for _ in ids]),
            stop_reason="stop" if whole else "length",
            # The story keeps to what a request asks for by itself.
            constrained=bytes([TokenConstraint.NONE] * len(ids)) if request.constraint else b"",
        )

"""A sampler of random, non-canonical tokens that keeps a log: the oracle of the tests of the gateway."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from tinkerscript.errors import GatewayError
from tinkerscript.rollouts.call import StopReason, pack_ids, pack_logprobs
from tinkerscript.sampler import (
    Progress,
    ProgressCallback,
    SampledSequence,
    Sampler,
    SampleRequest,
    SampleResult,
)
from tinkerscript.tokenizer import LightTokenizer
from tiny_tokenizer import MARKERS, SPECIAL

KINDS = ("text", "text", "reasoning", "tool", "reasoning tool", "open reasoning", "broken tool", "anything")


@dataclass(frozen=True)
class Sampled:
    """What the sampler gave for one sequence."""

    prompt: bytes
    sampled: bytes
    logprobs: bytes


class RandomSampler(Sampler):
    """Random words, reasoning and tool calls, spelled in random tokens."""

    def __init__(self, tokenizer: LightTokenizer, rng: random.Random) -> None:
        self._rng = rng
        self._tokenizer = tokenizer
        self._marker = {text: tokenizer.convert_tokens_to_ids(text) or -1 for text in (*SPECIAL, *MARKERS)}
        self._ends = [self._marker["<|im_end|>"], self._marker["<|endoftext|>"]]
        markers = set(self._marker.values())
        self._words = [token for token in range(tokenizer.vocab_size) if token not in markers]
        pieces = ((token, tokenizer.token_bytes(token)) for token in self._words)
        self._pieces = {bytes(piece): token for token, piece in pieces if piece}
        self.log: list[Sampled] = []
        """All that was given back, in order."""

        self.gate: asyncio.Event | None = None
        """Requests wait for it, if it is there."""

        self.at_gate = asyncio.Event()

        self.failures = 0
        """So many next requests fail."""

        self.started = 0

    async def sample(self, request: SampleRequest, progress: ProgressCallback | None = None) -> SampleResult:
        self.started += 1
        if self.failures:
            self.failures -= 1
            raise GatewayError(503, "engine_away", "the engine is away")
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        if self.gate:
            self.at_gate.set()
            await self.gate.wait()
        sequences = [self._sequence(request) for _ in range(request.num_samples)]
        if progress:
            await self._report(sequences, progress)
        self.log += [Sampled(request.prompt, each.sampled, each.logprobs) for each in sequences]
        return SampleResult(sequences=sequences, policy_version=7)

    async def _report(self, sequences: list[SampledSequence], progress: ProgressCallback) -> None:
        """Some of what was sampled, in pieces, some of them twice."""
        for index, each in enumerate(sequences):
            for start in range(0, len(each.sampled) // 4, 3):
                for _ in range(self._rng.randrange(3)):
                    span = slice(4 * start, 4 * (start + 3))
                    sampled, logprobs = each.sampled[span], each.logprobs[span]
                    progress(Progress(index=index, offset=start, sampled=sampled, logprobs=logprobs))
            await asyncio.sleep(0)

    def _sequence(self, request: SampleRequest) -> SampledSequence:
        ids = self._ids()
        stop_reason: StopReason = "stop"
        if len(ids) > request.max_tokens:
            ids, stop_reason = ids[: request.max_tokens], "length"
        logprobs = pack_logprobs([-self._rng.random() for _ in ids])
        return SampledSequence(sampled=pack_ids(ids), logprobs=logprobs, stop_reason=stop_reason)

    def _ids(self) -> list[int]:
        rng, marker = self._rng, self._marker
        kind = rng.choice(KINDS)
        ids: list[int] = []
        if "reasoning" in kind:
            ids += [marker["<think>"], *self._text(4)]
            ids += [marker["</think>"], *self._spell("\n\n")] if "open" not in kind else []
        if "tool" not in kind or rng.random() < 0.5:
            ids += self._text(6)
        for _ in range(rng.choice((1, 1, 2)) if "tool" in kind else 0):
            arguments = f'{{"a": {rng.randrange(3)}, "b": "{rng.choice("xyé")}"}}'
            text = f'\n{{"name": "{rng.choice(("add", "sub"))}", "arguments": {arguments}}}\n'
            text = text[:-4] if "broken" in kind else text
            ids += [marker["<tool_call>"], *self._spell(text), marker["</tool_call>"]]
        if kind == "anything":
            allowed = [token for token in marker.values() if token not in self._ends]
            ids += rng.choices(allowed + self._words[:20], k=rng.randrange(8))
        return [*ids, rng.choice(self._ends)]

    def _text(self, most: int) -> list[int]:
        """Any bytes at all, or words that come up often."""
        if self._rng.random() < 0.5:
            return self._spell(self._rng.choice(("ok", "yes", "hello", " no \n", "")))
        return self._rng.choices(self._words, k=self._rng.randrange(most + 1))

    def _spell(self, text: str) -> list[int]:
        """`text` in tokens of random length."""
        data, ids = text.encode(), list[int]()
        while data:
            sizes = [size for size in range(1, 5) if data[:size] in self._pieces and size <= len(data)]
            size = self._rng.choice(sizes)
            ids.append(self._pieces[data[:size]])
            data = data[size:]
        return ids

"""Probes an inference server's behavior before an episode depends on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.samplers.vllm import VLLM_REMEDIES, ServerDescription, ServerSample, VllmServer
from tinkerscript.rollouts.call import LogprobKind, pack_ids
from tinkerscript.sampler import SampleRequest

PROBE_TOP = 5  # OpenAI's limit.
HOT = 2.0
CLEAR_GAP = 0.3  # Nats between two tokens.
RATIO_MARGIN = 0.15  # Low-precision kernels add noise.
SAMPLES = 4
TOKENS = 32
MAX_MEAN_GAP = 0.1  # In nats: prefill and decode differ.


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    version: str
    model: str
    max_context: int
    logprob_kind: LogprobKind
    rescored: bool  # Sampled tokens had the same logprobs in a prompt.
    weight_version: str | None

    def describe(self) -> str:
        rescored = "rescored" if self.rescored else "not rescored (the server scores no prompts)"
        return (
            f"vLLM {self.version} at {self.url}, model {self.model!r}, context {self.max_context}, "
            f"logprobs {self.logprob_kind}, {rescored}"
        )


@dataclass
class Probe:
    server: VllmServer
    model: str
    prompts: Sequence[list[int]]

    async def run(
        self, description: ServerDescription, *, text: str = "", ids: Sequence[int] = (), rescore: bool = True
    ) -> ServerFacts:
        """`ids`: `text` by our tokenizer."""
        try:
            await self._check_not_logits()
            kind = await self._logprob_kind()
            rescored = await self._rescore() if rescore else False
            await self._check_stop_token()
            await self._check_tokenizer(text, list(ids))
            return ServerFacts(
                url=self.server.url,
                version=description.version,
                model=self.model,
                max_context=description.max_context,
                logprob_kind=kind,
                rescored=rescored,
                weight_version=description.weight_version,
            )
        except GatewayError as error:
            raise ConfigError(f"{self._name}: {error.message}") from error

    async def _check_not_logits(self) -> None:
        sample = await self._one(max_tokens=4)
        if any(value > 1e-3 for value in sample.logprobs):
            raise self._missing("its log probabilities are above zero: these are logits", "logits")

    async def _logprob_kind(self) -> LogprobKind:
        # A higher temperature shrinks the gap between two tokens, unless logprobs ignore it.
        for prompt in self.prompts:
            cold = await self._top(prompt, 1.0)
            hot = await self._top(prompt, HOT)
            if sum(math.exp(value) for value in cold.values()) > 1.01:
                raise self._missing("its probabilities add up to more than 1: these are logits", "logits")
            common = sorted(cold.keys() & hot.keys(), key=cold.__getitem__)
            common = [token for token in common if min(cold[token], hot[token]) > -1000]
            if len(common) < 2 or (gap := cold[common[-1]] - cold[common[0]]) < CLEAR_GAP:
                continue
            ratio = (hot[common[-1]] - hot[common[0]]) / gap
            if abs(ratio - 1) < RATIO_MARGIN:
                return "raw"
            if abs(ratio - 1 / HOT) < RATIO_MARGIN:
                return "processed"
        return "unknown"

    async def _rescore(self) -> bool:
        # A sampled token's logprob must not be its neighbor's or the most likely token's.
        is_scored = False
        for number in range(SAMPLES):
            prompt = self.prompts[number % len(self.prompts)]
            sample = await self._one(prompt, max_tokens=TOKENS)
            scores = await self._scores(prompt, sample)
            is_scored |= bool(scores)
            if not scores or (gap := _mean_gap(sample.logprobs, scores)) <= MAX_MEAN_GAP:
                continue
            shifted = len(scores) > 1 and _mean_gap(sample.logprobs[1:], scores[:-1]) <= MAX_MEAN_GAP
            raise self._missing(
                "sampled tokens have other logprobs than the same tokens in a prompt, by "
                f"{gap:.3f} nats on average" + (" (they are one token late)" if shifted else ""),
                "wrong",
            )
        return is_scored

    async def _scores(self, prompt: list[int], sample: ServerSample) -> list[float]:
        whole = prompt + sample.ids
        try:
            again = await self._one(whole, max_tokens=1, score_from=len(prompt))
        except GatewayError as error:
            if error.status == 400:  # Some backends score no prompts.
                return []
            raise
        return again.scores

    async def _check_stop_token(self) -> None:
        token = (await self._one(max_tokens=1, temperature=0.0)).ids[0]
        sample = await self._one(max_tokens=4, temperature=0.0, stop_token_ids=[token])
        if sample.stop_reason == "stop" and sample.ids[-1:] == [token]:
            return
        if sample.stop_reason == "stop":
            raise self._missing(f"the stop token {token} is not among the ids of its reply", "stop")
        raise self._missing(f"it does not stop at the stop token {token} (ids {sample.ids})", "stop")

    async def _check_tokenizer(self, text: str, ids: list[int]) -> None:
        theirs = await self.server.encode(text, self.model) if text else None
        if theirs is not None and theirs != ids:
            raise ConfigError(
                f"{self._name}: its tokenizer gives {theirs} for {text!r}, the one in engine.model gives "
                f"{ids}; point engine.model at the folder of the model that the server serves"
            )

    async def _top(self, prompt: list[int], temperature: float) -> dict[int, float]:
        sample = await self._one(prompt, max_tokens=1, temperature=temperature, top_logprobs=PROBE_TOP)
        return sample.top[0] if sample.top else {}

    async def _one(
        self,
        prompt: list[int] | None = None,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        top_logprobs: int = 0,
        score_from: int | None = None,
    ) -> ServerSample:
        request = SampleRequest(
            prompt=pack_ids(self.prompts[0] if prompt is None else prompt),
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=list(stop_token_ids),
            top_logprobs=top_logprobs,
        )
        (sample,) = await self.server.sample(request, self.model, score_from=score_from)
        if not sample.ids and not stop_token_ids:
            raise self._missing(f"it sampled nothing (finish reason {sample.stop_reason!r})", "stop")
        return sample

    @property
    def _name(self) -> str:
        return f"the vLLM server at {self.server.url}"

    def _missing(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._name}: {what}; {VLLM_REMEDIES[remedy]}")


def _mean_gap(reported: Sequence[float], scores: Sequence[float]) -> float:
    gap = fmean(abs(a - b) for a, b in zip(reported, scores, strict=True))
    return gap if math.isfinite(gap) else math.inf

"""What the fake of vLLM samples and does wrong, on demand; `fake_vllm.py` has the wire format.

`Distribution` gives the next token's log probabilities as a fixed function of the last ids, so that what the
start-up probe measures means something. Each fake keeps a log of what it sampled: the oracle of the tests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

Floats = npt.NDArray[np.float64]

CONTEXT = 4096
END_PULL = 4.0
"""Added to the end-of-turn token's logit, so that turns end."""


@dataclass(frozen=True)
class Distribution:
    """Log probabilities over `size` ids, from the last three ids."""

    size: int
    end: int
    """The end-of-turn id: more likely than others."""

    words: tuple[int, ...] = ()
    """Ids that are sampled at all, beside `end`; empty: every id."""

    def logits(self, ids: Sequence[int]) -> Floats:
        """float64 [V]"""
        return _logits(self, tuple(ids[-3:]))


@lru_cache(maxsize=4096)
def _logits(distribution: Distribution, seed: tuple[int, ...]) -> Floats:
    logits = np.random.default_rng(seed).normal(0.0, 2.0, distribution.size)
    logits[distribution.end] += END_PULL
    if distribution.words:
        mask = np.full(distribution.size, -np.inf)
        mask[[*distribution.words, distribution.end]] = 0.0
        logits = logits + mask
    logits.flags.writeable = False
    return logits


@dataclass(frozen=True)
class Sampled:
    """One entry of a fake's log."""

    prompt: list[int]
    ids: list[int]
    raw: list[float]
    """The true log probabilities at temperature 1."""


@dataclass
class Faults:
    """What a fake does that it should not, or cannot do."""

    token_ids: bool = True
    """`return_token_ids` is known."""

    id_strings: bool = True
    """`return_tokens_as_token_ids` is known."""

    logprobs: str = "raw"
    """`raw`, `processed` or `logits`."""

    cut_stop_token: bool = False
    rank_one: bool = False
    """Reports the most likely token's log probability for the sampled one."""

    shifted: bool = False
    """Reports each token's log probability one token late."""

    extra_prompt: bool = False
    """Puts an id before every prompt."""

    scores: bool = True
    """The log probabilities of prompts are known."""

    not_finite: bool = False
    """The last sampled token's log probability is -inf."""

    last_id: int | None = None
    """Sampled as the last token."""

    choice: int | None = None
    """Index of every choice."""

    models: tuple[str, ...] = ("served",)
    key: str = ""
    status: int = 0
    """Answer every sample with this status."""

    delay_s: float = 0.0
    """Time that a sample takes."""

    hang: bool = False
    """Never answer a sample."""

    abort: bool = False
    """End every sample as a paused server does."""

    weights: list[str] = field(default_factory=list[str])
    """Names of the weights; with more than one, the next sample sees them change midway."""

    tokenizer: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """`/tokenize` answers these; empty: there is no such endpoint."""


@dataclass
class _Sequence:
    ids: list[int]
    raw: list[float]
    shown: list[float]
    top: list[dict[int, float]]
    stopped: bool
    text: str = ""


class FakeServer:
    """Sampling, faults, and the log, without a wire format."""

    def __init__(self, distribution: Distribution, faults: Faults | None = None) -> None:
        self.distribution = distribution
        self.faults = faults or Faults()
        self.log: list[Sampled] = []
        self.requests: list[dict[str, Any]] = []
        self.disconnected = 0
        """Samples whose client went away."""

        self.in_flight = 0
        self.most_in_flight = 0
        self._random = np.random.default_rng(1234)
        self.app = FastAPI()

    def sample(self, prompt: list[int], params: dict[str, Any], index: int) -> _Sequence:
        """One sequence; `params` under vLLM's names."""
        seed = params.get("seed")
        random = self._random if seed is None else np.random.default_rng([seed, index])
        out = _Sequence([], [], [], [], stopped=False)
        while len(out.ids) < params["max_tokens"] and not out.stopped:
            logits = self.distribution.logits(prompt + out.ids)
            token = self._draw(logits, params, random)
            shown = self._shown(logits, params)
            out.ids.append(token)
            out.raw.append(float(_log_softmax(logits)[token]))
            out.shown.append(float(shown.max() if self.faults.rank_one else shown[token]))
            out.top.append(_top(shown, token, params["top"]))
            ends = token == self.distribution.end and not params["ignore_eos"]
            out.stopped = ends or token in params["stop_token_ids"]
        if self.faults.shifted:
            out.shown = [out.shown[-1], *out.shown[:-1]]
        if self.faults.not_finite:
            out.shown[-1] = -math.inf
        self.log.append(Sampled(prompt, list(out.ids), list(out.raw)))
        if self.faults.cut_stop_token and out.stopped:
            out.ids, out.shown, out.top = out.ids[:-1], out.shown[:-1], out.top[:-1]
        return out

    def _draw(self, logits: Floats, params: dict[str, Any], random: np.random.Generator) -> int:
        if params["temperature"] < 1e-5:
            return int(logits.argmax())
        logprobs = _kept(logits / params["temperature"], params["top_k"])
        return int(random.choice(len(logits), p=np.exp(logprobs)))

    def _shown(self, logits: Floats, params: dict[str, Any]) -> Floats:
        temperature = params["temperature"] if params["temperature"] >= 1e-5 else 1.0
        match self.faults.logprobs:
            case "raw":
                return _log_softmax(logits)
            case "processed":
                return _log_softmax(logits / temperature)
            case _:
                return logits

    def score(self, prompt: list[int]) -> list[float | None]:
        """Log probabilities of a prompt's tokens; the first has none."""
        return [
            None if at == 0 else float(_log_softmax(self.distribution.logits(prompt[:at]))[token])
            for at, token in enumerate(prompt)
        ]

    def refusal(self, request: Request) -> Response | None:
        """The answer to every request that the faults refuse."""
        if self.faults.key and request.headers.get("authorization") != f"Bearer {self.faults.key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        if self.faults.status:
            return JSONResponse({"error": {"message": "out of luck"}}, self.faults.status)
        return None

    async def hang(self, request: Request) -> None:
        """Wait until the client goes away."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.disconnected += 1

    async def busy(self) -> None:
        """Take as long as a sample takes; counts how many do at once."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.faults.delay_s)
        finally:
            self.in_flight -= 1

    def prompt_of(self, prompt: list[int]) -> list[int]:
        return [1, *prompt] if self.faults.extra_prompt else prompt


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


def _kept(logits: Floats, top_k: int) -> Floats:
    if top_k > 0:
        logits = np.where(logits >= np.sort(logits)[-top_k], logits, -np.inf)
    return _log_softmax(logits)


def _top(shown: Floats, token: int, number: int) -> dict[int, float]:
    """The sampled token and the `number` most likely ones, as vLLM orders them."""
    likeliest = np.argsort(-shown)[:number].tolist()
    return {each: float(shown[each]) for each in dict.fromkeys([token, *likeliest])}


def clamped(value: float) -> float:
    """vLLM sends -9999.0 for anything lower."""
    return max(value, -9999.0)

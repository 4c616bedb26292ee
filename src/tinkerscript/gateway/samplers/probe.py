"""The start-up probe: what an inference server really does, measured before an episode depends on it.

The invariant: what the probe pins it has seen in replies, not read in a version number; a server whose
replies could not be recorded as what was sampled is refused, with what is missing and how to remedy it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec

from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.samplers.inference_server import (
    IdsFrom,
    InferenceServer,
    ServerDescription,
    ServerRequest,
    ServerSample,
)
from tinkerscript.rollouts.call import LogprobKind

TOP = 5
"""Most likely tokens that are compared: OpenAI's own limit, so every server allows it."""

HOT = 2.0
"""The second temperature; no server refuses it."""

CLEAR_GAP = 0.3
"""Nats between two tokens from which on their gap at another temperature tells the kind."""

RATIO_MARGIN = 0.15
"""How far that gap may lie from the expected one; low-precision kernels add noise."""

RENORMALISED = -1e-4
"""The only token that top_k=1 leaves has this log probability or more, if what is cut off is divided out."""

LIKELY = -0.05
"""Below this a token is not so likely that its own log probability could be taken for a renormalised one."""

SAMPLES = 4
TOKENS = 32
"""Sampled at temperature 1 and scored again."""

MAX_MEAN_GAP = 0.1
"""Nats between a token's reported and its rescored log probability, on average; prefill and decode differ."""

SAME = 0.02
"""Nats within which two log probabilities are one."""

OFF_RANK = 0.5
"""Nats below the most likely token from which on the two cannot be confused."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a server. Pinned for as long as the sampler lives."""

    kind: str
    url: str
    version: str
    model: str
    max_context: int
    """Most tokens of prompt and reply together."""

    ids_from: IdsFrom
    logprob_kind: LogprobKind
    renormalises: bool
    """Whether log probabilities are of what top-p and top-k left over."""

    siblings: bool
    """Whether n > 1 gives different sequences; if not, n requests are sent."""

    seeds: bool
    """Whether one seed gives one sequence."""

    rescored: bool
    """Whether log probabilities of sampled tokens were compared with those of the same tokens in a prompt."""

    same_tokenizer: bool | None
    """None: the server has no endpoint that tells."""

    weight_version: str | None

    def describe(self) -> str:
        """One line for logs and the terminal."""
        notes = [
            f"{self.kind} {self.version} at {self.url}",
            f"model {self.model!r}",
            f"context {self.max_context}",
            f"ids from {self.ids_from}",
            f"logprobs {self.logprob_kind}"
            + (" (renormalised by top-p and top-k)" if self.renormalises else ""),
            "n > 1" if self.siblings else "n > 1 as n requests",
            "seeds" if self.seeds else "no seeds",
            "logprobs rescored" if self.rescored else "logprobs not rescored (the server scores no prompts)",
            {True: "same tokenizer", False: "other tokenizer", None: "tokenizer not compared"}[
                self.same_tokenizer
            ],
        ]
        return ", ".join(notes)


class Probe:
    """Asks one server; each method establishes one fact."""

    def __init__(self, server: InferenceServer, model: str, prompts: Sequence[Sequence[int]]) -> None:
        """`prompts`: at least one, of ids that the model knows; the first few tokens of a chat will do."""
        self._server = server
        self._model = model
        self._prompts = [list(prompt) for prompt in prompts]

    async def run(
        self, description: ServerDescription, *, text: str = "", ids: Sequence[int] = ()
    ) -> ServerFacts:
        """All facts; `ids` are those of `text` by our own tokenizer. Raises ConfigError."""
        try:
            ids_from = await self._ids()
            kind = await self._logprob_kind()
            rescored = await self._rescore()
            await self._stop_token()
            return ServerFacts(
                kind=self._server.kind,
                url=self._server.url,
                version=description.version,
                model=self._model,
                max_context=description.max_context,
                ids_from=ids_from,
                logprob_kind=kind,
                renormalises=await self._renormalises(),
                siblings=await self._siblings(),
                seeds=await self._seeds(),
                rescored=rescored,
                same_tokenizer=await self._tokenizer(text, list(ids)),
                weight_version=description.weight_version,
            )
        except GatewayError as error:
            raise ConfigError(f"{self._name}: {error.message}") from error

    async def _ids(self) -> IdsFrom:
        answer = await self._one(max_tokens=4)
        if any(value > 1e-3 for value in answer.logprobs):
            raise self._missing("its log probabilities are above zero: these are logits", "logits")
        return answer.ids_from

    async def _logprob_kind(self) -> LogprobKind:
        """The gap between two tokens shrinks with the temperature, unless it is not applied."""
        for prompt in self._prompts:
            cold = await self._top(prompt, 1.0)
            hot = await self._top(prompt, HOT)
            if sum(math.exp(value) for value in cold.values()) > 1.01:
                raise self._missing(
                    "its log probabilities add up to more than 1: these are logits", "logprobs"
                )
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

    async def _renormalises(self) -> bool:
        """True also where nothing tells: truncated samples are then of kind `unknown`."""
        for prompt in self._prompts:
            likeliest = max((await self._top(prompt, 1.0)).values(), default=0.0)
            if likeliest < LIKELY:
                answer = await self._one(prompt, max_tokens=1, top_k=1)
                return answer.logprobs[0] >= RENORMALISED
        return True

    async def _rescore(self) -> bool:
        """A sampled token's log probability must be its own, not a neighbour's, nor the likeliest one's."""
        answers: list[tuple[ServerSample, list[float]]] = []
        for number in range(SAMPLES):
            prompt = self._prompts[number % len(self._prompts)]
            answer = await self._one(prompt, max_tokens=TOKENS, top_logprobs=TOP)
            answers.append((answer, await self._scores(prompt, answer)))
        self._check_ranks(answers)
        for answer, scores in answers:
            if not scores or (gap := _mean_gap(answer.logprobs, scores)) <= MAX_MEAN_GAP:
                continue
            shifted = len(scores) > 1 and _mean_gap(answer.logprobs[1:], scores[:-1]) <= MAX_MEAN_GAP
            raise self._missing(
                "the log probabilities of sampled tokens differ from those of the same tokens in a prompt by "
                f"{gap:.3f} nats on average" + (" (they are one token late)" if shifted else ""),
                "wrong",
            )
        return any(scores for _, scores in answers)

    def _check_ranks(self, answers: Sequence[tuple[ServerSample, Sequence[float]]]) -> None:
        """Where the sampled token is clearly not the most likely one, their log probabilities must differ."""
        off_rank = [clear for answer, scores in answers for clear in _off_rank(answer, scores)]
        if off_rank and all(abs(value - likeliest) < SAME for value, _, likeliest in off_rank):
            value, own, _ = off_rank[0]
            raise self._missing(
                f"it reports the log probability of the most likely token ({value:.3f}) for the sampled one"
                + ("" if own is None else f" ({own:.3f})"),
                "wrong",
            )

    async def _scores(self, prompt: list[int], answer: ServerSample) -> list[float]:
        whole = prompt + answer.ids
        try:
            again = await self._one(whole, max_tokens=1, score_from=len(prompt))
        except GatewayError as error:
            if error.status == 400:  # Some backends score no prompts.
                return []
            raise
        return again.scores

    async def _stop_token(self) -> None:
        token = (await self._one(max_tokens=1, temperature=0.0)).ids[0]
        answer = await self._one(max_tokens=4, temperature=0.0, stop_token_ids=[token])
        if answer.stop_reason == "stop" and answer.ids[-1:] == [token]:
            return
        if answer.stop_reason == "stop":
            raise self._missing(f"the stop token {token} is not among the ids of its reply", "stop")
        raise self._missing(f"it does not stop at the stop token {token} (ids {answer.ids})", "stop")

    async def _siblings(self) -> bool:
        try:
            ask = ServerRequest(prompt=self._prompts[0], max_tokens=TOKENS, n=2, temperature=HOT)
            one, other = await self._server.ask(ask, self._model)
        except GatewayError as error:
            if error.status in (400, 502):
                return False
            raise
        return one.ids != other.ids

    async def _seeds(self) -> bool:
        answers = [await self._one(max_tokens=TOKENS, temperature=HOT, seed=seed) for seed in (7, 7, 8)]
        return answers[0].ids == answers[1].ids != answers[2].ids

    async def _tokenizer(self, text: str, ids: list[int]) -> bool | None:
        theirs = await self._server.encode(text, self._model) if text else None
        if theirs is None:
            return None
        if theirs != ids:
            raise ConfigError(
                f"{self._name}: its tokenizer gives {theirs} for {text!r}, the one in engine.model gives "
                f"{ids}; point engine.model at the folder of the model that the server serves"
            )
        return True

    async def _top(self, prompt: list[int], temperature: float) -> dict[int, float]:
        answer = await self._one(prompt, max_tokens=1, temperature=temperature, top_logprobs=TOP)
        return answer.top[0] if answer.top else {}

    async def _one(
        self,
        prompt: list[int] | None = None,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        top_logprobs: int = 0,
        score_from: int | None = None,
    ) -> ServerSample:
        ask = ServerRequest(
            prompt=self._prompts[0] if prompt is None else prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            stop_token_ids=list(stop_token_ids),
            top_logprobs=top_logprobs,
            score_from=score_from,
        )
        answer = (await self._server.ask(ask, self._model))[0]
        if not answer.ids and not stop_token_ids:
            raise self._missing(f"it sampled nothing (finish reason {answer.stop_reason!r})", "stop")
        return answer

    @property
    def _name(self) -> str:
        return f"the {self._server.kind} server at {self._server.url}"

    def _missing(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._name}: {what}; {self._server.remedies[remedy]}")


def _mean_gap(reported: Sequence[float], scores: Sequence[float]) -> float:
    """Infinite if a number is not finite."""
    gap = fmean(abs(a - b) for a, b in zip(reported, scores, strict=True))
    return gap if math.isfinite(gap) else math.inf


def _off_rank(answer: ServerSample, scores: Sequence[float]) -> list[tuple[float, float | None, float]]:
    """Log probabilities (reported, own, the most likely token's) where the sampled one clearly is another."""
    found: list[tuple[float, float | None, float]] = []
    for index, (token, value, top) in enumerate(zip(answer.ids, answer.logprobs, answer.top, strict=True)):
        others = {each: logprob for each, logprob in top.items() if each != token}
        likeliest = max(others.values(), default=-math.inf)
        own = scores[index] if scores else None
        if own is None and len(others) < TOP:
            continue  # Without a score the sampled token must be known to lie outside the most likely ones.
        if own is None or likeliest - own > OFF_RANK:
            found.append((value, own, likeliest))
    return found

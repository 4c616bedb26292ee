"""Changes to single tokens' advantages: `KLPenalty`, `Distillation`, `correct`, and which tokens train.

If a model cannot provide scores, the step changes no weights.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec import structs

from tinkerscript.config import (
    CORRECTION_WEIGHTS,
    Bounds,
    DistillationConfig,
    RolloutCorrectionConfig,
    RunConfig,
)
from tinkerscript.dashboard.progress import ProgressReporter
from tinkerscript.errors import EngineError
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.protocol import failure_line
from tinkerscript.rollouts.advantages import Doubles, WeightedRollout
from tinkerscript.rollouts.call import Call, FloatArray, IntArray, calls_of, conversation_of, with_messages
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.rollouts.rollout import BoolArray, EpisodeRollouts, Rollout
from tinkerscript.train.backends.backend import FrozenModel, TrainerBackend
from tinkerscript.train.frozen_model import open_frozen_role
from tinkerscript.train.tokenizer_check import check_same_tokenizer
from tinkerscript.trainer_link.messages import EpisodeAccepted

ReferenceLogprobs = Callable[[list[IntArray], list[FloatArray]], Awaitable[list[FloatArray]]]
"""(token ids int32 [T] each, sampling temperatures float32 [T] each) -> a frozen model's logprobs, float32
[T] each, [0] unused.
"""


@dataclass
class KLPenalty:
    """The reverse KL divergence from a reference model, as part of each token's reward.

    For a sampled token, d = log p(sampler) - log p(reference). The advantage changes by -coef * d, or if
    `centered` by coef * (mean(d) - d). This is tinker_cookbook's `incorporate_kl_penalty`, except that tokens
    without loss get nothing.
    """

    reference: ReferenceLogprobs
    coef: float
    centered: bool = True

    async def apply(self, items: Sequence[WeightedRollout]) -> tuple[list[WeightedRollout], float]:
        """Also returns mean(d) in nats per token."""
        scores = await scored(self.reference, items)
        mean = divergence(items, scores)
        baseline = mean if self.centered else 0.0
        return [
            replace(
                item,
                advantages=item.advantages
                + np.where(
                    item.rollout.loss_mask, self.coef * (baseline - (item.rollout.logprobs - score)), 0.0
                ).astype(np.float32),
            )
            for item, score in zip(items, scores, strict=True)
        ], mean


async def scored(reference: ReferenceLogprobs, items: Sequence[WeightedRollout]) -> list[FloatArray]:
    rollouts = [item.rollout for item in items]
    _refuse_images(rollouts)
    return await reference([each.tokens for each in rollouts], [each.temperatures for each in rollouts])


def _refuse_images(rollouts: Iterable[Rollout]) -> None:
    if any(rollout.images for rollout in rollouts):
        raise EngineError(
            "sequences with images cannot be scored by another model: train without kl_penalty_coef, KL "
            "losses (loss_config.kl_*) and distillation"
        )


def divergence(items: Sequence[WeightedRollout], scores: Sequence[FloatArray]) -> float:
    masks = [item.rollout.loss_mask for item in items]
    total = sum(
        float((item.rollout.logprobs - score)[mask].sum(dtype=np.float64))
        for item, score, mask in zip(items, scores, masks, strict=True)
    )
    return total / sum(int(mask.sum()) for mask in masks)


CONTEXT = "teacher_context"
"""Metadata key: text that a program knows but did not show the model (docs/training.md#a-teacher)."""


def informed_prompts(
    episodes: Iterable[EpisodeRollouts], renderer: Callable[[], ChatRenderer]
) -> dict[int, IntArray]:
    """`id` of each sequence with a `CONTEXT` -> its first prompt with that text at the end.

    Raises EngineError if that is not text, and for a prompt without messages.
    """
    return {
        id(rollout): read
        for episode in episodes
        if episode.metadata.get(CONTEXT) is not None
        for rollout, read in _read_by_teacher(episode, renderer)
    }


def _read_by_teacher(
    episode: EpisodeRollouts, renderer: Callable[[], ChatRenderer]
) -> Iterator[tuple[Rollout, IntArray]]:
    context = episode.metadata.get(CONTEXT)
    if context is None:
        yield from ((rollout, rollout.prompt_tokens) for rollout in episode.rollouts)
        return
    by_id = {each.call_id: each for each in with_messages(episode.calls)}
    for rollout in episode.rollouts:
        messages, tools = _asked(by_id, rollout.segments[0].call)
        if not isinstance(context, str) or not messages:
            what = "the prompt has none" if isinstance(context, str) else f"it is {context!r}"
            raise EngineError(
                f"episode {episode.episode_uuid}: {CONTEXT} in the metadata is a text that the teacher "
                f"reads after the last message of the prompt, and {what}"
            )
        ids = renderer().render([*messages[:-1], _with(messages[-1], context)], tools)
        yield rollout, np.array(ids, np.int32)


def _asked(by_id: Mapping[str, Call], call: Call) -> tuple[list[Any], list[Any]]:
    chain = [structs.replace(by_id[call.call_id], reply="{}")]
    while chain[-1].parent_id:
        chain.append(by_id[chain[-1].parent_id])
    return conversation_of(chain[::-1]), json.loads(chain[-1].tools)


def _with(message: dict[str, Any], text: str) -> dict[str, Any]:
    said = message.get("content") or ""
    return {**message, "content": f"{said}\n\n{text}" if isinstance(said, str) else [*said, _part(text)]}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


Waiting = Callable[[str], AbstractContextManager[object]]


class Distillation:
    """On-policy distillation: a teacher penalizes each sampled token by its divergence.

    Sources: Agarwal et al. 2024, arXiv:2306.13649; Lu and Thinking Machines 2025, "On-Policy Distillation".
    """

    def __init__(
        self,
        teacher: FrozenModel,
        config: DistillationConfig,
        *,
        renderer: Callable[[], ChatRenderer],
        waiting: Waiting = lambda _: nullcontext(),
    ) -> None:
        self._teacher = teacher
        self._name = config.teacher
        self._renderer = cache(renderer)
        self._waiting = waiting
        self.scales_logits = teacher.scales_logits
        self.reward_coef = config.reward_coef
        self._top = config.top_k
        self.candidates: list[list[Any]] = []
        """With `top_k`: ids int64 [T, K] and logprobs float32 [T, K] of the last `apply`'s sequences."""

    def check_tokenizer(self, folder: Path) -> None:
        whose = f"training.distillation.teacher: {self._name!r}"
        check_same_tokenizer(folder, self._teacher.folder, whose=whose)

    def check(self, outcome: EpisodeAccepted) -> None:
        """Raises ValueError for an episode that the teacher cannot read.

        Programs decide what an episode says and how long it is, so it must not end the run.
        """
        calls = calls_of(outcome.all_calls)
        longest = self._teacher.max_context
        context = outcome.metadata.get(CONTEXT)
        if context is None and sum(len(each.new_prompt) + len(each.sampled) for each in calls) <= 4 * longest:
            return
        rollouts = merge_calls(calls, episode_uuid=outcome.episode_uuid)
        episode = EpisodeRollouts(outcome.episode_uuid, 0.0, rollouts, tuple(calls), {CONTEXT: context})
        lengths = (
            len(read) + len(rollout.tokens) - rollout.prompt_length
            for rollout, read in _read_by_teacher(episode, self._renderer)
        )
        try:
            # The first is enough: rendering thousands of long prompts would take hours.
            length = next((each for each in lengths if each > longest), 0)
        except Exception as error:
            raise ValueError(failure_line(error)) from error
        if length:
            raise ValueError(
                f"the teacher {self._name!r} reads {longest} tokens, and a sequence has {length} for it"
            )

    async def apply(
        self, items: Sequence[WeightedRollout], episodes: Iterable[EpisodeRollouts] = ()
    ) -> tuple[list[WeightedRollout], float]:
        """The sequences with new advantages, and the mean divergence in nats per token.

        With `top_k`, the advantages stay, and the loss gets `candidates`. Raises EngineError if the teacher
        cannot score them.
        """
        _refuse_images(item.rollout for item in items)
        prompts = await asyncio.to_thread(informed_prompts, list(episodes), self._renderer)
        begins = [item.rollout.prompt_length for item in items]
        read = [prompts.get(id(item.rollout), item.rollout.prompt_tokens) for item in items]

        async def reference(sequences: list[IntArray], temperatures: list[FloatArray]) -> list[FloatArray]:
            of_prompts = [np.ones(len(prompt), np.float32) for prompt in read]
            own, *tops = await self._score(
                list(map(_behind, read, sequences, begins)),
                list(map(_behind, of_prompts, temperatures, begins)),
            )
            self.candidates = [list(map(_aligned, rows, begins, read)) for rows in tops]
            return list(map(_aligned, own, begins, read))

        coef = 0.0 if self._top else 1.0
        return await KLPenalty(reference, coef=coef, centered=False).apply(items)

    async def _score(self, sequences: list[IntArray], temperatures: list[FloatArray]) -> list[list[Any]]:
        with self._waiting(f"the teacher {self._name!r} to score {len(sequences)} sequences"):
            if not self._top:
                return [await self._teacher.logprobs(sequences, temperatures)]
            found = await self._teacher.top_logprobs(sequences, temperatures, self._top)
            return [list(each) for each in zip(*found, strict=True)]


def _aligned(rows: Any, begin: int, read: IntArray) -> Any:
    """`rows` of a sequence after the prompt `read`, as if that had `begin` tokens, which have 0."""
    return _behind(np.zeros((begin, *rows.shape[1:]), rows.dtype), rows, len(read))


def _behind(prompt: Any, values: Any, begin: int) -> Any:
    return np.concatenate([prompt, values[begin:]])


@asynccontextmanager
async def open_distillation(
    config: RunConfig,
    backend: TrainerBackend,
    *,
    folder: Path,
    progress: ProgressReporter,
    opened: Mapping[str, FrozenModel] | None = None,
) -> AsyncGenerator[Distillation | None]:
    """Open the teacher of `training.distillation`, or use the `opened` role."""
    section = config.training.distillation
    if not section.teacher:
        yield None
        return
    role = config.roles[section.teacher]
    teacher = next((model for name, model in (opened or {}).items() if config.roles[name] == role), None)
    async with AsyncExitStack() as stack:
        if teacher is None:
            opening = open_frozen_role(
                section.teacher,
                role,
                backend,
                folder=folder,
                note=progress.note,
                timeout_s=config.interchange_server.call_timeout_s,
            )
            with progress.waiting(
                f"the teacher {section.teacher!r} ({role.base_url or role.model or 'the start'})"
            ):
                teacher = await stack.enter_async_context(opening)
        made = Distillation(
            teacher,
            section,
            renderer=partial(ChatRenderer, folder, config.engine.chat_template_kwargs),
            waiting=progress.waiting,
        )
        await asyncio.to_thread(made.check_tokenizer, folder)
        if teacher.max_context < backend.max_context:
            progress.note(
                f"the teacher {section.teacher!r} reads only {teacher.max_context} tokens, but the model "
                f"that trains {backend.max_context}: an episode with a longer sequence does not train"
            )
        yield made


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of the trainer's probability before the update to the sampler's, float64, of loss tokens."""

    token: Doubles
    product: Doubles
    mean: Doubles

    @classmethod
    def of(cls, rollout: Rollout, old: FloatArray) -> Ratios:
        mask = rollout.loss_mask
        gaps = old[mask].astype(np.float64) - rollout.logprobs[mask]
        # Larger ratios would overflow float32.
        ratios = [gaps, np.full_like(gaps, gaps.sum()), np.full_like(gaps, gaps.mean() if len(gaps) else 0.0)]
        return cls(*(np.exp(np.clip(each, -80.0, 80.0)) for each in ratios))


def _up_to(ratios: Doubles, cap: float) -> Doubles:
    return np.where(ratios > cap, 0.0, ratios)


def _inside(ratios: Doubles, bounds: Bounds) -> Doubles:
    return ((ratios >= bounds[0]) & (ratios <= bounds[1])).astype(np.float64)


def _all_inside(ratios: Doubles, bounds: Bounds) -> Doubles:
    return np.full_like(ratios, _inside(ratios, bounds).min(initial=1.0))


CORRECTIONS: Mapping[str, tuple[Literal["token", "product", "mean"], Callable[[Doubles, Any], Doubles]]] = {
    "tis": ("token", np.minimum),
    "sequence_tis": ("product", np.minimum),
    "mis": ("token", _up_to),
    "sequence_mis": ("product", _up_to),
    "icepop": ("token", lambda ratios, bounds: ratios * _inside(ratios, bounds)),
    "token_mask": ("token", _inside),
    "sequence_mask": ("product", _inside),
    "geometric_mask": ("mean", _inside),
    "veto": ("token", _all_inside),
}
"""Each part of `RolloutCorrectionConfig` has its `Ratios`, and a function that turns them and its value into
each token's factor (docs/training.md#a-sampler-that-is-not-the-trainer).
"""


def correct(
    batch: Sequence[WeightedRollout], trainer: Sequence[FloatArray], config: RolloutCorrectionConfig
) -> tuple[list[WeightedRollout], dict[str, float]]:
    """Weight advantages by the trainer's probabilities before the update (`trainer`, float32 [T] logprobs
    each) over the sampler's, and make them the loss's reference. Also returns metrics over loss tokens.
    """
    parts = {name: value for name in CORRECTIONS if (value := getattr(config, name)) is not None}
    corrected: list[WeightedRollout] = []
    ratios: list[Doubles] = []
    weights: list[Doubles] = []
    touched: dict[str, list[BoolArray]] = {name: [] for name in parts}
    for item, old in zip(batch, trainer, strict=True):
        mask = item.rollout.loss_mask
        found = Ratios.of(item.rollout, old)
        weight = np.ones_like(found.token)
        for name, value in parts.items():
            which, factor_of = CORRECTIONS[name]
            ratio = getattr(found, which)
            factor = factor_of(ratio, value)
            weight = weight * factor
            touched[name].append(factor != ratio if name in CORRECTION_WEIGHTS else factor == 0)
        scaled = np.zeros(len(item.advantages))
        scaled[mask] = item.advantages[mask] * weight
        corrected.append(replace(item, advantages=scaled.astype(np.float32), reference=old))
        ratios.append(found.token)
        weights.append(weight)
    metrics = {
        "correction/weight": float(np.concatenate(weights).mean()),
        "correction/max_ratio": float(np.concatenate(ratios).max()),
    }
    shares = {f"correction/{name}": float(np.concatenate(each).mean()) for name, each in touched.items()}
    return corrected, metrics | shares


def overlong_punishment(calls: Sequence[Call], *, limit: int, buffer: float) -> float:
    """DAPO's soft overlong punishment of the longest reply (Yu et al. 2025): 0 up to (1 - `buffer`) * `limit`
    tokens, -1 at the limit, linear between.
    """
    longest = max((call.reply_tokens for call in calls), default=0)
    return float(np.clip(((1 - buffer) * limit - longest) / (buffer * limit), -1.0, 0.0))


def length_cost(calls: Sequence[Call], costs: Mapping[Literal["token", "turn"], float]) -> float:
    lengths = {"token": sum(call.reply_tokens for call in calls), "turn": len(calls)}
    return sum(cost * lengths[name] for name, cost in costs.items())


def keep_top_entropy(
    batch: Sequence[WeightedRollout], entropies: Sequence[FloatArray], share: float
) -> list[WeightedRollout]:
    """Zero advantages outside of the `share` of tokens with the highest entropies (float32 [T] each).

    Wang et al. 2025, arXiv:2506.01939.
    """
    every = np.concatenate(
        [entropy[item.rollout.loss_mask] for item, entropy in zip(batch, entropies, strict=True)]
    )
    limit = np.quantile(every, 1 - share)
    return [
        replace(item, advantages=np.where(entropy >= limit, item.advantages, np.float32(0)))
        for item, entropy in zip(batch, entropies, strict=True)
    ]


def covariant_tokens(
    batch: Sequence[WeightedRollout],
    trainer: Sequence[FloatArray],
    *,
    share: float,
    band: tuple[float, float] | None,
    seed: str,
) -> list[FloatArray]:
    """Mark tokens with an outstanding covariance: float32 [T] each, 1 or 0 (Cui et al. 2025,
    arXiv:2505.22617).

    These are the `share` of tokens with the largest, or with a `band` as many random tokens inside it.
    `trainer`: logprobs before the update, float32 [T] each.
    """
    masks = [item.rollout.loss_mask for item in batch]
    advantages = np.concatenate([item.advantages[mask] for item, mask in zip(batch, masks, strict=True)])
    logprobs = np.concatenate([each[mask] for each, mask in zip(trainer, masks, strict=True)])
    covariance = _centered(advantages) * _centered(logprobs)
    number = max(1, int(share * len(covariance)))
    if band is None:
        chosen = np.argsort(-covariance, kind="stable")[:number]
    else:
        inside = np.flatnonzero((covariance > band[0]) & (covariance < band[1]))
        chosen = np.array(random.Random(seed).sample(inside.tolist(), min(number, len(inside))), dtype=int)
    marks = np.zeros(len(covariance), np.float32)
    marks[chosen] = 1
    found: list[FloatArray] = []
    for mask, part in zip(
        masks, np.split(marks, np.cumsum([mask.sum() for mask in masks])[:-1]), strict=True
    ):
        whole = np.zeros(len(mask), np.float32)
        whole[mask] = part
        found.append(whole)
    return found


def _centered(values: FloatArray) -> Doubles:
    return values.astype(np.float64) - values.mean(dtype=np.float64)

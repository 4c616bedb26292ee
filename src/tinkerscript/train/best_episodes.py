"""`load_episodes`: a run's best episodes, or pairs of episodes, as training data.

No sequence with an error trains (`rollouts.alignment.checks`). Temperature 0 is fine, because logprobs are
not used.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError, ConversionError
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.model_folder import context_of, model_folder
from tinkerscript.remote_folder import is_url
from tinkerscript.rollouts.rollout import EpisodeRollouts
from tinkerscript.rollouts.trainers import refuse_episode_errors, to_scoring_datum
from tinkerscript.train.chats import Chats, SupervisedExample, divided
from tinkerscript.train.tokenizer_check import check_same_tokenizer


def load_episodes(config: RunConfig, model: Path) -> Chats:
    """Raises ConfigError for another tokenizer, or if no episode beats the others."""
    sft = config.sft
    run, longest = Path(sft.data).expanduser(), context_of(model)
    _check_model(run, model, own=config.engine.model)
    found: list[tuple[float, SupervisedExample]] = []
    lowest, wrong = math.inf, 0
    for group in recorded_groups(run):
        lowest = min(lowest, *group.rewards)
        sound = [each for each in group.episodes if _may_train(each)]
        wrong += len(group.episodes) - len(sound)
        chosen = pairs(sound, sft.best) if sft.dpo_beta else ([each] for each in _ranked(sound)[: sft.best])
        found += [(each[0].reward, _example(*each)) for each in chosen]
    better = [example for reward, example in found if reward > lowest]
    if not better and sft.dpo_beta:
        raise ConfigError(f"sft.dpo_beta: no group in {run} has two episodes whose rewards differ")
    if not better:
        raise ConfigError(
            f"sft.data: no episode in {run} is above the lowest reward there, so that none is better"
        )
    distinct: dict[Hashable, SupervisedExample] = {}
    for example in better:
        distinct.setdefault(_tokens(example), example)
    examples = list(distinct.values())
    origin = {"episodes": [list(each.episodes) for each in examples], "sft.dpo_beta": sft.dpo_beta}
    chats = divided(examples, config, min(sft.max_tokens or longest, longest), origin)
    return replace(
        chats,
        left_out=chats.left_out + wrong,
        what="pairs of episodes" if sft.dpo_beta else "episodes",
        why_left_out="are too long, or have errors or images",
    )


def _check_model(run: Path, model: Path, *, own: str) -> None:
    recorded = LedgerReader(run, store="sqlite")
    if recorded.config.get("method") == "sft":
        raise ConfigError(f"sft.data: {run} is a run of method: sft, whose chats have no rewards")
    named = recorded.model()
    if named == own:
        return
    if is_url(named):  # A folder from elsewhere could name any.
        raise ConfigError(
            f"sft.data: the run in {run} names its model as {named}, from which no tokenizer is fetched to "
            "compare: set engine.model to that URL if you trust it"
        )
    check_same_tokenizer(model, model_folder(named), whose=f"sft.data: the run in {run}")


def _may_train(episode: EpisodeRollouts) -> bool:
    try:
        refuse_episode_errors(episode, "supervised training")
    except ConversionError:
        return False
    if any(rollout.images for rollout in episode.rollouts):
        return False  # Only placeholders would train.
    return any(rollout.loss_mask.any() for rollout in episode.rollouts)


def _example(episode: EpisodeRollouts, worse: EpisodeRollouts | None = None) -> SupervisedExample:
    return SupervisedExample(
        sequences=[to_scoring_datum(rollout) for rollout in episode.rollouts],
        about=episode.rollouts[0].prompt_tokens.tobytes(),
        rejected=[to_scoring_datum(rollout) for rollout in worse.rollouts] if worse else (),
        episodes=(episode.episode_uuid, *([worse.episode_uuid] if worse else [])),
    )


def _tokens(example: SupervisedExample) -> Hashable:
    inputs = [datum.loss_fn_inputs for datum in example.datums]
    return example.about, *(each[name].to_numpy().tobytes() for each in inputs for name in sorted(each))


def pairs(group: Sequence[EpisodeRollouts], number: int) -> Iterator[tuple[EpisodeRollouts, EpisodeRollouts]]:
    """Pair the best with the worst, the second best with the second worst, and so on."""
    ranked = _ranked(group)
    for better, worse in zip(ranked[:number], reversed(ranked), strict=False):
        if better.reward > worse.reward:
            yield better, worse


def _ranked(group: Sequence[EpisodeRollouts]) -> list[EpisodeRollouts]:
    return sorted(group, key=lambda episode: -episode.reward)

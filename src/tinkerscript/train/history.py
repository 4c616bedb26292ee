"""`History`: what a journal says about where a run stands, and what of it a resumed run may still use.

Weights live in checkpoints, results in the journal. A run that goes on from the checkpoint of step k stands
on the policy versions published up to k; what came after is undone. The results of step k + 1 were sampled by
the very weights that the checkpoint holds, so they are used again; what later weights sampled is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tinkerscript.train.journal import (
    AnyEvent,
    Checkpointed,
    EpisodeAccepted,
    EpisodeFailed,
    EpisodeRegistered,
    Evaluated,
    Outcome,
    PolicyPublished,
    Resumed,
)


@dataclass
class History:
    """The surviving line of a run."""

    step: int = 0
    """Step of the checkpoint to go on from; 0: the initial weights."""

    checkpoint: Checkpointed | None = None
    evaluations: dict[str, Evaluated] = field(default_factory=dict[str, Evaluated])
    """Finished ones, by label."""

    versions: dict[int, int] = field(default_factory=dict[int, int])
    """Policy version -> training steps behind it, of the weights that the run stands on."""

    planned: list[EpisodeRegistered] = field(default_factory=list[EpisodeRegistered])
    """Episodes of the next step, as they were registered."""

    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    """Of those that have ended."""

    next_position: int = 0
    """In the order of training samples, after all that the surviving line used."""


def read_history(events: Sequence[AnyEvent], *, exists: Callable[[int], bool]) -> History:
    """Where to go on. `exists(step)` says whether the checkpoint of a step is whole on disk."""
    checkpoints = [e for e in events if isinstance(e, Checkpointed) and exists(e.step)]
    checkpoint = checkpoints[-1] if checkpoints else None
    step = checkpoint.step if checkpoint else 0
    versions, evaluations, plans = _surviving([*events, Resumed(step=step)])
    planned = plans.get(step + 1, [])
    wanted = {plan.episode_uuid for plan in planned}
    ended = (e for e in events if isinstance(e, EpisodeAccepted | EpisodeFailed))
    return History(
        step=step,
        checkpoint=checkpoint,
        evaluations=evaluations,
        versions=versions,
        planned=planned,
        outcomes={e.episode_uuid: e for e in ended if e.episode_uuid in wanted},
        next_position=1 + max((p.position for each in plans.values() for p in each), default=-1),
    )


Surviving = tuple[dict[int, int], dict[str, Evaluated], dict[int, list[EpisodeRegistered]]]


def _surviving(events: Iterable[AnyEvent]) -> Surviving:
    """Versions, evaluations and plans by step, with everything undone that a `Resumed` undoes."""
    versions: dict[int, int] = {}
    evaluations: dict[str, Evaluated] = {}
    plans: dict[int, list[EpisodeRegistered]] = {}
    for event in events:
        match event:
            case PolicyPublished():
                versions[event.policy_version] = event.step
            case Evaluated():
                evaluations[event.label] = event
            case EpisodeRegistered(step=step) if step:
                plans.setdefault(step, []).append(event)
            case Resumed(step=step):
                versions = {version: s for version, s in versions.items() if s <= step}
                evaluations = {label: e for label, e in evaluations.items() if e.step <= step}
                plans = {s: each for s, each in plans.items() if s <= step + 1}
            case _:
                pass
    return versions, evaluations, plans

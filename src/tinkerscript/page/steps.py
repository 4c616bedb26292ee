from __future__ import annotations

from collections import defaultdict
from typing import Literal

from pydantic import BaseModel, Field

from tinkerscript.errors import NotRecordedError
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import Use
from tinkerscript.page.curves import metric_names
from tinkerscript.page.lines import EpisodeLine, episodes, line

GROUPS_PER_PAGE = 100
BINS = 20

GroupFilter = Literal["all", "failed", "truncated", "all_equal", "best", "worst"]


class StepLine(BaseModel):
    step: int
    time: float = Field(description="Unix time of its end in seconds.")
    policy_version: int
    reward: float | None = Field(description="Mean reward of the accepted episodes.")
    accepted: int
    failed: int
    trained: int = Field(description="Episodes that carried a gradient.")
    max_lag: int | None = Field(description="Maximum lag of its episodes, in steps.")
    stopped: str = Field(description="Why it changed no weights and ended the run; empty otherwise.")


class StepPage(BaseModel):
    steps: list[StepLine]
    next: int | None = Field(description="`before` for the next page; null on the last page.")


class Bin(BaseModel):
    low: float
    high: float
    count: int


class StepGroup(BaseModel):
    group_id: str
    sample: str | None
    mean_reward: float | None
    episodes: list[EpisodeLine]


class Step(BaseModel):
    line: StepLine
    metrics: dict[str, float]
    histogram: list[Bin]
    groups: list[StepGroup]
    groups_found: int = Field(description="Number of groups that pass the filter; a page has 100.")
    next: int | None = Field(description="`offset` for the next page of groups.")
    undone: int = Field(
        description="Episodes of earlier attempts at the step that a resumed run has undone. They are in no "
        "group here, but the search finds them."
    )
    previous_step: int | None
    next_step: int | None


_LINE = """
SELECT step, time, policy_version, reward, accepted, failed, trained, max_lag, stopped FROM steps
    WHERE undone = 0
"""


def step_page(ledger: LedgerReader, *, before: int | None = None, limit: int = 50) -> StepPage:
    query = f"{_LINE} AND step < ? ORDER BY step DESC LIMIT ?"
    rows = ledger.rows(query, (before if before is not None else 2**62, min(limit, 200)))
    found = [StepLine.model_validate(dict(row)) for row in rows]
    return StepPage(steps=found, next=found[-1].step if found and found[-1].step > 1 else None)


def step_view(ledger: LedgerReader, step: int, *, show: GroupFilter = "all", offset: int = 0) -> Step:
    row = ledger.row(f"{_LINE} AND step = ?", (step,))
    if row is None:
        raise NotRecordedError(f"the run has no step {step} yet")
    names = [name for name in metric_names(ledger) if not name.startswith("eval/")]
    value = "SELECT value FROM metrics WHERE name = ? AND step = ? AND undone = 0"
    found = {name: ledger.number(value, (name, step)) for name in names}
    metrics = {name: value for name, value in found.items() if value is not None}
    groups, undone = _groups(ledger, step)
    rewards = [e.reward for group in groups for e in group.episodes if e.reward is not None]
    shown = _filtered(groups, show)
    page = shown[offset : offset + GROUPS_PER_PAGE]
    return Step(
        line=StepLine.model_validate(dict(row)),
        metrics=metrics,
        histogram=histogram(rewards),
        groups=page,
        groups_found=len(shown),
        undone=undone,
        next=offset + GROUPS_PER_PAGE if offset + GROUPS_PER_PAGE < len(shown) else None,
        previous_step=_number(ledger, "SELECT max(step) FROM steps WHERE undone = 0 AND step < ?", step),
        next_step=_number(ledger, "SELECT min(step) FROM steps WHERE undone = 0 AND step > ?", step),
    )


def _number(ledger: LedgerReader, query: str, step: int) -> int | None:
    found = ledger.number(query, (step,))
    return None if found is None else int(found)


def _groups(ledger: LedgerReader, step: int) -> tuple[list[StepGroup], int]:
    # A group may train later than planned, or again.
    first = (
        "coalesce((SELECT min(step) FROM trained WHERE episode = e.sequence AND undone = 0 "
        f"AND outcome != '{Use.GIVEN_UP}'), e.step)"
    )
    planned = f"e.step = ? AND e.label = '' AND (e.consumed = 1 OR e.undone != 0) AND {first} = ?"
    others = (
        "e.sequence IN (SELECT episode FROM trained WHERE step = ? AND undone = 0) "
        f"AND e.step + 0 != ? AND {first} = ?"
    )
    members: dict[str, list[EpisodeLine]] = defaultdict(list)
    lines = [
        *episodes(ledger, f"{planned} AND e.episode_type = 'train'", (step, step)),
        *episodes(ledger, f"{others} AND e.episode_type = 'train'", (step, step, step)),
    ]
    found = [line(ledger, each) for each in lines]
    for episode in found:
        if episode.undone is None:
            members[episode.group_id].append(episode)
    groups = [_group(name, episodes) for name, episodes in sorted(members.items(), key=_place)]
    return groups, sum(episode.undone is not None for episode in found)


def _place(item: tuple[str, list[EpisodeLine]]) -> tuple[str, int, str]:
    # A group's name may end in the sample's number.
    stem, _, number = item[0].rpartition("-")
    return (stem, int(number), "") if number.isdecimal() else (item[0], 0, "")


def _group(name: str, episodes: list[EpisodeLine]) -> StepGroup:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return StepGroup(
        group_id=name,
        sample=episodes[0].sample,
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        episodes=sorted(episodes, key=lambda episode: episode.number),
    )


def _filtered(groups: list[StepGroup], show: GroupFilter) -> list[StepGroup]:
    match show:
        case "failed":
            return [g for g in groups if any(e.status != "accepted" for e in g.episodes)]
        case "truncated":
            return [g for g in groups if any(e.truncated for e in g.episodes)]
        case "all_equal":
            return [g for g in groups if len({e.reward for e in g.episodes if e.reward is not None}) == 1]
        case "best" | "worst":
            scored = [g for g in groups if g.mean_reward is not None]
            return sorted(scored, key=lambda g: g.mean_reward or 0.0, reverse=show == "best")
        case _:
            return groups


def histogram(values: list[float]) -> list[Bin]:
    distinct = sorted(set(values))
    if len(distinct) <= BINS // 2:
        return [Bin(low=value, high=value, count=values.count(value)) for value in distinct]
    low, width = distinct[0], (distinct[-1] - distinct[0]) / BINS
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / width))] += 1
    return [Bin(low=low + i * width, high=low + (i + 1) * width, count=n) for i, n in enumerate(counts)]

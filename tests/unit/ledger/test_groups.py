"""A run's episodes, read from its ledger as groups of rollouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollout_helpers import make_call
from run_ledger import claim, ended_episode
from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.ledger import SqliteLedger
from tinkerscript.ledger.groups import recorded_groups
from tinkerscript.ledger.rows import ResultRow, Row, SampleRow, TrainedRow, Use, VerdictRow
from tinkerscript.rollouts.call import Call, PlacedImage
from tinkerscript.rollouts.parquet import read_parquet

SAMPLE = SampleRow(digest=b"s", payload=b"{}")


def ended(sequence: int, uuid: str, group: str, reward: float | None, **result: Any) -> list[Row]:
    """The rows of an episode; one without a reward failed. Its first claim always did."""
    failed = reward is None
    episode = ended_episode(
        sequence,
        uuid=uuid,
        episode_type="eval" if group == "eval" else "train",
        group_id=group,
        sample=SAMPLE.digest,
        state="failed" if failed else "ended",
        reward=reward,
    )
    claims = [claim(sequence, attempt) for attempt in (1, 2)]
    results = [] if failed else [ResultRow(episode=sequence, result=json.dumps(result).encode())]
    return [SAMPLE, episode, *claims, *results]


async def write(folder: Path, rows: list[Row], calls: dict[int, list[Call]]) -> None:
    """A ledger with these rows. The calls, by episode, are of the second claim; the first had others."""
    ledger = SqliteLedger(folder / LEDGER_FILE)
    await ledger.commit(rows)
    for episode, own in calls.items():
        ledger.put_call(episode, 1, make_call(None, [9], [9]))
        for call in own:
            ledger.put_call(episode, 2, call)
    await ledger.durable()
    await ledger.close()


async def run_folder(folder: Path) -> None:
    """Two groups and an evaluation: one episode has two sequences, one failed, one is misaligned, and the
    calls of one were dropped."""
    first = make_call(None, [1, 2], [3, 4])
    calls = {
        1: [first],
        2: [first, make_call(None, [1, 9], [5, 6])],
        3: [first, make_call(first, [7], [8, 9])],
        4: [first],
        5: [first],
    }
    rows = [
        *ended(1, "a", "g1", 1.0),
        *ended(2, "c", "g2", 0.5),
        *ended(3, "b", "g1", 0.0),
        *ended(4, "d", "eval", 1.0),
        *ended(5, "e", "g3", 1.0),
        *ended(6, "f", "g2", None),
        *(ended_episode(7, group_id="g1", emptied=1), claim(7), ResultRow(episode=7, result=b"{}")),
        TrainedRow(episode=5, step=2, outcome=Use.SET_ASIDE, reason="shifted"),
    ]
    await write(folder, rows, calls)


async def test_a_runs_groups_are_read_from_its_ledger(tmp_path: Path) -> None:
    await run_folder(tmp_path)
    one, two = recorded_groups(tmp_path)
    assert [(e.episode_uuid, e.reward) for e in one.episodes] == [("a", 1.0), ("b", 0.0)]
    assert [rollout.tokens.tolist() for rollout in one.episodes[1].rollouts] == [[1, 2, 3, 4, 7, 8, 9]]
    assert [len(each.rollouts) for each in two.episodes] == [2]
    assert (one.episodes[0].metadata, one.episodes[0].call_rewards) == ({}, {})
    assert {(r.episode_reward, r.env_example_id) for r in two.episodes[0].rollouts} == {(0.5, "g2")}
    with pytest.raises(ConfigError, match=r"has no ledger\.sqlite: is it the folder of a run"):
        list(recorded_groups(tmp_path / "nowhere"))


@pytest.mark.parametrize("trains", [None, False, True])
async def test_a_recorded_episode_trains_as_it_was_asked_to(tmp_path: Path, trains: bool | None) -> None:
    images = [PlacedImage(0, b"first"), PlacedImage(1, b"second")]
    call = make_call(None, [1, 2], [3, 4], constrained=bytes([0, 1]), images=images)
    await write(tmp_path, ended(1, "a", "g", 1.0, metadata={"answer": "7"}), {1: [call]})
    options = {} if trains is None else {"trains_constrained": trains}
    (group,) = recorded_groups(tmp_path, **options)
    (episode,) = group.episodes
    assert (group.group_id, episode.metadata, episode.calls) == ("g", {"answer": "7"}, (call,))
    assert episode.rollouts[0].loss_mask.tolist() == [False, False, True, bool(trains)]


async def test_the_pages_way_to_another_trainer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from pathlib.*?)```", page, re.DOTALL)
    run = re.search(r'Path\("(runs/[^"]+)"\)', code)
    assert run is not None
    monkeypatch.chdir(tmp_path)
    Path(run[1]).mkdir(parents=True)
    await run_folder(Path(run[1]))
    found: dict[str, Any] = {}
    exec(code, found)
    assert found["rolled"]["reward"] == [1.0, 0.0]
    again = list(read_parquet(Path(run[1]) / "rollouts.parquet"))
    assert [group.rewards for group in again] == [[1.0, 0.0], [0.5]]


async def test_rewards_are_those_that_train(tmp_path: Path) -> None:
    """A judge's verdicts, where one saw the group; else those of programs, for each call."""
    earned = {"c": 0.5}
    rows = [
        *ended(1, "a", "judged", 1.0, call_rewards=earned),
        *ended(2, "b", "judged", 0.0),
        *ended(3, "c", "own", 1.5, call_rewards=earned),
        *ended(4, "d", "unjudged", 1.0),
        VerdictRow(episode=1, reward=0.25, time=1.0),
        VerdictRow(episode=2, reward=0.75, time=1.0),
        VerdictRow(episode=4, reward=None, time=1.0),
    ]
    await write(tmp_path, rows, {})
    found = {group.group_id: group.episodes for group in recorded_groups(tmp_path)}
    assert {name: [each.reward for each in group] for name, group in found.items()} == {
        "judged": [0.25, 0.75],
        "own": [1.5],
    }
    assert [each.call_rewards for each in (*found["judged"], *found["own"])] == [{}, {}, earned]

"""The best episodes of a run's groups, and pairs of them, as what trains: which, and with which tokens."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rollout_helpers import make_call
from tinkerscript import model_folder as model_folder_module
from tinkerscript.config import RunConfig
from tinkerscript.errors import ConfigError
from tinkerscript.files import LEDGER_FILE
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.rollouts.call import Call
from tinkerscript.train.best_episodes import load_episodes
from tinkerscript.train.chats import Chats, SupervisedExample
from tinkerscript.train.run_folder import RunFolder
from tinkerscript.train.sft import check_origin, load_data
from written_run import Written, WrittenRun

Episode = tuple[str, float, list[Call]]


def call(prompt: int, *reply: int, **more: Any) -> Call:
    return make_call(None, [prompt, 2], list(reply), **more)


def run(tmp_path: Path, groups: dict[str, list[Episode]], **config: Any) -> Path:
    """A run with these groups of (uuid, reward, calls)."""
    with WrittenRun(tmp_path / "source", **config) as ledger:
        number = 0
        for group, episodes in groups.items():
            for uuid, reward, calls in episodes:
                number += 1
                written = Written(uuid=uuid, reward=reward, group_id=group, calls={1: calls})
                ledger.put(*written.rows(number))
    return tmp_path / "source"


def load(folder: Path, **sft: Any) -> Chats:
    given = {"data": str(folder), "held_out": 0, "batch_size": 4, **sft}
    return load_episodes(RunConfig.model_validate({"method": "sft", "sft": given}), TINY_MODEL)


def names(examples: Any) -> list[tuple[str, ...]]:
    return [example.episodes for example in examples]


def tokens(example: SupervisedExample) -> list[tuple[list[int], list[int]]]:
    """Ids, and those that train, of each sequence."""
    found: list[tuple[list[int], list[int]]] = []
    for datum in example.sequences:
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
        weights = datum.loss_fn_inputs["weights"].to_numpy()
        ids = [*datum.model_input.to_ints(), int(targets[-1])]
        found.append((ids, targets[weights == 1].tolist()))
    return found


GROUPS: dict[str, list[Episode]] = {
    "g1": [("a", 0.0, [call(1, 3)]), ("b", 0.6, [call(1, 4, 5)]), ("c", 1.0, [call(1, 6)])],
    "g2": [("d", 0.0, [call(7, 3)]), ("e", 0.0, [call(7, 4)])],
    "g3": [("f", 1.0, [call(8, 3)]), ("g", 1.0, [call(8, 4)]), ("h", 0.2, [call(8, 5)])],
}


def test_the_best_of_each_group_trains_on_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    folder = run(tmp_path, GROUPS)
    chats = load(folder)
    assert names(chats.train) == [("c",), ("f",)], (
        "of equal ones the first; g2 has none above the run's lowest"
    )
    assert [tokens(each) for each in chats.train] == [[([1, 2, 6], [6])], [([8, 2, 3], [3])]]
    assert names(load(folder, best=2).train) == [("c",), ("b",), ("f",), ("g",)]
    assert names(load(folder, best=9).train) == [("c",), ("b",), ("f",), ("g",), ("h",)]


def test_an_episode_of_several_sequences_trains_on_all(tmp_path: Path) -> None:
    first = call(1, 3, 4)
    calls = [first, make_call(first, [9], [10]), call(5, 6)]
    folder = run(tmp_path, {"g": [("a", 1.0, calls), ("b", 0.0, [call(1, 7)])]})
    (example,) = load(folder).train
    assert tokens(example) == [([1, 2, 3, 4, 9, 10], [3, 4, 10]), ([5, 2, 6], [6])]


def test_what_was_said_before_trains_once(tmp_path: Path) -> None:
    again = {
        "g4": [("i", 1.0, [call(1, 6)]), ("j", 0.0, [call(1, 9)])],
        "g5": [("k", 1.0, [call(8, 3, 3)]), ("l", 0.0, [call(8, 4)])],
    }
    folder = run(tmp_path, GROUPS | again)
    assert names(load(folder).train) == [("c",), ("f",), ("k",)]


def test_pairs_are_the_best_and_the_worst_of_groups_that_differ(tmp_path: Path) -> None:
    folder = run(tmp_path, GROUPS)
    chats = load(folder, dpo_beta=0.1)
    assert names(chats.train) == [("c", "a"), ("f", "h")]
    pair = chats.train[0]
    assert tokens(pair) == [([1, 2, 6], [6])]
    (rejected,) = pair.rejected
    assert rejected.loss_fn_inputs["target_tokens"].to_numpy().tolist() == [2, 3]
    assert names(load(folder, dpo_beta=0.1, best=2).train) == [("c", "a"), ("f", "h")]
    four = {
        "g": [
            (name, reward, [call(1, 3 + at)])
            for at, (name, reward) in enumerate(zip("abcd", (3.0, 1.0, 2.0, 0.0), strict=True))
        ]
    }
    folder = run(tmp_path / "four", four)
    assert names(load(folder, dpo_beta=0.1, best=4).train) == [("a", "d"), ("c", "b")]


def test_what_must_not_train_is_left_out_and_counted(tmp_path: Path) -> None:
    wrong = call(1, 5, 6, logprobs=[0.5, -0.1])
    groups = {
        "g1": [("a", 1.0, [wrong]), ("b", 0.8, [call(1, 3)]), ("c", 0.0, [call(1, 4)])],
        "g2": [("d", 1.0, [call(2, *range(3, 40))]), ("e", 0.0, [call(2, 4)])],
        "g3": [("f", 1.0, [call(3, 3, temperature=0.0)]), ("g", 0.0, [call(3, 4)])],
    }
    chats = load(run(tmp_path, groups), max_tokens=30)
    assert names(chats.train) == [("b",), ("f",)], (
        "the likeliest token is nothing to compare, and may be learned"
    )
    assert chats.left_out == 2


def test_samples_are_held_out_whole(tmp_path: Path) -> None:
    groups = {
        f"g{i}": [(f"{i}{end}", reward, [call(i % 5, 3 + i, 9)]) for end, reward in (("+", 1.0), ("-", 0.0))]
        for i in range(20)
    }
    folder = run(tmp_path, groups)
    chats = load(folder, held_out=6)
    assert (len(chats.train), len(chats.held_out)) == (12, 8)
    prompts = [{each.about for each in part} for part in (chats.train, chats.held_out)]
    assert not prompts[0] & prompts[1]
    with pytest.raises(ConfigError, match=r"sft\.held_out: 17 .* about 5 samples: nothing would train"):
        load(folder, held_out=17)


def test_folders_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    folder = run(tmp_path, {"g": [("a", 1.0, [call(1, 3)]), ("b", 1.0, [call(1, 4)])]})
    with pytest.raises(ConfigError, match=r"sft\.data: no episode in .*source is above the lowest reward"):
        load(folder)
    with pytest.raises(ConfigError, match=r"sft\.dpo_beta: no group in .*source has .* differ"):
        load(folder, dpo_beta=0.1)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path} is not the folder of a run")):
        load(tmp_path)
    chats = run(tmp_path / "sft", {}, method="sft")
    with pytest.raises(
        ConfigError, match=r"sft\.data: .* is a run of method: sft, whose chats have no reward"
    ):
        load(chats)
    other = run(tmp_path / "other", GROUPS, engine={"model": str(tmp_path / "gone")})
    with pytest.raises(ConfigError, match=r"gone"):
        load(other)


@pytest.mark.parametrize("key", ["best", "dpo_beta"])
def test_keys_of_groups_are_refused_for_a_file_of_chats(tmp_path: Path, key: str) -> None:
    sft = {"data": str(tmp_path / "chats.jsonl"), key: 2}
    with pytest.raises(ConfigError, match=rf"sft\.{key} compares .* folder of a run, got '.*chats\.jsonl'"):
        load_data(RunConfig.model_validate({"method": "sft", "sft": sft}), TINY_MODEL)


def test_a_run_goes_on_with_the_episodes_that_it_began_with_alone(tmp_path: Path) -> None:
    def goes_on(source: Path, **sft: Any) -> None:
        made = RunConfig.model_validate({"method": "sft", "sft": {"data": str(source), "held_out": 0, **sft}})
        chats = load_data(made, TINY_MODEL)
        with closing(RunFolder(made, TINY_MODEL, now=datetime.now(), path=tmp_path / "run")) as folder:
            check_origin(folder, chats)

    source = run(tmp_path, GROUPS)
    goes_on(source)
    goes_on(source, epochs=3)
    with pytest.raises(ConfigError, match=r"the episodes of sft\.data, sft\.dpo_beta changed since the run"):
        goes_on(source, dpo_beta=0.1)
    more = run(tmp_path / "more", GROUPS | {"g4": [("i", 1.0, [call(9, 6)])]})
    with pytest.raises(ConfigError, match=r"the episodes of sft\.data changed since the run"):
        goes_on(more)


def test_no_tokenizer_is_fetched_from_a_url_that_a_run_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder from elsewhere could name any host, with the credentials of whoever trains."""
    fetched = list[str]()
    monkeypatch.setattr(model_folder_module, "fetched_checkpoint", lambda url, **_: fetched.append(url))
    folder = run(tmp_path, GROUPS, engine={"model": "s3://elsewhere/model"})
    with pytest.raises(ConfigError, match=r"the run in .* s3://elsewhere/model, .*set engine\.model"):
        load(folder)
    assert fetched == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE calls SET call = x'00ff' WHERE episode = 2", "episode 'b' cannot be read .*array"),
        (
            "UPDATE episodes SET reward = 9e999 WHERE uuid = 'b'",
            "'b' cannot be read .ValueError.*a finite number",
        ),
        ("UPDATE results SET result = '[1]' WHERE episode = 2", "'b' cannot be read .ValidationError"),
        ("DROP TABLE results", "cannot be read: no such table"),
    ],
)
def test_what_no_server_wrote_is_named(tmp_path: Path, change: str, problem: str) -> None:
    folder = run(tmp_path, GROUPS)
    with closing(sqlite3.connect(folder / LEDGER_FILE)) as ledger:
        ledger.execute(change)
        ledger.commit()
    with pytest.raises(ConfigError, match=problem):
        load(folder)

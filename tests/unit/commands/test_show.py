"""`tinkerscript show`: a run's folder as a person reads it, half written or hostile."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from rollout_helpers import make_call
from tinkerscript.commands.show import show_episode, show_run
from tinkerscript.config import dump_config, parse_config
from tinkerscript.dashboard.plain_text import one_line, plain
from tinkerscript.errors import ConfigError
from tinkerscript.rollouts.call import Call
from tinkerscript.train.journal import (
    EpisodeAccepted,
    EpisodeFailed,
    EpisodeRegistered,
    Journal,
    Outcome,
    StepConsumed,
)

ASKED = [{"role": "user", "content": "1+1?"}]
CALLED = {
    "role": "assistant",
    "reasoning_content": "hm",
    "content": "",
    "tool_calls": [{"id": "t", "function": {"name": "add", "arguments": '{"a": 1}'}}],
}
TOLD = [{"role": "tool", "tool_call_id": "t", "content": "2"}]


def call(parent: Call | None, messages: object, reply: object, **fields: object) -> Call:
    return make_call(parent, [1], [2, 3], messages=json.dumps(messages), reply=json.dumps(reply), **fields)


def episode(uuid: str, reward: float, calls: list[Call], **fields: object) -> EpisodeAccepted:
    return EpisodeAccepted(
        episode_uuid=uuid,
        attempt=2,
        client_uuid="worker-0",
        reward=reward,
        policy_version_at_claim=1,
        calls=calls,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An evaluation, a step of three episodes, and an episode that runs."""
    first = call(None, ASKED, CALLED)
    calls = [
        first,
        call(first, TOLD, {"role": "assistant", "content": "two\x1b[2J"}),
        call(None, ASKED, {"role": "assistant", "content": "again"}, fork_reason="history_edited"),
    ]
    lost: dict[str, object] = {"kind": "lease_expired", "message": "gone", "attempt": 1, "client_uuid": "w"}
    boom: dict[str, object] = {
        "kind": "task_error",
        "message": "boom [red]",
        "attempt": 1,
        "client_uuid": "w",
    }
    outcomes: list[Outcome] = [
        episode(
            "aaaa1", 1.0, calls, group_id="step-1/sample-0", retries=[lost], log_metrics={"score/x": 1.0}
        ),
        episode("aaab2", 0.0, calls[:1], group_id="step-1/sample-0"),
        EpisodeFailed(episode_uuid="bbbb3", failures=[boom], group_id="step-1/sample-1"),
        episode("cccc4", 0.5, calls[:1], group_id="eval-before/sample-0", episode_type="eval"),
    ]
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(
            EpisodeRegistered(episode_uuid=each.episode_uuid, episode_type="train", group_id=each.group_id)
            for each in outcomes
        )
        journal.write([EpisodeRegistered(episode_uuid="dddd5", episode_type="train", group_id="g")])
        journal.write([*outcomes, StepConsumed(step=1, episode_uuids=["aaaa1", "aaab2", "bbbb3"])])
    (tmp_path / "config.yaml").write_text(dump_config(parse_config("task: {name: t.py@adding}", source="x")))
    lines = [{"step": 0, "eval/score": 0.5}, {"step": 1, "reward/mean": 0.25, "episodes/failed": 1}]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*map(json.dumps, lines), '{"step": 2, "rew']))
    return tmp_path


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=110)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_shows_its_steps_failures_and_last_episodes(run: Path, console: Console) -> None:
    assert show_run(run, "", console) == 0
    text = printed(console)
    assert "grpo of tiny on t.py@adding; not finished" in text
    table, _ = text.split("failed episodes:")
    steps = [line.split() for line in table.splitlines() if line.startswith(("  0 ", "  1 "))]
    assert steps == [["0", "0.500"], ["1", "0.250", "1"]]
    assert "1 x task_error: boom [red]   (episode bbbb3)" in text
    rows = [line.split() for line in text.splitlines() if "sample-" in line]
    assert rows == [
        ["aaaa1", "sample-0", "1", "3", "6", "again"],
        ["aaab2", "sample-0", "0", "1", "2", 'add({"a":', "1})"],
        ["bbbb3", "sample-1", "failed", "task_error:", "boom", "[red]"],
    ]


def test_another_step_or_evaluation_is_named(run: Path, console: Console) -> None:
    show_run(run, "before", console)
    assert [line.split()[0] for line in printed(console).splitlines() if "sample-" in line] == ["cccc4"]
    with pytest.raises(ConfigError, match=r"the run has no '7'; it has 1, before"):
        show_run(run, "7", console)


def test_an_episode_shows_every_sequence_and_attempt(run: Path, console: Console) -> None:
    show_episode(run, "aaaa", console)
    text = printed(console)
    assert "train episode aaaa1, group step-1/sample-0: reward 1\n" in text
    assert "attempt 1 of w failed: lease_expired: gone" in text
    assert 'metrics: {"score/x": 1.0}' in text
    first, second = text.split("sequence 2 of 2, forked: history_edited")
    assert first.index("1+1?") < first.index('-> add({"a": 1})') < first.index("── tool") < first.index("two")
    assert r"two\x1b[2J" in first, "the terminal is not the model's"
    assert "again" in second
    assert "3 calls, 6 tokens sampled" in second


def test_a_failed_and_a_running_episode_say_so(run: Path, console: Console) -> None:
    show_episode(run, "b", console)
    show_episode(run, "dddd5", console)
    assert "attempt 1 of w failed: task_error: boom [red]" in printed(console)
    assert "episode dddd5 has not ended" in printed(console)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("aaa", "2 episodes begin with 'aaa' in .*; there are aaaa1, aaab2"),
        ("x", "no episode begins with 'x'"),
    ],
)
def test_a_prefix_must_name_one_episode(run: Path, console: Console, prefix: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        show_episode(run, prefix, console)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        show_run(tmp_path, "", console)


def test_text_is_shown_as_text() -> None:
    hostile = "a\x1b]0;title\x07\r\nb\tc\ud83d\x9b2J"
    assert plain(hostile) == r"a\x1b]0;title\x07\r" + "\nb\tc" + r"\ud83d\x9b2J"
    assert one_line(hostile) == r"a\x1b]0;title\x07 b c\ud83d\x9b2J"

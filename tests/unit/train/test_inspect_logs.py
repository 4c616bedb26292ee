"""Training episodes as Inspect logs: what the trainer has of any program, as `inspect view` reads it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.log import EvalSample, read_eval_log_async

from rollout_helpers import make_accepted, make_call, make_episode, make_group
from tinkerscript.rollouts.advantages import PLAIN, AdvantageRule
from tinkerscript.rollouts.call import Call, conversation_of
from tinkerscript.train.inspect_logs import write_logs
from tinkerscript.trainer_link.messages import EpisodeAccepted

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def a_call(parent: Call | None, prompt: list[int], messages: Any, reply: Any) -> Call:
    said = {"messages": json.dumps(messages), "reply": json.dumps(reply)}
    return make_call(parent, prompt, [7, 8], logprobs=[-0.5, -1.0], policy_version=3, **said)


ASKED = [{"role": "user", "content": "1+1?"}]
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOLD = [{"role": "tool", "content": "2", "tool_call_id": "c"}]
FIRST = a_call(None, [1, 2], ASKED, CALLED)
TWO_TURNS = [FIRST, a_call(FIRST, [3], TOLD, {"role": "assistant", "content": "2"})]
METADATA: dict[str, Any] = {
    "scores": {"match": 1.0, "style/short": 0.5, "style/kind": 1.0},
    "explanations": {
        "match": {"answer": "2", "explanation": "right"},
        "style": {"answer": None, "explanation": ""},
    },
}


def an_episode(uuid: str, reward: float, calls: list[Call], **more: Any) -> EpisodeAccepted:
    return make_accepted(uuid, reward, calls, group_id="g", **more)


async def written(
    folder: Path, outcomes: list[EpisodeAccepted], samples: dict[str, Any], rule: AdvantageRule = PLAIN
) -> list[EvalSample]:
    groups = [make_group([make_episode(o.calls, o.reward, o.episode_uuid) for o in outcomes if o.calls])]
    (path,) = await asyncio.to_thread(
        write_logs, folder, "step-0004", 4, groups, outcomes, samples, rule=rule
    )
    log = await read_eval_log_async(str(path))
    assert log.status == "success"
    assert log.samples is not None
    return log.samples


def test_a_conversation_is_that_of_the_last_call() -> None:
    forked = a_call(None, [9], ASKED, {"role": "assistant", "content": "again"})
    assert conversation_of(TWO_TURNS) == [*ASKED, CALLED, *TOLD, {"role": "assistant", "content": "2"}]
    assert conversation_of([*TWO_TURNS, forked]) == [*ASKED, {"role": "assistant", "content": "again"}]
    assert conversation_of([]) == []


async def test_an_episode_of_a_task_has_messages_scores_and_tokens(tmp_path: Path) -> None:
    payload = {
        "task": "t.py@adding",
        "sample": {"id": 5, "input": "1+1?", "target": "2", "metadata": {"k": 1}},
    }
    outcomes = [
        an_episode("a", 1.0, TWO_TURNS, metadata=METADATA, log_metrics={"turns": 2.0}),
        an_episode("b", 0.0, TWO_TURNS[:1]),
    ]
    rule = AdvantageRule("leave_one_out", "none")
    first, second = await written(tmp_path, outcomes, {"a": payload, "b": payload}, rule)
    assert [(s.id, s.epoch, s.input, s.target) for s in (first, second)] == [
        (5, 1, "1+1?", "2"),
        (5, 2, "1+1?", "2"),
    ]
    assert [message.role for message in first.messages] == ["user", "assistant", "tool", "assistant"]
    assert first.output.completion == "2"
    assert first.scores is not None
    assert first.scores["match"].value == 1.0
    assert first.scores["match"].explanation == "right"
    assert first.scores["style"].value == {"short": 0.5, "kind": 1.0}
    assert first.metadata["k"] == 1
    assert first.metadata["rollout"] == {
        "reward": 1.0,
        "batch": 4,
        "prompt_ids": [[1, 2], [1, 2, 7, 8, 3]],
        "sampled_ids": [[7, 8], [7, 8]],
    }
    training = first.metadata["training"]
    assert (training["advantage"], training["policy_versions"]) == (1.0, [3])
    assert training["logprobs"] == [[-0.5, -1.0]] * 2
    assert second.scores is not None
    assert second.scores["reward"].value == 0.0


async def test_an_episode_of_a_client_without_messages_is_shown_too(tmp_path: Path) -> None:
    """Raw prompts have no messages; a role that Inspect lacks is said, not left out."""
    odd = [a_call(None, [1], [{"role": "narrator", "content": "x"}], {})]
    raw, strange = await written(
        tmp_path, [an_episode("a", 1.0, [a_call(None, [1], [], {})]), an_episode("b", 0.5, odd)], {}
    )
    assert (raw.id, raw.messages) == ("g", [])
    assert raw.metadata["rollout"]["sampled_ids"] == [[7, 8]]
    assert "narrator" in strange.metadata["not_shown"]


@pytest.mark.parametrize(
    "metadata",
    [
        {"explanations": "it was right"},
        {"explanations": {"match": {"answer": 4, "explanation": ["x"]}}, "scores": {"match": 1.0}},
        {"explanations": {"match": {"answer": "4"}}, "scores": {"match": {"a": 1}, "match/b": "c"}},
    ],
)
async def test_what_a_script_says_in_its_own_shape_is_passed_over(
    tmp_path: Path, metadata: dict[str, Any]
) -> None:
    (sample,) = await written(tmp_path, [an_episode("a", 1.0, TWO_TURNS, metadata=metadata)], {})
    assert sample.scores
    assert sample.metadata["training"]["metadata"] == metadata


async def test_a_step_that_is_repeated_replaces_its_log(tmp_path: Path) -> None:
    for reward in (0.0, 1.0):
        (sample,) = await written(tmp_path, [an_episode("a", reward, TWO_TURNS)], {})
        assert sample.metadata["rollout"]["reward"] == reward
    assert len(list((tmp_path / "inspect").iterdir())) == 1

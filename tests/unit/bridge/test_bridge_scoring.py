"""Scores, weights and reports by hand, without an episode."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool, ChatMessageUser
from inspect_ai.scorer import Score, exact, includes
from inspect_ai.tool import ToolCall, ToolCallError

from inspect_tinker_bridge import EnvironmentConfigError, TaskFailedError, compute_reward
from inspect_tinker_bridge.episodes import EpisodeOutcome
from inspect_tinker_bridge.scoring import EpisodeReward, check_weights, report_of, score_episode

SAMPLE = Sample(input="?", target="4", id="s")


def outcome(messages: list[ChatMessage] | None = None, **scores: Any) -> EpisodeOutcome:
    """An episode with these scores, by scorer."""
    made = {name: each if isinstance(each, Score) else Score(value=each) for name, each in scores.items()}
    return EpisodeOutcome("s", made, error=None, limit=None, messages=messages or [])


def test_scorers_are_averaged_and_so_are_the_values_of_one() -> None:
    scored = score_episode(outcome(a="C", b={"x": 0.5, "y": None, "z": 1}, c=[0, "P"]))
    assert scored.values == {"a": 1.0, "b/x": 0.5, "b/z": 1.0, "c/0": 0.0, "c/1": 0.5}
    assert scored.reward == pytest.approx((1.0 + 0.75 + 0.25) / 3)
    assert not scored.correct


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ([], ""),
        (["/a/task.py", json.__file__], " (/a/task.py, line 1)"),
        (["/site-packages/anyio/run.py", "/site-packages/e/t.py"], " (/site-packages/e/t.py, line 2)"),
    ],
)
def test_an_error_of_the_task_is_named_with_its_file_and_line(frames: list[str], place: str) -> None:
    lines = [f'  File "{path}", line {number}, in solve' for number, path in enumerate(frames, start=1)]
    failed = replace(outcome(), error="KeyError('gold')", traceback="\n".join(lines))
    with pytest.raises(TaskFailedError) as raised:
        score_episode(failed)
    assert raised.value.cause == f"KeyError('gold'){place}"


@pytest.mark.parametrize(("value", "correct"), [(1.0, True), (1.5, True), (0.999, False)])
def test_full_marks_are_at_least_1(value: float, correct: bool) -> None:
    assert score_episode(outcome(a=value)).correct == correct


def test_weights_are_relative_and_those_of_absent_scorers_do_not_count() -> None:
    weights = {"a": 1.0, "b": 3.0, "absent": 4.0}
    assert score_episode(outcome(a=1, b=0), weights).reward == 0.25
    assert (
        score_episode(outcome(a=1, b=0), {name: 10 * each for name, each in weights.items()}).reward == 0.25
    )


@pytest.mark.parametrize(
    "weights", [{"a": -1.0, "b": 2.0}, {"a": 0, "b": 0}, {"a": math.nan, "b": 1}, {"a": "1", "b": 1}]
)
def test_weights_that_weigh_nothing_are_refused(weights: dict[str, Any]) -> None:
    for refused in (lambda: check_weights(weights, "ab"), lambda: score_episode(outcome(a=1, b=1), weights)):
        with pytest.raises(EnvironmentConfigError, match="at least 0 and not all 0"):
            refused()


def test_weights_name_every_scorer_and_no_other() -> None:
    check_weights({"a": 0, "b": 1}, ["b", "a"])
    for weights in ({"a": 1}, {"a": 1, "b": 1, "c": 1}):
        with pytest.raises(EnvironmentConfigError, match="but the scorers are"):
            check_weights(weights, ["a", "b"])
    with pytest.raises(EnvironmentConfigError, match="no weight for the score 'b'"):
        score_episode(outcome(a=1, b=1), {"a": 1})


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        (outcome(), "without a score"),
        (outcome(a={}), "the scorer 'a' returned an empty value"),
        (outcome(a={"x": None}), "the scorer 'a' returned an empty value"),
        (outcome(a="perhaps"), "the score 'a' is 'perhaps', not a finite number; .*wrap the scorer"),
        (outcome(a=Score(value="?", reason="no grade")), r"not a finite number \(no grade\)"),
        *(
            (outcome(a=value), "not a finite number")
            for value in (math.inf, math.nan, 10**400, "1e999", "1" * 5000, [1.0, math.inf], {"x": math.nan})
        ),
        (outcome(a=1e308, b=1e308), "the mean of the scores .* is not a finite number"),
        (EpisodeOutcome("s", {"a": Score(value=1)}, error="boom", limit=None, messages=[]), "boom"),
    ],
)
def test_what_is_no_score_is_a_failure(ended: EpisodeOutcome, message: str) -> None:
    with pytest.raises(TaskFailedError, match=message) as error:
        score_episode(ended)
    assert error.value.sample_id == "s"


@pytest.mark.parametrize(
    ("text", "value"), [("yes", 1.0), ("No", 0.0), ("I", 0.0), ("0.5", 0.5), ("-1", -1.0)]
)
def test_texts_that_inspect_reads_as_numbers(text: str, value: float) -> None:
    assert score_episode(outcome(a=text)).reward == value


def test_a_report_names_scores_limits_and_errors() -> None:
    talk: list[ChatMessage] = [
        ChatMessageUser(content="?"),
        ChatMessageAssistant(content="first"),
        ChatMessageTool(content="", error=ToolCallError("timeout", "slow")),
        ChatMessageTool(content="", error=ToolCallError("timeout", "slow")),
        ChatMessageTool(content="fine"),
        ChatMessageAssistant(content="last"),
        ChatMessageUser(content="more"),
    ]
    ended = outcome(talk, a=Score(value=1, answer="4", explanation="x" * 2001), b=Score(value=0))
    ended = replace(ended, limit="token")
    report = report_of(ended, EpisodeReward(0.5, {"a": 1.0, "b": 0.0}))
    assert report.metrics == {"score/a": 1.0, "score/b": 0.0, "limit/token": 1.0, "tool_error/timeout": 2.0}
    assert report.metadata == {
        "sample_id": "s",
        "scores": {"a": 1.0, "b": 0.0},
        "explanations": {
            "a": {"answer": "4", "explanation": "x" * 2000},
            "b": {"answer": None, "explanation": ""},
        },
        "answer": "last",
        "limit": "token",
        "tool_errors": {"timeout": 2},
    }
    again = report_of(replace(ended, completion="scored", limit=None), EpisodeReward(0.5, {}))
    assert (again.metadata["answer"], again.metadata["limit"]) == ("scored", None)
    assert again.metrics == {"tool_error/timeout": 2.0}
    assert report_of(outcome(), EpisodeReward(0.5, {})).metadata["answer"] == ""


async def test_what_was_submitted_last_is_scored() -> None:
    def submitted(answer: str, function: str = "submit") -> ToolCall:
        return ToolCall(id=answer, function=function, arguments={"answer": answer})

    talk: list[ChatMessage] = [
        ChatMessageAssistant(content="4", tool_calls=[submitted("4")]),
        ChatMessageAssistant(
            content="text", tool_calls=[submitted("5"), submitted("4"), submitted("6", "other")]
        ),
        ChatMessageUser(content="4"),
    ]
    assert await compute_reward(talk, SAMPLE, [exact()]) == (1.0, {"exact": 1.0})
    talk[1] = ChatMessageAssistant(content="text", tool_calls=[submitted("4", "other")])
    assert await compute_reward(talk, SAMPLE, [exact()]) == (0.0, {"exact": 0.0})
    assert await compute_reward([], SAMPLE, [exact()]) == (0.0, {"exact": 0.0})
    unanswered = ToolCall(id="1", function="submit", arguments={})
    talk[1] = ChatMessageAssistant(content="4", tool_calls=[unanswered])
    assert await compute_reward(talk, Sample(input="?", target="None"), [exact()]) == (0.0, {"exact": 0.0})


async def test_weights_by_order_or_by_name() -> None:
    talk = [{"role": "assistant", "content": "it is 4"}]
    scorers = [exact(), includes()]
    for weights in ([1, 3], (1, 3), {"includes": 3, "exact": 1}):
        assert (await compute_reward(talk, SAMPLE, scorers, weights=weights))[0] == 0.75
    for wrong in ([1], [1, 2, 3], {"exact": 1}):
        with pytest.raises(EnvironmentConfigError, match="weights"):
            await compute_reward(talk, SAMPLE, scorers, weights=wrong)

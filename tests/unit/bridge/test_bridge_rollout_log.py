"""Rollouts on disk: JSON lines and Inspect logs with tokens and rewards."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.log import list_eval_logs, read_eval_log_async
from inspect_ai.scorer import Score, Scorer, Target, accuracy, match, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from tinker_cookbook.rl.rollouts import do_group_rollout

from bridge_parts import END, Says, add, bytes_renderer, call, encode, rollout
from inspect_tinker_bridge import (
    EnvironmentConfigError,
    RolloutLog,
    ScoringContext,
    TaskFailedError,
    UnsupportedError,
    load_environment,
    read_rollouts,
)


@pytest.fixture(scope="module")
def renderer(byte_model: Path) -> Renderer:
    return bytes_renderer(byte_model)


def adding() -> Task:
    samples = [Sample(input="0+1?", target="1", id=f"s{n}") for n in range(4)]
    return Task(dataset=samples, solver=react(tools=[add()]), scorer=match())


async def test_every_nth_batch_is_saved_and_inspect_reads_it(renderer: Renderer, tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "saved", every=2)
    dataset = load_environment(adding, renderer, env_type="task", num_envs_per_group=2, rollout_log=log)
    says = [call("add", '{"a": 0, "b": 1}'), call("submit", '{"answer": "1"}')]
    for index in range(3):
        await rollout(dataset.get_batch(index)[0], renderer, *says[-1:])
    await rollout(dataset.get_batch(0)[0], renderer, says[1])
    lines = read_rollouts(log.folder)
    assert [(line["batch"], line["sample_id"], line["reward"]) for line in lines] == [
        *[(0, "s0", 1.0)] * 2,
        *[(2, "s2", 1.0)] * 2,
        *[(0, "s0", 1.0)] * 2,
    ]
    sampled = encode(renderer, says[1] + END)
    assert lines[0]["sampled_tokens"] == [len(sampled)]
    assert lines[0]["scores"]["match"] == {"value": "C", "answer": "1", "explanation": "1"}
    assert [message["role"] for message in lines[0]["conversation"]][:2] == ["system", "user"]

    logs = [await read_eval_log_async(info) for info in list_eval_logs(str(log.folder))]
    assert len(logs) == 3
    for read in logs:
        assert read.status == "success"
        assert read.samples is not None
        assert read.results is not None
        assert read.results.scores[0].metrics["mean"].value == 1.0
        assert [sample.epoch for sample in read.samples] == [1, 2]
        (sample, _) = read.samples
        assert sample.metadata["rollout"]["reward"] == 1.0
        assert sample.metadata["rollout"]["sampled_ids"] == [sampled]
        assert sample.scores is not None
        assert sample.scores["match"].value == "C"
        assert sample.messages[-1].role == "assistant"


@scorer(metrics=[accuracy()])
def unprintable() -> Scorer:
    """Explains itself with half a character, which UTF-8 cannot hold."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=1, explanation="\ud83d" if state.sample_id == "s0" else "fine")

    return score


async def test_what_cannot_be_saved_does_not_end_training_and_is_said_once(
    renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RolloutLog(tmp_path / "saved")
    task = Task(dataset=adding().dataset, solver=generate(), scorer=unprintable())
    dataset = load_environment(task, renderer, rollout_log=log, num_epochs=2)
    for index in (0, 1, 4):
        group = await rollout(dataset.get_batch(index)[0], renderer, "1")
        assert group.get_total_rewards() == [1.0]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    (warning,) = warnings
    assert warning.startswith(f"a rollout could not be saved to {log.folder}: PydanticSerializationError(")
    first, second, third = read_rollouts(log.folder)
    assert third == {**first, "batch": 4}
    assert (first["sample_id"], first["reward"], first["failure"]) == ("s0", 1.0, None)
    assert "surrogates not allowed" in first["not_saved"]
    assert second["scores"]["unprintable"]["explanation"] == "fine"


async def test_a_folder_that_is_gone_is_made_again_and_one_that_cannot_be_is_a_warning(
    renderer: Renderer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RolloutLog(tmp_path / "saved")
    dataset = load_environment(adding, renderer, rollout_log=log)
    for replaced in (False, True):
        shutil.rmtree(log.folder)
        if replaced:
            log.folder.write_text("a file", encoding="utf-8")
        group = await rollout(dataset.get_batch(0)[0], renderer, call("submit", '{"answer": "1"}'))
        assert group.get_total_rewards() == [1.0]
        warned = [record.message for record in caplog.records if "could not be saved" in record.message]
        assert (len(warned) > 0) == replaced
    assert [text.split(" could")[0] for text in warned] == ["the rollouts", "an Inspect log"]
    assert "FileExistsError" in warned[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "taken/below"}, "cannot be written to .*/taken/below: .*Not a directory"),
        ({"folder": "taken"}, "cannot be written to .*/taken: .*File exists"),
        ({"folder": "/proc/none"}, "cannot be written to /proc/none"),
        ({"every": 0}, "every is 0"),
        ({"every": 1.5}, "every is 1.5"),
        ({"every": True}, "every is True"),
    ],
)
def test_a_log_that_cannot_work_is_refused_when_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    with pytest.raises(EnvironmentConfigError, match=message):
        RolloutLog(**({"folder": Path("log")} | options))


def test_a_log_goes_to_the_same_folder_from_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(RolloutLog(Path("log")))
    monkeypatch.chdir("/")
    assert pickle.loads(sent).folder == tmp_path / "log"


@solver
def failing(on: str) -> Solver:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        if state.output.completion == on:
            raise ValueError(f"cannot use {on}")
        return state

    return solve


def refusing(context: ScoringContext) -> float:
    raise ValueError(f"no reward for {context.completion}")


async def test_a_failed_episode_is_saved_with_its_reason(renderer: Renderer, tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "saved")
    task = Task(dataset=adding().dataset, solver=failing("2"), scorer=match())
    dataset = load_environment(task, renderer, num_envs_per_group=2, rollout_log=log)
    policy = Says(renderer, "1" + END, "2" + END)
    tolerant = MinViableGroup(max_retries=0, min_successful=1)
    group = await do_group_rollout(dataset.get_batch(0)[0], policy, strategy=tolerant)
    assert group.get_total_rewards() == [1.0]
    good, bad = read_rollouts(log.folder)
    assert (good["reward"], good["failure"]) == (1.0, None)
    assert bad["reward"] is None
    assert bad["failure"].startswith("TaskFailedError: the episode of sample 's0' failed: ")
    assert "cannot use 2" in bad["failure"]
    assert [message["content"] for message in bad["conversation"]] == ["0+1?", "2"]
    assert bad["sampled_tokens"] == [len(encode(renderer, "2" + END))]
    (info,) = list_eval_logs(str(log.folder))
    read = await read_eval_log_async(info)
    assert read.results is not None
    assert (read.results.total_samples, read.results.completed_samples) == (2, 1)
    assert read.results.scores[0].metrics["mean"].value == 1.0
    assert read.samples is not None
    assert [sample.error is not None for sample in read.samples] == [False, True]


async def test_an_episode_without_a_reward_or_a_policy_is_saved_too(
    renderer: Renderer, tmp_path: Path
) -> None:
    log = RolloutLog(tmp_path / "saved")
    dataset = load_environment(adding, renderer, custom_reward_fn=refusing, rollout_log=log)
    with pytest.raises(TaskFailedError, match="no reward for 1"):
        await rollout(dataset.get_batch(0)[0], renderer, call("submit", '{"answer": "1"}'))
    task = Task(dataset=adding().dataset, solver=generate(num_choices=2), scorer=match())
    dataset = load_environment(task, renderer, rollout_log=log)
    with pytest.raises(UnsupportedError, match="num_choices"):
        await rollout(dataset.get_batch(1)[0], renderer, "1")
    unrewarded, unasked = read_rollouts(log.folder)
    assert (unrewarded["reward"], unrewarded["scores"]["match"]["value"]) == (None, "C")
    assert (unasked["sample_id"], unasked["reward"], unasked["conversation"]) == ("s1", None, [])
    assert "num_choices" in unasked["failure"]


async def test_nothing_is_saved_unless_asked(renderer: Renderer, tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "saved", inspect_logs=False)
    dataset = load_environment(adding, renderer, env_type="task", rollout_log=log)
    await rollout(dataset.get_batch(0)[0], renderer, call("submit", '{"answer": "2"}'))
    assert [path.suffix for path in log.folder.iterdir()] == [".jsonl"]
    assert read_rollouts(log.folder)[0]["reward"] == 0.0

"""Inspect tasks as Tinker environments, driven by tinker_cookbook's rollout loop and scripted tokens."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tinker
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, includes, match
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    basic_agent,
    generate,
    self_critique,
    solver,
    use_tools,
    user_message,
)
from tinker_cookbook.renderers import Renderer
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Trajectory

from bridge_groups import environments, group_of, scoring, solving
from bridge_parts import END, Says, add, call, decode, encode
from inspect_tinker_bridge import (
    EnvironmentConfigError,
    TaskFailedError,
    TaskRunner,
    load_environment,
    load_inspect_task,
)
from inspect_tinker_bridge.env import EnvOptions, InspectEnv

SAMPLES = [Sample(input=f"Say {n}.", target=str(n), id=f"say-{n}") for n in range(1, 6)]


def say() -> Task:
    return Task(dataset=list(SAMPLES), solver=generate(), scorer=match())


def agent() -> Task:
    return Task(dataset=list(SAMPLES), solver=react(tools=[add()]), scorer=match())


async def test_a_group_of_single_turn_episodes_is_prompted_and_scored(renderer: Renderer) -> None:
    dataset = load_environment(say, renderer, num_envs_per_group=3, batch_size=2)
    (builder, other) = dataset.get_batch(0)
    policy = Says(renderer, "1" + END, "2" + END, "1" + END)
    group = await do_group_rollout(builder, policy)
    assert sorted(group.get_total_rewards()) == [0.0, 1.0, 1.0]
    prompt = "<|im_start|>user\nSay 1.<|im_end|>\n<|im_start|>assistant\n"
    assert decode(renderer, policy.prompts[0]) == prompt
    assert policy.stops[0] == encode(renderer, END)
    trajectory = group.trajectories_G[0]
    assert trajectory.stop_reason == "completed"
    assert trajectory.transitions[-1].metrics.keys() >= {"score/match", "turns"}
    assert builder.logging_tags() == other.logging_tags() == [dataset.task.name]


async def test_each_observation_extends_the_previous_one_and_its_action_token_by_token(
    renderer: Renderer,
) -> None:
    # Spacing that no renderer writes, text beside the call, and an unparsable call: kept as sampled.
    texts = [
        "  let me see \n" + call("add", '{"a":1,   "b":0}') + END,
        "<tool_call>\n{broken\n</tool_call>" + END,
        call("submit", '{"answer": "1"}') + END,
    ]
    policy = Says(renderer, *texts)
    group = await group_of(agent, renderer, policy, env_type="task")
    assert group.get_total_rewards() == [1.0]
    assert len(policy.prompts) == 3
    for turn in (1, 2):
        extended = policy.prompts[turn - 1] + policy.actions[turn - 1]
        assert policy.prompts[turn][: len(extended)] == extended
        assert group.trajectories_G[0].transitions[turn - 1].metrics["fork"] == 0.0
    tail = "\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert decode(renderer, policy.prompts[1][len(policy.prompts[0]) + len(policy.actions[0]) :]) == tail


async def test_a_truncated_action_is_closed_before_the_conversation_goes_on(renderer: Renderer) -> None:
    info = load_inspect_task(agent)
    async with TaskRunner(info) as runner:
        env = InspectEnv(runner, info.samples[0], renderer, EnvOptions("task"))
        start = await env.initial_observation()
        assert isinstance(start, tuple)
        action = encode(renderer, "I think that")
        result = await env.step(action, extra={"stop_reason": "length"})
        await env.abandon()
    prompt = list(start[0].to_ints())
    following = list(result.next_observation.to_ints())
    assert following[: len(prompt) + len(action) + 1] == prompt + action + encode(renderer, END)
    assert not result.episode_done


@solving
async def rewriting(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    state.messages[-1].content = "something else"
    state.messages.append(state.messages[0].model_copy(update={"id": "again"}))
    return await generate(state)


async def test_a_modified_history_is_rendered_whole_and_labelled(renderer: Renderer) -> None:
    task = Task(dataset=list(SAMPLES), solver=rewriting(), scorer=match())
    policy = Says(renderer, "1" + END)
    group = await group_of(task, renderer, policy, env_type="task")
    assert group.trajectories_G[0].transitions[0].metrics["fork"] == 1.0
    assert "something else" in decode(renderer, policy.prompts[1])


async def test_max_turns_ends_the_solver_and_scores(renderer: Renderer) -> None:
    policy = Says(renderer, call("add", '{"a": 1, "b": 1}') + END)
    group = await group_of(agent, renderer, policy, env_type="task", max_turns=2)
    assert len(policy.prompts) == 2
    assert group.trajectories_G[0].stop_reason == "max_turns"
    assert group.get_total_rewards() == [0.0]


async def test_an_episode_that_the_trainer_stops_is_scored_with_its_group(renderer: Renderer) -> None:
    async with environments(agent, renderer, env_type="task") as (builder, envs):
        policy = Says(renderer, call("add", '{"a": 1, "b": 1}') + END)
        stopped = await run_rollout(policy, envs[0], limits=RolloutLimits(max_turns=1))
        ((reward, metrics),) = await builder.compute_group_rewards([stopped], envs)
        await builder.cleanup()
    assert reward == metrics["score/match"] == 0.0


@solving
async def stubborn(state: TaskState, generate: Generate) -> TaskState:
    """Takes no refusal for an answer."""

    while True:
        with suppress(Exception):
            state = await generate(state)


@pytest.mark.parametrize(
    "own",
    [
        [generate(), self_critique()],
        [generate(), user_message("Sure?"), generate()],
        react(tools=[add()]),
        basic_agent(tools=[add()]),
        stubborn(),
    ],
    ids=["self_critique", "two generates", "react", "basic_agent", "stubborn"],
)
async def test_a_single_turn_ends_with_the_reward_of_its_one_action(renderer: Renderer, own: Any) -> None:
    task = Task(dataset=list(SAMPLES), solver=own, scorer=match())
    policy = Says(renderer, "1" + END, "2" + END)
    group = await group_of(task, renderer, policy, num_envs_per_group=2)
    assert sorted(group.get_total_rewards()) == [0.0, 1.0]
    assert len(policy.prompts) == 2
    for trajectory in group.trajectories_G:
        assert [len(trajectory.transitions), trajectory.transitions[-1].metrics["turns"]] == [1, 1.0]


@solver
def asleep(answers: int) -> Solver:
    """Generates, then sleeps where only a cancellation wakes it."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(answers):
            state = await generate(state)
        await asyncio.Event().wait()
        return state

    return solve


SHORT = RolloutLimits(rollout_timeout_seconds=0.3)


@pytest.mark.parametrize(("answers", "reward"), [(0, 0.0), (1, 1.0)])
async def test_a_rollout_that_runs_out_of_time_is_scored_where_it_stands(
    renderer: Renderer, answers: int, reward: float
) -> None:
    task = Task(dataset=list(SAMPLES), solver=asleep(answers), scorer=match())
    async with environments(task, renderer, env_type="task") as (builder, envs):
        stopped = await run_rollout(Says(renderer, "1" + END), envs[0], limits=SHORT)
        async with asyncio.timeout(20):
            ((given, metrics),) = await builder.compute_group_rewards([stopped], envs)
    assert stopped.stop_reason == "rollout_timeout"
    assert given == metrics["score/match"] == reward
    assert not [name for name in metrics if name.startswith("stop/")]


@scoring
async def broken(state: TaskState, target: Target) -> Score:
    raise ValueError("the scorer broke")


async def test_a_scorer_that_raises_after_the_trainer_stopped_the_episode_is_a_failure_all_the_same(
    renderer: Renderer,
) -> None:
    task = Task(dataset=list(SAMPLES), solver=asleep(1), scorer=[match(), broken()])
    async with environments(task, renderer, env_type="task") as (builder, envs):
        stopped = await run_rollout(Says(renderer, "1" + END), envs[0], limits=SHORT)
        with pytest.raises(TaskFailedError, match="the scorer broke"):
            await builder.compute_group_rewards([stopped], envs)


async def test_an_episode_that_never_started_has_no_reward(renderer: Renderer) -> None:
    async with environments(say, renderer) as (builder, envs):
        with pytest.raises(TaskFailedError, match="stopped before it started"):
            await builder.compute_group_rewards([Trajectory([], tinker.ModelInput.empty())], envs)


async def test_a_tool_call_ends_a_single_turn_and_is_scored(renderer: Renderer) -> None:
    task = Task(dataset=list(SAMPLES), solver=[use_tools(add()), generate()], scorer=match())
    policy = Says(renderer, call("no_such_tool", "{}") + END, "1" + END)
    group = await group_of(task, renderer, policy, num_envs_per_group=2)
    assert sorted(group.get_total_rewards()) == [0.0, 1.0]
    (stopped,) = group.trajectories_G[group.get_total_rewards().index(0.0)].transitions
    assert stopped.metrics["turns"] == 1.0


@pytest.mark.parametrize("said", [call("no_such_tool", "{}"), "<tool_call>\n1"])
@pytest.mark.parametrize("stop", [END, ""])
async def test_where_no_tool_is_offered_what_looks_like_a_call_is_text(
    renderer: Renderer, said: str, stop: str
) -> None:
    """As the gateway has it: the solver is not asked again, and nothing of the text is lost."""
    task = Task(dataset=[Sample(input="Say it.", target=said)], solver=generate(), scorer=includes())
    group = await group_of(task, renderer, Says(renderer, said + stop), env_type="task")
    assert group.get_total_rewards() == [1.0]
    assert [len(trajectory.transitions) for trajectory in group.trajectories_G] == [1]


async def test_a_retrying_strategy_sees_the_failure(renderer: Renderer) -> None:
    failures = ["once"]

    @solving
    async def failing_once(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        if failures:
            raise ValueError(failures.pop())
        return state

    dataset = load_environment(Task(dataset=list(SAMPLES), solver=failing_once(), scorer=match()), renderer)
    policy = Says(renderer, "1" + END)
    group = await do_group_rollout(dataset.get_batch(0)[0], policy, strategy=RetryOnFailure(max_retries=1))
    assert group.get_total_rewards() == [1.0]
    assert [error.error_type for error in group.rollout_errors] == ["TaskFailedError"]


HERE = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match

@task
def here():
    return Task(dataset=[Sample(input='x')], scorer=match())
"""


@pytest.mark.parametrize("spec", ["here.py@here", "here.py"])
def test_a_relative_path_is_the_same_file_for_a_process_in_another_folder(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    (tmp_path / "here.py").write_text(HERE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    sent = pickle.dumps(load_environment(spec, renderer).get_batch(0)[0])
    monkeypatch.chdir("/")
    assert pickle.loads(sent).task.name == "here"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env_type": "dialogue"}, "single_turn, multi_turn, task"),
        *(
            ({name: value}, f"{name} is {value!r}; it must be an integer of at least 1")
            for name in ("max_turns", "batch_size", "max_samples", "num_envs_per_group", "num_epochs")
            for value in (0, 2.5, "2", True)
        ),
        ({"tool_timeout": 0}, "tool_timeout is 0; it must be an integer of at least 1"),
        ({"scorer_weights": {"exact": 1}}, r"names \['exact'\], but the scorers are \['match'\]"),
        ({"scorer_weights": {"match": -1}}, "at least 0"),
        ({"submit_instruction": 3}, "submit_instruction is 3, not a text"),
        ({"sandbox_type": "docker", "sandbox_config": "no/compose.yaml"}, "no file .*/no/compose.yaml"),
        ({"renderer": "Llama2Renderer"}, "no renderer is called 'Llama2Renderer'.*llama3.*qwen3_instruct"),
        ({"renderer": "llama3"}, "tokenizer"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    renderer: Renderer, options: dict[str, object], message: str
) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        load_environment(**({"task": say, "renderer": renderer} | options))

"""Traps of Inspect and faults of earlier bridges, a test each; the other bridge tests have the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Epochs, Task, eval_async
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageAssistant,
    CompactionTrim,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import Score, Target, match, model_graded_qa
from inspect_ai.solver import Generate, TaskState, generate, user_message
from inspect_ai.tool import ToolCall
from inspect_ai.util import JSONSchema
from tinker_cookbook.renderers import Renderer, get_renderer

from bridge_groups import Held, group_of, group_that_says, scoring, solving
from bridge_parts import END, Says, Scripted, add, call, decode, encode, rollout
from inspect_tinker_bridge import (
    EnvOptions,
    InspectEnv,
    RunnerOptions,
    TaskRunner,
    UnsupportedError,
    get_ground_truth_messages,
    inspect_dataset_to_hf,
    load_environment,
    load_inspect_task,
    score_episode,
)
from inspect_tinker_bridge._inspect_private import ProcessState, silent_display

SAMPLE = Sample(input="Say 1.", target="1", id=1)


def saying(**task: Any) -> Task:
    return Task(**({"dataset": [SAMPLE], "solver": generate(), "scorer": match()} | task))


async def reward_of(task: Task, *says: ModelOutput | str, options: RunnerOptions | None = None) -> float:
    info = load_inspect_task(task)
    async with TaskRunner(info, options) as runner:
        return score_episode(await runner.run(info.samples[0], Scripted(*says))).reward


def test_an_agent_does_not_run_while_the_dataset_is_built() -> None:
    rows = inspect_dataset_to_hf(saying(solver=react(tools=[add()])))
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]


async def test_store_metadata_setup_and_cleanup_of_the_task_work() -> None:
    cleaned: list[object] = []

    @solving
    async def set_up(state: TaskState, generate: Generate) -> TaskState:
        state.store.set("left", 1)
        state.metadata["seen"] = "yes"
        return state

    @scoring
    async def reads(state: TaskState, target: Target) -> Score:
        return Score(value=int(state.store.get("left") == 1 and state.metadata["seen"] == "yes"))

    async def clean(state: TaskState) -> None:
        cleaned.append(state.sample_id)

    assert await reward_of(saying(setup=set_up(), scorer=reads(), cleanup=clean), "x") == 1.0
    assert cleaned == [1]


async def test_epochs_and_their_reducer_are_not_part_of_an_episode() -> None:
    policy = Scripted("1", "2")
    info = load_inspect_task(saying(epochs=Epochs(4, "max")))
    async with TaskRunner(info) as runner:
        rewards = [score_episode(await runner.run(info.samples[0], policy)).reward for _ in range(2)]
    assert rewards == [1.0, 0.0]
    assert len(policy.requests) == 2


async def test_a_model_that_the_task_names_does_not_replace_the_policy() -> None:
    assert await reward_of(saying(model="mockllm/model"), "1") == 1.0


async def test_the_callers_task_is_not_changed() -> None:
    task = saying()
    before = dict(vars(task))
    await reward_of(task, "1")
    assert vars(task) == before


async def test_members_of_a_group_do_not_share_a_cached_generation(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_CACHE_DIR", str(tmp_path))
    task = saying(solver=generate(cache=True))
    group = await group_that_says(task, renderer, "1", "2", num_envs_per_group=2)
    assert sorted(group.get_total_rewards()) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["role_colon", "qwen3_instruct"])
async def test_stop_sequences_of_the_task_join_the_renderers_and_end_the_answer(
    renderer: Renderer, name: str
) -> None:
    """Whatever the renderer stops at; the ids stay as sampled, and the next prompt extends them."""
    task = saying(
        config=GenerateConfig(stop_seqs=["STOP"]), solver=[generate(), user_message("?"), generate()]
    )
    own = get_renderer(name, renderer.tokenizer)
    end = own.get_stop_sequences()[0]
    policy = Says(own, "2 STOP", "1 STOP and more", "1" + (end if isinstance(end, str) else END))
    group = await group_of(task, own, policy, env_type="task", num_envs_per_group=3)
    assert policy.stops[0] == [end if isinstance(end, str) else END, "STOP"]
    assert sum(group.get_total_rewards()) >= 1.0
    for trajectory in group.trajectories_G:
        assert trajectory.transitions[-1].logs["answer/match"] in ("1", "2")
        assert trajectory.transitions[-1].metrics["format_valid"] == 1.0
        assert trajectory.transitions[0].metrics["fork"] == float(name == "role_colon")


@pytest.mark.parametrize(
    "config",
    [
        {"num_choices": 3},
        {"best_of": 2},
        {"logprobs": True},
        {"logit_bias": {1: 2.0}},
        {"extra_body": {"x": 1}},
        {"response_schema": ResponseSchema(name="answer", json_schema=JSONSchema(type="object"))},
    ],
)
async def test_what_no_policy_can_do_is_refused_when_the_task_is_loaded_and_when_a_solver_asks(
    renderer: Renderer, config: dict[str, Any]
) -> None:
    named = f"sets {next(iter(config))}="
    with pytest.raises(UnsupportedError, match=named):
        load_environment(saying(config=GenerateConfig(**config)), renderer)
    with pytest.raises(UnsupportedError, match=named):
        await group_that_says(saying(solver=generate(**config)), renderer, "1")


async def test_sampling_parameters_that_the_trainer_decides_are_a_warning(
    renderer: Renderer, caplog: pytest.LogCaptureFixture
) -> None:
    solver = generate(temperature=0.25, logprobs=False, num_choices=1, timeout=9)
    await group_that_says(saying(name="tuned", solver=solver), renderer, "1", num_envs_per_group=2)
    (warning,) = [record.message for record in caplog.records if "tuned" in record.message]
    assert "asks for temperature=0.25; in a Tinker environment" in warning


@pytest.mark.parametrize("config", [{"attempt_timeout": 0}, {"timeout": 0}, {"max_connections": 1}])
@pytest.mark.parametrize("where", ["task", "call"])
async def test_no_limit_of_a_connection_throws_the_policys_answer_away_or_holds_others_back(
    config: dict[str, Any], where: str
) -> None:
    task = saying(config=GenerateConfig(**config)) if where == "task" else saying(solver=generate(**config))
    info = load_inspect_task(task)
    policy, other = Held("1"), Scripted("1")
    async with TaskRunner(info) as runner:
        slow = asyncio.create_task(runner.run(info.samples[0], policy))
        await policy.asked.wait()
        assert score_episode(await runner.run(info.samples[0], other)).reward == 1.0
        policy.go.set()
        assert score_episode(await slow).reward == 1.0
    assert len(policy.requests) == 1


@solving
async def prefilled(state: TaskState, generate: Generate) -> TaskState:
    state.messages.append(ChatMessageAssistant(content="The answer is "))
    return await generate(state)


async def test_an_assistant_message_at_the_end_is_a_prefill(renderer: Renderer) -> None:
    policy = Says(renderer, "1" + END)
    await group_of(saying(solver=prefilled()), renderer, policy)
    assert decode(renderer, policy.prompts[0]).endswith("<|im_start|>assistant\nThe answer is ")


async def test_an_action_that_comes_after_the_tasks_time_limit_is_reported(renderer: Renderer) -> None:
    info = load_inspect_task(saying(time_limit=1))
    async with TaskRunner(info) as runner:
        env = InspectEnv(runner, info.samples[0], renderer, EnvOptions())
        await env.initial_observation()
        await asyncio.sleep(1.5)  # the limit is wall-clock time, which the sampler spends too
        result = await env.step(encode(renderer, "1" + END))
    assert result.metrics["action_unseen"] == 1.0
    assert result.metrics["stop/rollout_timeout"] == 1.0
    assert result.reward == 0.0


async def test_another_eval_runs_between_groups(renderer: Renderer, tmp_path: Path) -> None:
    dataset = load_environment(saying(), renderer)
    before = ProcessState()
    for _ in range(2):
        assert (await rollout(dataset.get_batch(0)[0], renderer, "1")).get_total_rewards() == [1.0]
        output = ModelOutput.from_content("mockllm/model", "1")
        output.usage = ModelUsage(total_tokens=1)
        model = get_model("mockllm/model", custom_outputs=[output], memoize=False)
        with silent_display():
            (log,) = await eval_async(saying(), model=model, log_dir=str(tmp_path))
        before.restore()
        assert log.status == "success"


async def test_a_cost_limit_counts_what_has_a_price_which_the_policy_has_not() -> None:
    assert await reward_of(saying(cost_limit=0.01), "1") == 1.0


@solving
async def counting(state: TaskState, generate: Generate) -> TaskState:
    state = await generate(state)
    state.metadata["counted"] = await get_model().count_tokens("twelve bytes")
    return state


@scoring
async def counted(state: TaskState, target: Target) -> Score:
    return Score(value=state.metadata["counted"])


async def test_tokens_are_counted_by_the_renderers_tokenizer_or_estimated_without_one(
    renderer: Renderer,
) -> None:
    task = saying(solver=counting(), scorer=counted())
    assert (await group_that_says(task, renderer, "1")).get_total_rewards() == [12.0]
    assert await reward_of(task, "1") == 4.0


async def test_an_agent_that_compacts_its_history_counts_with_the_renderers_tokenizer(
    renderer: Renderer,
) -> None:
    agent = react(tools=[add()], compaction=CompactionTrim(threshold=4000))
    says = [call("add", '{"a": 1, "b": 1}'), call("submit", '{"answer": "1"}')]
    group = await group_that_says(saying(solver=agent), renderer, *says, env_type="task")
    assert group.get_total_rewards() == [1.0]


def grader(verdict: str) -> Any:
    output = ModelOutput.from_content("mockllm/model", f"GRADE: {verdict}")
    output.usage = ModelUsage(total_tokens=1)
    return get_model("mockllm/model", custom_outputs=[output], memoize=False)


@pytest.mark.parametrize(("verdict", "reward"), [("C", 1.0), ("I", 0.0)])
async def test_a_grader_role_grades_in_the_policys_place(verdict: str, reward: float) -> None:
    options = RunnerOptions(model_roles={"grader": grader(verdict)})
    assert await reward_of(saying(scorer=model_graded_qa()), "1", options=options) == reward


async def test_the_policy_grades_itself_if_that_is_asked_for(renderer: Renderer) -> None:
    task = saying(scorer=model_graded_qa())
    group = await group_that_says(task, renderer, "1", "GRADE: C", env_type="task", allow_self_grading=True)
    assert group.get_total_rewards() == [1.0]
    assert len(group.trajectories_G[0].transitions) == 2


async def test_tool_arguments_are_json_in_the_next_prompt(renderer: Renderer) -> None:
    """A history that was edited is rendered anew, with JSON and not a Python repr."""

    @solving
    async def remembering(state: TaskState, generate: Generate) -> TaskState:
        made = ToolCall(id="1", function="add", arguments={"a": 1, "b": None, "c": "it's"})
        state.messages.append(ChatMessageAssistant(content="", tool_calls=[made]))
        state.messages.append(state.messages[0].model_copy(update={"id": "again"}))
        return await generate(state)

    policy = Says(renderer, "1" + END)
    await group_of(saying(solver=remembering()), renderer, policy)
    assert '"arguments": {"a": 1, "b": null, "c": "it\'s"}' in decode(renderer, policy.prompts[0])


async def test_a_prompt_is_found_while_episodes_of_the_same_task_run(renderer: Renderer) -> None:
    info = load_inspect_task(saying())
    prompt, group = await asyncio.gather(
        get_ground_truth_messages(info, info.samples[0]), group_that_says(saying, renderer, "1")
    )
    assert [message.text for message in prompt] == ["Say 1."]
    assert group.get_total_rewards() == [1.0]

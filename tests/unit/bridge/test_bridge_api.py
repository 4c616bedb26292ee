"""The document's names: rows of a dataset, prompts, rewards without an episode, tinker_cookbook's builder."""

from __future__ import annotations

import json
import pickle
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ContentAudio, ModelOutput, get_model
from inspect_ai.scorer import Score, Target, choice, exact, match
from inspect_ai.solver import (
    Generate,
    Solver,
    TaskState,
    generate,
    multiple_choice,
    prompt_template,
    self_critique,
    system_message,
)
from tinker_cookbook.renderers import Renderer

import inspect_tinker_bridge
from bridge_groups import scoring, solving
from bridge_parts import BYTES, rollout
from inspect_tinker_bridge import (
    EnvironmentConfigError,
    InspectRLDataset,
    InspectRLDatasetBuilder,
    InvalidTaskError,
    TaskFailedError,
    UnsupportedError,
    compute_reward,
    get_ground_truth_messages,
    inspect_dataset_to_hf,
    load_environment,
)
from inspect_tinker_bridge.conversion import from_dicts, sample_of_row, to_dicts

SUMS = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import match

@task
def sums(top: int = 6):
    return Task(dataset=[Sample(input=f"{n}+1?", target=str(n + 1), id=n) for n in range(top)],
                scorer=match())
"""


@pytest.fixture
def sums(tmp_path: Path) -> str:
    (tmp_path / "sums.py").write_text(SUMS, encoding="utf-8")
    return f"{tmp_path}/sums.py@sums"


MIXED = [
    Sample(input="x", target="one", id=1, metadata={"n": 1}),
    Sample(
        input=[ChatMessageUser(content="a"), ChatMessageAssistant(content="b")], target=["p", "q"], id="two"
    ),
    Sample(
        input="z",
        choices=["red", "blue"],
        target="B",
        id="3",
        metadata={"n": ["x"], "when": date(2026, 1, 2)},
    ),
    Sample(input="w", files={"a.txt": "text"}, setup="true", sandbox=("local", None), metadata={"n": None}),
]


DOCUMENTED = {
    "loader": ["load_environment"],
    "tasks": ["InspectTaskInfo", "load_inspect_task"],
    "ground_truth": ["get_ground_truth_messages"],
    "dataset": ["inspect_dataset_to_hf"],
    "env": ["InspectRLDataset", "InspectEnvGroupBuilder", "InspectEnv"],
    "scoring": ["compute_reward"],
    "sandbox": [
        "SandboxConfig",
        "SandboxInstance",
        "cleanup_sandbox",
        "create_sandbox_for_sample",
        "exec_in_sandbox",
        "sandbox_context",
    ],
}
"""The files and names of the bridge's document."""


@pytest.mark.parametrize("module", DOCUMENTED)
def test_the_documents_names_are_in_its_files_and_in_the_package(module: str) -> None:
    home = import_module(f"inspect_tinker_bridge.{module}")
    for name in DOCUMENTED[module]:
        assert name in home.__all__
        assert getattr(inspect_tinker_bridge, name) is getattr(home, name)


def asking(*solvers: Solver, samples: list[Sample] | None = None, scorers: Any = None) -> Task:
    samples = samples or [Sample(input="the question", target="4", id=1)]
    return Task(dataset=samples, solver=list(solvers) or generate(), scorer=scorers or match())


async def test_the_prompt_is_the_one_of_the_first_model_call() -> None:
    task = asking(system_message("Obey."), prompt_template("<<{prompt}>>"), generate(), self_critique())
    messages = await get_ground_truth_messages(task, task.dataset[0])
    assert [(m.role, m.text) for m in messages] == [("system", "Obey."), ("user", "<<the question>>")]


async def test_a_prompt_that_needs_the_reply_of_a_roles_model_is_an_error_and_calls_no_model() -> None:
    @solving
    async def simulated_user(state: TaskState, generate: Generate) -> TaskState:
        asked = await get_model(role="user").generate("Ask something.")
        state.user_prompt.text = asked.completion
        return await generate(state)

    called: list[str] = []

    def answer(*_: object) -> ModelOutput:
        called.append("user")
        return ModelOutput.from_content("mockllm/model", "What now?")

    user = get_model("mockllm/model", custom_outputs=answer, memoize=False)
    task = Task(
        dataset=[Sample(input="x", id=1)], solver=simulated_user(), scorer=match(), model_roles={"user": user}
    )
    with pytest.raises(TaskFailedError, match="asks the model of the role 'user'"):
        await get_ground_truth_messages(task, task.dataset[0])
    with pytest.raises(TaskFailedError, match="asks the model of the role 'user'"):
        inspect_dataset_to_hf(task)
    assert called == []


async def test_any_samples_become_rows_and_come_back(tmp_path: Path) -> None:
    task = asking(multiple_choice(), samples=[MIXED[2]])
    rows = inspect_dataset_to_hf(task, "mine")  # also while an event loop runs
    assert rows.column_names == ["prompt", "answer", "info", "id"]
    assert "A) red" in rows[0]["prompt"][0]["content"]
    mixed = inspect_dataset_to_hf(asking(samples=list(MIXED)), "mine", additional_system_content="Be brief.")
    assert [row["id"] for row in mixed] == ["1", "two", "3", "4"]
    assert [row["answer"] for row in mixed] == ["one", "p\nq", "B", None]
    assert [m["role"] for m in mixed[1]["prompt"]] == ["system", "user", "assistant"]
    assert json.loads(mixed[0]["info"])["task"] == "mine"
    back = [sample_of_row(row) for row in mixed]
    assert [sample.id for sample in back] == [1, "two", "3", 4]
    assert [sample.target for sample in back] == [sample.target for sample in MIXED]
    assert (back[3].files, back[3].setup, back[3].metadata) == ({"a.txt": "text"}, "true", {"n": None})
    assert back[3].sandbox is not None
    assert back[3].sandbox.type == "local"
    assert back[2].metadata == {"n": ["x"], "when": "2026-01-02"}


def test_rows_keep_their_limit_and_say_what_they_cannot_hold() -> None:
    assert len(inspect_dataset_to_hf(asking(samples=list(MIXED)), max_samples=2)) == 2
    sound = ContentAudio(audio="data:audio/wav;base64,AAAA", format="wav")
    with pytest.raises(UnsupportedError, match="audio content; only text, reasoning and images"):
        inspect_dataset_to_hf(asking(samples=[Sample(input=[ChatMessageUser(content=[sound])], id=1)]))
    with pytest.raises(UnsupportedError, match="holds no sample"):
        sample_of_row({"info": "{}"})


def test_conversations_survive_the_way_there_and_back() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    late = {"type": "timeout", "message": "late"}
    conversation = [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "t", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "add", "error": late},
    ]
    assert to_dicts(from_dicts(conversation)) == conversation
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    parts = [{"type": "text", "text": "What is"}, image, {"type": "text", "text": "?"}]
    pictured = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": parts, "reasoning_content": "why"},
        {"role": "tool", "content": [image], "tool_call_id": "1", "name": "draw"},
    ]
    assert to_dicts(from_dicts(pictured)) == pictured
    with pytest.raises(UnsupportedError, match="'critic'"):
        from_dicts([{"role": "critic", "content": ""}])
    with pytest.raises(UnsupportedError, match="'video' part"):
        from_dicts([{"role": "user", "content": [{"type": "video"}]}])


USER = {"role": "user", "content": "?"}


async def test_a_finished_conversation_is_scored_without_an_episode() -> None:
    sample = Sample(input="?", target="4", id=1)
    talk = [USER, {"role": "assistant", "content": "4"}]
    assert await compute_reward(talk, sample, [match(), exact()]) == (1.0, {"match": 1.0, "exact": 1.0})
    assert await compute_reward(talk, sample, [match(), match()]) == (1.0, {"match": 1.0, "match1": 1.0})
    chosen = Sample(input="?", target="B", choices=["red", "blue"])
    for letter, reward in (("B", 1.0), ("A", 0.0)):
        answer = [USER, {"role": "assistant", "content": f"ANSWER: {letter}"}]
        assert (await compute_reward(answer, chosen, [choice()]))[0] == reward
    row = inspect_dataset_to_hf(asking(samples=[sample]))[0]
    assert await compute_reward([*from_dicts(talk)], row, [match()]) == (1.0, {"match": 1.0})


@scoring
async def crashing(state: TaskState, target: Target) -> Score:
    raise KeyError("gone")


async def test_a_reward_that_cannot_be_had_raises() -> None:
    talk, sample = [USER], Sample(input="?", target="4", id=7)
    with pytest.raises(
        TaskFailedError, match=r"sample 7 failed: the scorer 'crashing' raised KeyError\('gone'\)"
    ):
        await compute_reward(talk, sample, [crashing()])
    with pytest.raises(EnvironmentConfigError, match="no scorers"):
        await compute_reward(talk, sample, [])


def ids(dataset: InspectRLDataset) -> list[int]:
    batches = [dataset.get_batch(index) for index in range(len(dataset))]
    return [builder.sample.id for batch in batches for builder in batch]  # type: ignore[attr-defined]


def test_epochs_follow_one_another_each_in_its_own_order(sums: str, renderer: Renderer) -> None:
    plain = load_environment(sums, renderer, batch_size=4, num_epochs=2)
    assert (len(plain), ids(plain)) == (3, [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5])
    shuffled = load_environment(sums, renderer, batch_size=4, num_epochs=3, shuffle=True, shuffle_seed=5)
    order = ids(shuffled)
    epochs = [order[:6], order[6:12], order[12:]]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4, 5] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(shuffled) == order
    assert ids(load_environment(sums, renderer, num_epochs=3, shuffle=True, shuffle_seed=6)) != order


def test_without_a_seed_the_order_is_drawn_and_can_be_had_again(sums: str, renderer: Renderer) -> None:
    drawn = [load_environment(sums, renderer, top=50, shuffle=True, shuffle_seed=None) for _ in range(2)]
    assert ids(drawn[0]) != ids(drawn[1])
    assert all(ids(dataset) != list(range(50)) for dataset in drawn)
    again = load_environment(sums, renderer, top=50, shuffle=True, shuffle_seed=drawn[0].shuffle_seed)
    assert ids(again) == ids(drawn[0])
    assert load_environment(sums, renderer).shuffle_seed is None


def test_task_arguments_go_as_keywords_or_as_a_mapping(sums: str, renderer: Renderer) -> None:
    assert len(load_environment(sums, renderer, top=2).samples) == 2
    assert len(load_environment(sums, renderer, task_args={"top": 3}).samples) == 3


def built(task: str) -> dict[str, Any]:
    return {"task": task, "model_name_for_tokenizer": BYTES, "renderer_name": "qwen3_instruct"}


async def test_the_builder_makes_train_and_test_for_tinker_cookbook(sums: str, renderer: Renderer) -> None:
    builder = InspectRLDatasetBuilder(
        **built(sums), batch_size=2, num_envs_per_group=3, test_samples=2, seed=1
    )
    train, test = await pickle.loads(pickle.dumps(builder))()
    assert isinstance(train, InspectRLDataset)
    assert isinstance(test, InspectRLDataset)
    assert (len(train.samples), len(test.samples)) == (4, 2)
    assert sorted(ids(train) + ids(test)) == [0, 1, 2, 3, 4, 5]
    group = await rollout(test.get_batch(0)[0], renderer, "1")
    assert len(group.trajectories_G) == 1
    assert len((await rollout(train.get_batch(0)[0], renderer, "1")).trajectories_G) == 3


@pytest.mark.usefixtures("renderer")  # It registers the tokenizer.
async def test_the_test_set_may_be_the_task_with_other_arguments(sums: str) -> None:
    given = built(sums) | {"shuffle": False}
    train, test = await InspectRLDatasetBuilder(**given, test_task_args={"top": 2})()
    assert (len(train), len(test or ())) == (6, 2)
    assert (await InspectRLDatasetBuilder(**given)())[1] is None
    with pytest.raises(EnvironmentConfigError, match="not both"):
        await InspectRLDatasetBuilder(**given, test_task_args={}, test_samples=1)()
    with pytest.raises(EnvironmentConfigError, match="test_samples is 6"):
        await InspectRLDatasetBuilder(**given, test_samples=6)()


def test_tasks_that_cannot_train_are_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidTaskError, match="no scorer"):
        load_environment(Task(dataset=[Sample(input="x")]), renderer)
    with pytest.raises(EnvironmentConfigError, match="sandbox_type='docker', or 'local'"):
        load_environment(asking(), renderer, env_type="multi_turn")
    with pytest.raises(ValueError, match="needs a sandbox_type"):
        load_environment(asking(), renderer, sandbox_config="compose.yaml")
    with pytest.raises(EnvironmentConfigError, match="use env_type='task'"):
        load_environment(asking(), renderer, allow_self_grading=True)

"""`multi_turn`: an agent with bash, python and submit for tasks that have none, in the local sandbox."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, Target, choice, exact
from inspect_ai.solver import TaskState, generate, multiple_choice, system_message, use_tools, user_message
from inspect_ai.util import sandbox
from tinker_cookbook.renderers import Renderer, get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout

from bridge_groups import group_of, group_that_says, scoring
from bridge_parts import END, Says, add, call, decode, register_bytes
from inspect_tinker_bridge import load_environment

CODING = Path(__file__).parents[3] / "examples" / "coding_task.py"
SAMPLES = [
    Sample(input="What is in the file?", target="swordfish", id="file", files={"note.txt": "swordfish"})
]


def reading() -> Task:
    return Task(
        dataset=list(SAMPLES), solver=[system_message("Look."), generate()], scorer=exact(), sandbox="local"
    )


def submit(answer: str) -> str:
    return call("submit", json.dumps({"answer": answer}))


LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


async def test_the_documents_second_program_runs_with_its_llama_renderer(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its renderer knows no tools: they are text in the prompt. Here there is no Docker."""
    monkeypatch.syspath_prepend(str(CODING.parents[1]))
    tokenizer = register_bytes(byte_model, "meta-llama/Llama-3.1-8B-Instruct", LLAMA)
    renderer = get_renderer("LlamaRenderer", tokenizer)

    from examples.coding_task import coding_task  # pyright: ignore[reportMissingImports]

    dataset = load_environment(
        coding_task,
        renderer=renderer,
        env_type="multi_turn",
        max_turns=10,
        batch_size=4,
        sandbox_type="local",
    )
    tries = call("python", json.dumps({"code": f"{SOLUTION}\nprint(is_palindrome('aa'))"}))
    broken = "<tool_call>\n{broken\n</tool_call>"
    says = Says(renderer, *(f"I try.\n{text}<|eot_id|>" for text in (tries, broken, submit(SOLUTION))))
    group = await do_group_rollout(dataset.get_batch(0)[0], says)
    assert group.get_total_rewards() == [1.0]
    first, second, third = (decode(renderer, prompt) for prompt in says.prompts)
    assert first.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n")
    assert all(f'"name": "{name}"' in first for name in ("bash", "python", "submit"))
    assert second.endswith("<tool_response>\nTrue\n\n</tool_response>" + AGAIN)
    assert "Error: " in third.rpartition("<tool_response>")[2], "what does not parse is told to the model"
    for turn in (0, 1):
        extended = says.prompts[turn] + says.actions[turn]
        assert says.prompts[turn + 1][: len(extended)] == extended, "as it was sampled"


AGAIN = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


async def test_bash_and_submit_in_the_tasks_sandbox(renderer: Renderer) -> None:
    policy = Says(renderer, call("bash", '{"command": "cat note.txt"}') + END, submit("swordfish") + END)
    group = await group_of(reading, renderer, policy, env_type="multi_turn")
    assert group.get_total_rewards() == [1.0]
    first, second = (decode(renderer, prompt) for prompt in policy.prompts)
    assert first.count("<|im_start|>system") == 1
    assert "Look.\n\nYou must call submit() when you are done" in first
    assert all(f'"name": "{name}"' in first for name in ("bash", "python", "submit"))
    assert "<tool_response>\nswordfish\n</tool_response>" in second
    extended = policy.prompts[0] + policy.actions[0]
    assert policy.prompts[1][: len(extended)] == extended
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert metrics["turns"] == 2.0
    assert metrics["stop/completed"] == 1.0


async def test_python_runs_and_other_calls_beside_a_submit_run_too(renderer: Renderer) -> None:
    @scoring
    async def wrote(state: TaskState, target: Target) -> Score:
        return Score(value=int((await sandbox().read_file("out")) == "9"), answer=state.output.completion)

    task = Task(dataset=list(SAMPLES), solver=generate(), scorer=wrote(), sandbox="local")
    writes = call("python", json.dumps({"code": "open('out', 'w').write(str(3 * 3))"}))
    group = await group_that_says(task, renderer, f"{writes}\n{submit('done')}", env_type="multi_turn")
    assert group.get_total_rewards() == [1.0]
    assert group.trajectories_G[0].transitions[-1].logs["answer/wrote"] == "done"


async def test_a_turn_without_a_call_is_asked_to_go_on_and_max_turns_runs_the_last_calls(
    renderer: Renderer,
) -> None:
    @scoring
    async def touched(state: TaskState, target: Target) -> Score:
        return Score(value=int((await sandbox().exec(["test", "-f", "mark"])).success))

    task = Task(dataset=list(SAMPLES), solver=generate(), scorer=touched(), sandbox="local")
    policy = Says(renderer, "Hm." + END, call("bash", '{"command": "touch mark"}') + END)
    group = await group_of(task, renderer, policy, env_type="multi_turn", max_turns=2)
    assert "Hm.<|im_end|>\n<|im_start|>user\n" in decode(renderer, policy.prompts[1])
    assert group.trajectories_G[0].stop_reason == "max_turns"
    assert group.get_total_rewards() == [1.0]


async def test_a_tool_that_takes_too_long_is_a_result_that_says_so(renderer: Renderer) -> None:
    policy = Says(renderer, call("bash", '{"command": "sleep 30"}') + END, submit("swordfish") + END)
    group = await group_of(reading, renderer, policy, env_type="multi_turn", tool_timeout=1)
    assert "Error: Command timed out" in decode(renderer, policy.prompts[1])
    assert group.get_total_rewards() == [1.0]


async def test_the_tasks_own_tools_and_what_it_makes_of_the_answer_stay(renderer: Renderer) -> None:
    sample = Sample(input="Which?", choices=["red", "blue"], target="B", id=1)
    task = Task(
        dataset=[sample], solver=[use_tools(add()), multiple_choice()], scorer=choice(), sandbox="local"
    )
    policy = Says(renderer, submit("ANSWER: B") + END)
    group = await group_of(task, renderer, policy, env_type="multi_turn", submit_instruction=None)
    assert group.get_total_rewards() == [1.0]
    prompt = decode(renderer, policy.prompts[0])
    assert '"name": "add"' in prompt
    assert "You must call submit()" not in prompt


async def test_a_task_with_an_agent_of_its_own_keeps_it(renderer: Renderer) -> None:
    task = Task(dataset=list(SAMPLES), solver=react(tools=[add()]), scorer=exact(), sandbox="local")
    policy = Says(renderer, submit("swordfish") + END)
    await group_of(task, renderer, policy, env_type="multi_turn")
    assert '"name": "bash"' not in decode(renderer, policy.prompts[0])


async def test_a_solver_that_generates_again_finds_the_instruction_there(renderer: Renderer) -> None:
    task = Task(
        dataset=list(SAMPLES),
        solver=[system_message("Look."), generate(), user_message("Sure?"), generate()],
        scorer=exact(),
        sandbox="local",
    )
    policy = Says(renderer, submit("perhaps") + END, submit("swordfish") + END)
    group = await group_of(task, renderer, policy, env_type="multi_turn")
    assert group.get_total_rewards() == [1.0]
    assert decode(renderer, policy.prompts[1]).count("You must call submit()") == 1
    assert group.trajectories_G[0].transitions[0].metrics["fork"] == 0.0


SOLUTION = "def is_palindrome(s):\n    t = [c for c in s.lower() if c != ' ']\n    return t == t[::-1]"

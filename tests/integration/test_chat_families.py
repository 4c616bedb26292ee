"""A conversation of five turns with two tools in each chat family, through the gateway, the bridge, and
supervised training: exact, and how many sequences it took (`docs/tokens.md` has the table)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import match
from inspect_ai.solver import Generate, Solver, TaskState, solver, use_tools
from inspect_ai.tool import Tool, ToolDef, ToolParams
from tinker_cookbook.rl.rollout_runner import run_rollout

from bridge_parts import Says, calls_of
from chat_families import FAMILIES, Family, spell
from gateway_bench import CLAIM, Bench
from inspect_tinker_bridge import TaskRunner
from inspect_tinker_bridge.env import EnvOptions, InspectEnv
from inspect_tinker_bridge.tasks import load_inspect_task
from tinkerscript.config import RunConfig
from tinkerscript.gateway.conversation.tree import TEMPLATE_REWRITES
from tinkerscript.gateway.rendering import ChatRenderer
from tinkerscript.rollouts.alignment import find_errors
from tinkerscript.rollouts.call import Call, full_prompts
from tinkerscript.rollouts.merge import merge_calls
from tinkerscript.testing import ScriptedSampler
from tinkerscript.tokenizer import LightTokenizer
from tinkerscript.train.chats import load_chats
from tinkerscript.train.renderer import ModelRenderer

DOCS = Path(__file__).parents[2] / "docs" / "tokens.md"

CALLS = [
    ("look", '{"place": "hello"}'),
    ("weigh", '{"thing": "7"}'),
    None,
    ("look", '{"place": "é"}'),
    None,
]
"""What the model does in each turn: a call, or an answer."""

SYSTEM, QUESTION, AGAIN = "Be brief.", "What is in the hello box?", "And in the other?"
RESULTS = {"look": "a stone", "weigh": '{"kg": 7}'}


def replies(family: Family, tokenizer: LightTokenizer) -> list[list[int]]:
    """The ids that are sampled, spelled otherwise than encoding would."""
    turns: list[list[int]] = []
    for number, called in enumerate(CALLS):
        if called and family.call:
            text, end = family.call(*called), family.call_end or family.end
        else:
            text, end = family.reply(f"hello {number}"), family.end
        turns.append(spell(tokenizer, text + end))
    return turns


def sequences_of(calls: list[Call], sampled: list[list[int]]) -> int:
    """How many sequences the calls are, each checked."""
    assert [call.sampled_ids.tolist() for call in calls] == sampled
    assert {call.fork_reason for call in calls} <= {None, TEMPLATE_REWRITES}
    rollouts = merge_calls(calls, episode_uuid="e")
    prompts = full_prompts(calls)
    for rollout in rollouts:
        assert not find_errors(rollout, vocabulary=1000, prompts=prompts)
    assert sum(int(rollout.sampled.sum()) for rollout in rollouts) == sum(map(len, sampled))
    return len(rollouts)


async def by_gateway(folder: Path, family: Family) -> tuple[int, list[dict[str, Any]]]:
    """The number of sequences, and the conversation."""
    bench = Bench(folder)
    sampled = replies(family, bench.tokenizer)
    script = iter(sampled)
    bench.use(ScriptedSampler(lambda _: next(script)))
    fields: dict[str, Any] = {"max_tokens": 2000, "temperature": 1.0}
    if family.call:
        fields["tools"] = [_declared(name) for name in RESULTS]
    messages = ([{"role": "system", "content": SYSTEM}] if family.system else []) + [_user(QUESTION)]
    for called in CALLS:
        (choice,) = (await bench.ask(messages, **fields))["choices"]
        messages.append(choice["message"])
        calls = choice["message"].get("tool_calls") or ()
        assert bool(calls) == bool(called and family.call and family.reads_calls)
        assert all(
            json.loads(call["function"]["arguments"]) == json.loads(called[1]) for call in calls if called
        )
        results = [(call["id"], RESULTS[call["function"]["name"]]) for call in calls]
        messages += [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in results]
        messages += [] if calls else [_user(AGAIN)]
    await bench.client.aclose()
    return sequences_of(bench.claims.recorded[CLAIM], sampled), messages[:-1]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _declared(name: str) -> dict[str, Any]:
    argument = "place" if name == "look" else "thing"
    properties = {argument: {"type": "string", "description": "Which one."}}
    parameters = {"type": "object", "properties": properties, "required": [argument]}
    function = {"name": name, "description": f"Do {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def tool_named(name: str) -> Tool:
    """The declared function as a tool of Inspect's."""
    declared = _declared(name)["function"]

    async def execute(**_: str) -> str:
        return RESULTS[name]

    parameters = ToolParams.model_validate(declared["parameters"])
    return ToolDef(execute, name, declared["description"], parameters).as_tool()


@solver
def five_turns() -> Solver:
    """Asks until the model was called five times."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if not state.metadata["tools"]:
            state.tools = []
        if state.metadata["system"]:
            state.messages.insert(0, ChatMessageSystem(content=SYSTEM))
        while sum(message.role == "assistant" for message in state.messages) < len(CALLS):
            if state.messages[-1].role == "assistant":
                state.messages.append(ChatMessageUser(content=AGAIN))
            state = await generate(state, tool_calls="single")
        return state

    return solve


@task
def boxes() -> Task:
    """A sample for each family."""
    samples = [
        Sample(
            input=QUESTION,
            target="4",
            id=name,
            metadata={"tools": family.call is not None, "system": family.system},
        )
        for name, family in FAMILIES.items()
    ]
    return Task(dataset=samples, solver=[use_tools(*map(tool_named, RESULTS)), five_turns()], scorer=match())


async def by_bridge(runner: TaskRunner, sample: Sample, folder: Path, family: Family) -> int:
    """The number of sequences of an episode of the task in the trainer's process."""
    sampled = replies(family, LightTokenizer(folder))
    renderer = ModelRenderer(folder)
    env = InspectEnv(runner, sample, renderer, EnvOptions(env_type="task"))
    policy = Says(renderer)
    policy.actions = sampled
    trajectory = await run_rollout(policy, env)
    await env.abandon()
    made = [(call.function, call.arguments) for _, reply in env.exchanges for call in reply.tool_calls or ()]
    reads = family.call is not None and family.reads_calls
    assert made == [(name, json.loads(text)) for name, text in filter(None, CALLS) if reads]
    return sequences_of(calls_of(trajectory.transitions), sampled)


def by_sft(folder: Path, family: Family, messages: list[dict[str, Any]], file: Path) -> int:
    """The number of sequences that train on the conversation, each reply after its prompt."""
    renderer = ChatRenderer(folder)
    tools = [_declared(name) for name in RESULTS] if family.call else []
    said = [{**message, "content": message.get("content") or ""} for message in messages]
    file.write_text(json.dumps({"messages": said, "tools": tools}) + "\n")
    sft = {"data": str(file), "held_out": 0, "batch_size": 1}
    config = RunConfig.model_validate({"method": "sft", "engine": {"model": str(folder)}, "sft": sft})
    (chat,) = load_chats(config, folder).train
    datums = chat.datums
    replies_at = [index for index, message in enumerate(said) if message["role"] == "assistant"]
    written = [renderer.reply_ids(said[:index], said[index], tools) for index in replies_at]
    sequences = [_ids(datum) for datum in datums]
    assert [ids for sequence in sequences for ids in _trained_runs(sequence)] == written
    for ids, weights in sequences:
        first = weights.index(1)
        prompts = [renderer.render(said[:index], tools) for index in replies_at]
        assert ids[:first] in prompts, "it starts with a whole prompt"
    return len(datums)


def _ids(datum: Any) -> tuple[list[int], list[int]]:
    """All ids of a datum, and the weight of each."""
    weights, targets = (datum.loss_fn_inputs[name].to_numpy() for name in ("weights", "target_tokens"))
    ids = [*datum.model_input.to_ints(), int(targets[-1])]
    return ids, [0, *(int(weight) for weight in weights)]


def _trained_runs(sequence: tuple[list[int], list[int]]) -> Iterator[list[int]]:
    """The stretches of ids that train."""
    pairs = groupby(zip(*sequence, strict=True), key=lambda pair: pair[1])
    return ([token for token, _ in run] for weight, run in pairs if weight)


async def test_five_turns_with_two_tools_are_exact_in_every_family(tmp_path: Path) -> None:
    rows: list[str] = []
    info = load_inspect_task(boxes)
    samples = {sample.id: sample for sample in info.samples}
    async with TaskRunner(info) as runner:
        for name, family in FAMILIES.items():
            folder = family.write(tmp_path / name)
            gateway, messages = await by_gateway(folder, family)
            bridge = await by_bridge(runner, samples[name], folder, family)
            sft = by_sft(folder, family, messages, tmp_path / "chat.jsonl")
            rows.append(f"| `{name}` | {gateway} | {bridge} | {sft} |")
    table = [row.rpartition("|")[0].rpartition("|")[0] + "|" for row in _documented()]
    print("\n".join(rows))
    assert table == rows


def _documented() -> list[str]:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith(tuple(f"| `{name}` |" for name in FAMILIES))]

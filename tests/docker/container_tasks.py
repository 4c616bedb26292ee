"""Tasks in containers: the scorer's verdict is what a container says."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from uuid import uuid4

from inspect_ai import Task, task
from inspect_ai.agent import Agent, AgentState, agent, as_solver, sandbox_agent_bridge
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import Generate, Solver, TaskState, generate, solver
from inspect_ai.util import sandbox

FOLDER = Path(__file__).parent
COMPOSE = ("docker", str(FOLDER / "compose.yaml"))
ONE = ("docker", str(FOLDER / "one.yaml"))

FOUND = """
cat note.txt made-by-setup
ls /sys/class/net
cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2> /dev/null
cat /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max 2> /dev/null
"""
EXPECTED = ["a-file", "made", "lo", str(64 * 2**20), "50"]

OF_ITS_NAME = "import socket; print(int(socket.gethostname(), 16) % 1000 / 1000)"


@scorer(metrics=[accuracy()])
def said_in_the_container() -> Scorer:
    """A number that the container makes of its own name; what else it says is the explanation."""

    async def score(state: TaskState, target: Target) -> Score:
        found = await sandbox().exec(["sh", "-c", FOUND])
        made = [await box.exec(["python3", "-c", OF_ITS_NAME]) for box in (sandbox(), sandbox("beside"))]
        numbers = [run.stdout.strip() for run in made]
        return Score(
            value=float(numbers[0] or 0),
            answer=numbers[0],
            explanation="\n".join([*found.stdout.split(), f"{len(set(numbers))} machines"]),
        )

    return score


@solver
def after_the_gate() -> Solver:
    """Waits, with its containers running, until there is the file that `GATE` names; leaves one to say so."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        if gate := os.environ.get("GATE"):
            Path(f"{gate}-{uuid4()}").touch()
            while not Path(gate).exists():  # noqa: ASYNC110 (another process makes it)
                await asyncio.sleep(0.05)
        return state

    return solve


@scorer(metrics=[accuracy()])
def runs_python() -> Scorer:
    """1 if the container does."""

    async def score(state: TaskState, target: Target) -> Score:
        return Score(value=int((await sandbox().exec(["python3", "-c", OF_ITS_NAME])).success))

    return score


def _samples(number: int) -> MemoryDataset:
    return MemoryDataset(
        [
            Sample(
                id=i,
                input=f"Say something about {i}.",
                files={"note.txt": "a-file\n"},
                setup="#!/bin/sh\necho made > made-by-setup\n",
            )
            for i in range(number)
        ]
    )


@task
def contained() -> Task:
    """Two containers for each episode."""
    return Task(
        dataset=_samples(8),
        solver=[after_the_gate(), generate()],
        scorer=said_in_the_container(),
        sandbox=COMPOSE,
    )


@task
def light() -> Task:
    """One container for each episode."""
    samples = MemoryDataset([Sample(id=1, input="Say something.")])
    return Task(dataset=samples, solver=generate(), scorer=runs_python(), sandbox=ONE)


AGENT = """
import json, subprocess, sys, time, urllib.error, urllib.request

def ask(messages):
    body = json.dumps({"model": "inspect", "messages": messages}).encode()
    url = f"http://localhost:{sys.argv[1]}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while True:
        try:
            return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:  # The bridge starts beside the agent.
            time.sleep(0.1)

messages = [{"role": "user", "content": sys.argv[2]}]
while (said := ask(messages)).startswith("$ "):
    run = subprocess.run(said[2:], shell=True, capture_output=True, text=True)
    told = run.stdout + run.stderr + f"exit status {run.returncode}"
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
print(said)
"""
"""An agent: runs what the model writes after `$ `, and tells it what came of it."""


@agent
def in_its_container() -> Agent:
    """The agent as a program in the container; it reaches the model through Inspect's own bridge."""

    async def execute(state: AgentState) -> AgentState:
        async with sandbox_agent_bridge(state) as bridge:
            command = ["python3", "-c", AGENT, str(bridge.port), state.messages[-1].text]
            run = await sandbox().exec(command, concurrency=False)
        assert run.success, run.stderr
        return bridge.state

    return execute


@scorer(metrics=[accuracy()])
def passes_its_test() -> Scorer:
    """1 if the test passes on what was left in the container."""

    async def score(state: TaskState, target: Target) -> Score:
        run = await sandbox().exec(["python3", "-B", "test_calc.py"])
        return Score(value=int(run.success), answer=state.output.completion, explanation=run.stderr)

    return score


@solver
def from_outside() -> Solver:
    """The same agent, outside of the sandbox: only what it runs is inside."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        while (state := await generate(state)).output.completion.startswith("$ "):
            run = await sandbox().exec(["sh", "-c", state.output.completion[2:]])
            told = f"{run.stdout}{run.stderr}exit status {run.returncode}"
            state.messages.append(ChatMessageUser(content=told))
        return state

    return solve


def _mending(name: str, solver: Solver, sandbox: str | tuple[str, str]) -> Task:
    sample = Sample(
        id="add",
        input="The test test_calc.py fails. Repair calc.py until it passes.",
        files={
            "calc.py": "def add(a, b):\n    return a - b\n",
            "test_calc.py": "from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\n",
        },
    )
    return Task(
        dataset=MemoryDataset([sample], name=name), solver=solver, scorer=passes_its_test(), sandbox=sandbox
    )


@task
def mend_inside() -> Task:
    """In a container, by an agent in it."""
    return _mending("mend-inside", as_solver(in_its_container()), ONE)


@task
def mend_beside() -> Task:
    """In a bubblewrap sandbox."""
    return _mending("mend-beside", from_outside(), "bubblewrap")

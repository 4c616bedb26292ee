"""Environments made with verifiers' own `vf-init`, their open places filled in, and its own evaluation."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.cli.init import main
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

DATA = """    \"\"\"One row's data. Add task-specific fields here, such as a reference answer.\"\"\"\n"""
SCORE = '        raise NotImplementedError("Score the rollout and return a float (e.g. in [0, 1]).")\n'
LOAD = """\
        raise NotImplementedError(
            "Return this taskset's tasks, e.g. "
            "[{prefix}Task({prefix}Data(prompt=...), self.config.task) "
            "for i in range(self.config.num_tasks)]."
        )
"""
"""The open places of what `vf-init` writes."""

SUMS = {
    DATA: '    answer: str = ""\n',
    SCORE: """\
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))
""",
    LOAD.replace("{prefix}", "Sums"): """\
        return [
            SumsTask(
                SumsData(prompt=f"{n} + {n} =", system_prompt="Add.", answer=str(2 * n)), self.config.task
            )
            for n in range(self.config.num_tasks)
        ]
""",
}
ADDITION = {
    DATA: '    answer: str = ""\n',
    SCORE: """\
        return float(trace.last_reply == self.data.answer)
""",
    '    """How many tasks to build."""\n': """\
    held_out: bool = False
""",
    LOAD.replace("{prefix}", "Addition"): """\
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        pairs = [(a, b) for a, b in pairs if (a * b % 7 == 3) is self.config.held_out]
        return [
            AdditionTask(AdditionData(prompt=f"What is {a}+{b}?", answer=str(a + b)), self.config.task)
            for a, b in pairs[:: max(1, len(pairs) // self.config.num_tasks)]
        ]
""",
}
"""What the tiny model learns."""

SHOUT = {
    DATA: '    word: str = ""\n',
    SCORE: """\
        return float(self.data.word.upper() in trace.last_reply)

    @vf.reward(weight=0.5)
    async def asked(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages) == 1)
""",
    LOAD.replace("{prefix}", "Shout"): """\
        return [
            ShoutTask(ShoutData(prompt=f"Shout {word}", word=word), self.config.task)
            for word in ("ape", "bee")
        ]
""",
}

UV = f"""#!/bin/sh
# Stands for uv where no package can be fetched: what the chat program needs is installed here.
case "$*" in
    *--help*) echo "--script";;
    "python find"*) echo {sys.executable};;
esac
"""


def scaffold(name: str, folder: Path, filled: dict[str, str], *options: str) -> None:
    """Make the package `name` in `folder` by `vf-init`, and put it on the path of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vf-init"])  # It sets what it parses.
        main([name, "--path", str(folder), *options])
    module = name.replace("-", "_")
    taskset = folder / module / module / "taskset.py"
    text = taskset.read_text()
    for place, body in filled.items():
        assert text.count(place) == 1, f"vf-init writes something else now:\n{text}"
        text = text.replace(place, body)
    taskset.write_text(text)
    tool = taskset.parent / "servers" / "tool.py"
    if tool.exists():
        tool.write_text(tool.read_text().replace("        return text\n", "        return text.upper()\n"))
    sys.path.insert(0, str(folder / module))


def stand_in_for_uv(folder: Path) -> str:
    """A PATH with the stand-in first."""
    folder.mkdir()
    path = folder / "uv"
    path.write_text(UV)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


async def own_evaluation(environment: str, url: str, **config: Any) -> list[Any]:
    """verifiers' own evaluation, its chat program in processes of its own: an episode for each task."""
    taskset = {**config.pop("taskset", {}), "id": environment}
    env = load_environment(resolve_env_config({**config, "taskset": taskset}))
    context = ModelContext(model="policy", client=EvalClientConfig(base_url=url, api_key_var="NO_SUCH_KEY"))
    async with env.serving():
        slots = [env.slots(task)[0] for task in env.taskset]
        return await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))

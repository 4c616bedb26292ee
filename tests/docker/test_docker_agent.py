"""An agent that is a program in a container, beside one in a bubblewrap sandbox, under one worker."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import container_tasks
import pytest
import story
from oracle import check_exact
from scripted_model import Logged
from stage import open_stage

from inspect_tinker_bridge import load_inspect_task
from inspect_tinker_bridge.conversion import sample_summary
from interchange_helpers import collect, new_episode
from run_ledger import used
from tinkerscript.rollouts.call import full_prompts
from tinkerscript.trainer_link.messages import EpisodeAccepted, NewEpisode

TASKS = [f"{container_tasks.__file__}@{name}" for name in ("mend_inside", "mend_beside")]
SAYS = [
    "$ python3 -B test_calc.py",
    "$ sed -i 's/a - b/a + b/' calc.py && python3 -B test_calc.py",
    "It passes now.",
]


def answer(prompt: str) -> str:
    """The next of its lines, if what it was told is what must have come of the last one."""
    said = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    told = prompt.rpartition("exit status ")[2][:1] if said else ""
    assert told == ["", "1", "0"][len(said)], prompt
    return SAYS[len(said)]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_an_agent_in_a_container_beside_one_in_bubblewrap(tmp_path: Path) -> None:
    async with open_stage(tmp_path, seed=1) as stage:
        stage.model.reset()
        story.answer = answer
        episodes = list[NewEpisode]()
        for name in TASKS:
            info = load_inspect_task(name)
            payload = {"task": info.task_id, "sample": sample_summary(info.samples[0])}
            episodes.append(new_episode(payload=json.dumps(payload).encode()))
        await stage.link.register(episodes)
        with (tmp_path / "worker.log").open("wb") as log:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tinkerscript", "worker", "--concurrency", "4"),
                *(word for name in TASKS for word in ("--task", name)),
                *("--server", str(stage.http.base_url).rstrip("/")),
                stdout=log,
                stderr=log,
            )
        try:
            outcomes = (await collect(stage.link, len(episodes))).values()
            await stage.link.commit(used(list(outcomes)))
        finally:
            worker.send_signal(signal.SIGINT)
            await worker.wait()
        logged = list[Logged]()
        for outcome in outcomes:
            assert isinstance(outcome, EpisodeAccepted), (outcome, (tmp_path / "worker.log").read_text())
            assert outcome.reward == 1.0, outcome.metadata
            prompts = full_prompts(outcome.calls)
            log_of_it = [Logged(prompts[call.call_id], call.sampled, call.logprobs) for call in outcome.calls]
            assert len(log_of_it) == len(SAYS)
            check_exact(outcome.calls, log_of_it, sequences=1)
            logged += log_of_it
        assert Counter(logged) == Counter(stage.model.log)

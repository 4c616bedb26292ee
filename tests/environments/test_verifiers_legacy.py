"""Published packages of verifiers' older API, unmodified: rewards, metrics and messages are verifiers' own.

`stardata` (staros-stardata) brings its environment with it; agentsynth-ai writes one with its own command
line.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import verifiers as vf
from aiohttp import web
from claims import run_claim

from outside_chat import Message, OutsideChat, scripted_chat
from tinkerscript.errors import ConfigError, WorkerError
from tinkerscript.train.samples import usable_task
from tinkerscript.workers.task_kinds import load_task
from tinkerscript.workers.task_rollout import TaskRollout

POEM = "haiku of the sea\nthe old light turns and turns on\nnobody comes home"

LEDGER = "ledger_verifiers"
GROUPED = """
import verifiers as vf
from datasets import Dataset

def best_of(completions, **_):
    return [1.0] + [0.0] * (len(completions) - 1)

def load_environment():
    rows = Dataset.from_list([{"question": "a", "answer": "b"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[best_of]))
"""


@pytest.fixture(scope="module", autouse=True)
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The environment that `agentsynth pack new` and `agentsynth pack export` write."""
    from agentsynth.cli import main

    folder = tmp_path_factory.mktemp("packs")
    assert not main(["pack", "new", "ledger", "--dir", str(folder)])
    pack, out = str(folder / "ledger.yaml"), str(folder / "out")
    assert not main(["pack", "export", pack, "--format", "verifiers", "--out", out])
    (folder / "out" / "grouped.py").write_text(GROUPED)
    sys.path.insert(0, out)
    yield
    sys.path.remove(out)


def writer(messages: list[Message]) -> str:
    """A poem for some, less for others."""
    return POEM if len(messages[-1]["content"]) % 2 else "no"


def clerk(messages: list[Message]) -> str:
    return "2 of them are open" if "How many" in messages[-1]["content"] else "closed"


async def own_evaluation(environment: str, server: OutsideChat) -> list[Any]:
    """What verifiers' own evaluation makes of the first samples."""
    env = vf.load_environment(environment)
    client = vf.types.ClientConfig(api_base_url=server.url, api_key_var="NO_SUCH_KEY")
    results = await env.generate(env.get_dataset(n=6), client, model="policy", on_progress=[])
    return list(results["outputs"])


@pytest.mark.parametrize(
    ("environment", "script"), [("stardata.envs.constraint_gym", writer), (LEDGER, clerk)]
)
async def test_a_published_package_is_scored_as_verifiers_scores_it(environment: str, script: Any) -> None:
    task = load_task(f"verifiers:{environment}", {})
    samples = list(task.samples(held_out=False))[:6]
    async with scripted_chat(script) as server, TaskRollout({task.task_id: task}) as rollout:
        theirs = await own_evaluation(environment, server)
        asked, server.asked = server.asked, []
        claims = [run_claim(rollout, task, sample, server.url, n) for n, sample in enumerate(samples)]
        ours = await asyncio.gather(*claims)
    assert told(server) == Counter(json.dumps(messages, sort_keys=True) for _, messages in asked)
    assert {key for key, _ in server.asked} == {f"key-{n}" for n in range(len(samples))}
    assert [output.reward for output in ours] == [output["reward"] for output in theirs]
    assert len({output.reward for output in ours}) > 1, "the replies are not all alike"
    assert [output.metadata["scores"] for output in ours] == [output["metrics"] for output in theirs]


def told(server: OutsideChat) -> Counter[str]:
    return Counter(json.dumps(messages, sort_keys=True) for _, messages in server.asked)


async def test_a_thousand_claims_leave_nothing() -> None:
    task = load_task(f"verifiers:{LEDGER}", {})
    samples = task.samples(held_out=False)
    process = psutil.Process()
    slots = asyncio.Semaphore(20)
    async with scripted_chat(clerk) as server, TaskRollout({task.task_id: task}) as rollout:

        async def run(number: int) -> None:
            async with slots:
                await run_claim(rollout, task, samples[number % len(samples)], server.url, number)

        async def measured(first: int) -> tuple[int, Counter[str]]:
            await asyncio.gather(*(run(number) for number in range(first, first + 200)))
            gc.collect()
            return process.num_fds(), Counter(type(each).__name__ for each in gc.get_objects())

        fds, kinds = await measured(0)
        for first in (200, 400, 600):
            await measured(first)
        fds_after, kinds_after = await measured(800)
    assert len({key for key, _ in server.asked}) == 1000
    assert fds_after <= fds + 20
    grown = {
        name: (kinds[name], count)
        for name, count in kinds_after.items()
        if count > kinds[name] + 100 and name not in {"tuple", "dict", "list", "cell", "ReferenceType"}
    }
    assert grown == {}


async def test_a_call_that_fails_fails_the_episode() -> None:
    body = {"error": {"message": "no such field", "code": "unsupported_parameter"}}
    task = load_task(f"verifiers:{LEDGER}", {})
    refusing = scripted_chat(lambda _: web.json_response(body, status=400))
    async with refusing as server, TaskRollout({task.task_id: task}) as rollout:
        with pytest.raises(WorkerError, match="no such field"):
            await run_claim(rollout, task, task.samples(held_out=False)[0], server.url)


def test_an_environment_leaves_the_processs_signals_alone() -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        load_task(f"verifiers:{LEDGER}", {})
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)


def test_what_cannot_be_run_says_why() -> None:
    with pytest.raises(ConfigError, match="its rubric compares the rollouts of a group"):
        load_task("verifiers:grouped", {})
    with pytest.raises(ConfigError, match=r"raised .*unexpected keyword argument 'colour'"):
        usable_task("verifiers:stardata.envs.constraint_gym", {"colour": "red"})


def test_its_samples_are_json_and_tell_the_trainer_what_is_asked(tmp_path: Path) -> None:
    for held_out in (False, True):
        samples = load_task(f"verifiers:{LEDGER}", {}).samples(held_out=held_out)
        first = json.loads(json.dumps(dict(samples[0])))
        assert first["input"] == [
            {"role": "user", "content": "Close ticket 3 in the tickets table, then confirm what you did."}
        ]

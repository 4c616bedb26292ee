"""Rollouts on disk: JSON lines and Inspect logs with tokens and rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.log import list_eval_logs, read_eval_log_async
from inspect_ai.scorer import match
from tinker_cookbook.renderers import Renderer

from bridge_parts import END, add, bytes_renderer, call, encode, rollout
from inspect_tinker_bridge import RolloutLog, load_environment, read_rollouts

pytestmark = pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning")


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


async def test_nothing_is_saved_unless_asked(renderer: Renderer, tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "saved", inspect_logs=False)
    dataset = load_environment(adding, renderer, env_type="task", rollout_log=log)
    await rollout(dataset.get_batch(0)[0], renderer, call("submit", '{"answer": "2"}'))
    assert [path.suffix for path in log.folder.iterdir()] == [".jsonl"]
    assert read_rollouts(log.folder)[0]["reward"] == 0.0

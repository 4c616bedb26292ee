"""Tasks of the inspect_evals package as they are: loaded by name, run, scored as plain `inspect eval` does.

The package is in a folder of its own, without its dependencies (see the Makefile). A local file replaces its
hub dataset.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from inspect_ai import eval_async
from inspect_ai.dataset import Dataset, json_dataset
from inspect_ai.log import EvalLog, read_eval_log_async
from inspect_ai.model import ChatMessage, ModelOutput, ModelUsage, get_model
from tinker_cookbook.rl.rollouts import do_group_rollout

from bridge_parts import END, Says, bytes_renderer, call, decode, encode, register_bytes
from inspect_tinker_bridge import load_environment, load_inspect_task
from inspect_tinker_bridge._inspect_private import ProcessState, silent_display
from inspect_tinker_bridge.rendering import to_model_output

pytestmark = [
    pytest.mark.timeout(300),
]

TASKS = {
    "agent_threat_bench_memory_poison": [
        call("no_such_tool", "{}"),
        "Employees receive 20 days of paid vacation.",
    ],
    "agent_threat_bench_autonomy_hijack": ["I have sorted every email."],
    "agent_threat_bench_data_exfil": ["The ticket is resolved."],
    "mind2web_sc": ["Expected Decision: ALLOW"],
    "cyse2_vulnerability_exploit": ["The input is: AAAA"],
}
"""What the policy says, in turn."""


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_of_the_package_scores_as_under_plain_inspect(
    name: str, byte_model: Path, tmp_path: Path
) -> None:
    renderer, says = bytes_renderer(byte_model), TASKS[name]
    info = load_inspect_task(f"inspect_evals/{name}")
    local = "local" if info.sandbox_type else None
    dataset = load_environment(
        f"inspect_evals/{name}", renderer, env_type="task", max_samples=1, sandbox_type=local, max_turns=20
    )
    policy = Says(renderer, *(text + END for text in says))
    group = await do_group_rollout(dataset.get_batch(0)[0], policy)

    said = iter(says)

    def reply(messages: list[ChatMessage], *_: Any) -> ModelOutput:
        parsed, _termination = renderer.parse_response(encode(renderer, next(said) + END))
        output = to_model_output(parsed, prompt_tokens=1, sampled_tokens=1, truncated=False)
        output.usage = ModelUsage(total_tokens=2)
        return output

    model = get_model("mockllm/model", custom_outputs=reply, memoize=False)
    log = await plain(info.fresh_task(), model, tmp_path, local)
    assert log.samples is not None
    (sample,) = log.samples
    assert sample.error is None
    expected: dict[str, float] = {}
    for scorer, score in (sample.scores or {}).items():
        values = score.as_dict() if isinstance(score.value, dict) else {"": score.value}
        expected |= {f"score/{scorer}{'/' * bool(k)}{k}": number(value) for k, value in values.items()}
    metrics = group.trajectories_G[0].transitions[-1].metrics
    assert {key: value for key, value in metrics.items() if key.startswith("score/")} == expected
    assert group.get_total_rewards() == [pytest.approx(sum(expected.values()) / len(expected))]
    assert len(policy.prompts) == len(says)


def number(value: Any) -> float:
    return {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}[value] if isinstance(value, str) else float(value)


async def plain(task: Any, model: Any, folder: Path, sandbox: str | None) -> EvalLog:
    before = ProcessState()
    with silent_display():
        (log,) = await eval_async(
            task, model=model, limit=1, epochs=1, sandbox=sandbox, log_dir=str(folder), score_display=False
        )
    before.restore()
    return await read_eval_log_async(log.location)


ROWS = [
    {"question": "What is 6 times 7?", "answer": "Six sevens.\n#### 42"},
    {"question": "What is 1+1?", "answer": "Easy.\n#### 2"},
]
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


async def test_the_documents_first_program_runs_as_printed(
    byte_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from inspect_evals.gsm8k import gsm8k as module

    local = tmp_path / "gsm8k.jsonl"
    local.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")

    def from_file(sample_fields: Any, limit: int | None = None, **_: Any) -> Dataset:
        return json_dataset(str(local), sample_fields, limit=limit)

    monkeypatch.setattr(sys.modules[module.__module__], "hf_dataset", from_file)
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    register_bytes(byte_model, LLAMA, special)

    from inspect_evals.gsm8k import gsm8k
    from tinker_cookbook.renderers import get_renderer
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    from inspect_tinker_bridge import load_environment

    tokenizer = get_tokenizer("meta-llama/Llama-3.1-8B-Instruct")
    renderer = get_renderer("LlamaRenderer", tokenizer=tokenizer)

    dataset = load_environment(
        gsm8k,
        renderer=renderer,
        env_type="single_turn",
        max_samples=100,
        batch_size=8,
        num_envs_per_group=4,
    )

    policy = Says(renderer, "Six sevens.\nANSWER: 42<|eot_id|>")
    group = await do_group_rollout(dataset.get_batch(0)[0], policy)
    assert group.get_total_rewards() == [1.0] * 4
    prompt = decode(renderer, policy.prompts[0])
    assert "Solve the following math problem step by step" in prompt
    assert prompt.startswith("<|begin_of_text|>")

"""The document's first program, on gsm8k of the inspect_evals package; a local file replaces its hub dataset.

The package is in a folder of its own, without its dependencies (see the Makefile).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from inspect_ai.dataset import Dataset, json_dataset
from tinker_cookbook.rl.rollouts import do_group_rollout

from bridge_parts import Says, decode, register_bytes

pytestmark = pytest.mark.timeout(300)

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

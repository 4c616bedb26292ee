"""TRL's GRPOTrainer on the sums of examples/smollm2/tasks.py, with what examples/smollm2/sums.yaml sets.

    python bench/real_trl.py MODEL ADAPTER [--steps N] [--threads N] [--seed N]
    python bench/real_trl.py MODEL ADAPTER --score

The prompts are those of the task's training split, and the reward is the task's own scorer. Writes the
adapter to that folder, and prints a line of JSON for each step: its seconds, and the tokens that it sampled.
With `--score`, prints the share of replies to the test split that are correct, of whoever's adapter is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from inspect_ai.model import ModelName, ModelOutput
from inspect_ai.scorer import CORRECT, Target, match
from inspect_ai.solver import TaskState
from peft import LoraConfig, PeftModel
from tasks import sums
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

GROUPS, GROUP_SIZE, TOKENS, LORA_RANK, LEARNING_RATE = 8, 8, 32, 16, 3e-4


async def score(replies: list[str], targets: list[str]) -> list[float]:
    """1 for each reply that the task's scorer finds correct."""
    scorer = match(location="end", numeric=True)
    found = list[float]()
    for reply, target in zip(replies, targets, strict=True):
        output = ModelOutput.from_content("any", reply)
        state = TaskState(ModelName("any/any"), 0, 1, "", [], output=output)
        scored = await scorer(state, Target(target))
        assert scored is not None
        found.append(float(scored.value == CORRECT))
    return found


class Times(TrainerCallback):
    """Prints what each step took."""

    def __init__(self, answers: Any) -> None:
        self._answers, self._began = answers, 0.0
        self.tokens = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began, self.tokens = time.perf_counter(), 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        seconds = time.perf_counter() - self._began
        print(json.dumps({"seconds": seconds, "tokens": self.tokens}), file=self._answers)


@torch.inference_mode()
def held_out(model: Path, adapter: Path, *, times: int = 2) -> float:
    """The share of correct replies to the prompts of the test split, at temperature 1."""
    torch.manual_seed(0)
    tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left")
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy: Any = PeftModel.from_pretrained(base, str(adapter))
    samples = list(sums(split="test").dataset) * times
    correct = list[float]()
    for start in range(0, len(samples), GROUPS * GROUP_SIZE):
        chunk = samples[start : start + GROUPS * GROUP_SIZE]
        chats = [[{"role": "user", "content": each.input}] for each in chunk]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
        )
        found = policy.generate(**inputs, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=TOKENS)
        replies = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        correct += asyncio.run(score(replies, [str(each.target) for each in chunk]))
    return statistics.mean(correct)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Libraries print.
    torch.set_num_threads(options.threads)
    if options.score:
        print(held_out(options.model, options.adapter), file=answers)
        return
    times = Times(answers)

    def reward(completions: list[Any], target: list[str], completion_ids: list[list[int]], **_: Any) -> Any:
        times.tokens += sum(map(len, completion_ids))
        return asyncio.run(score([each[0]["content"] for each in completions], target))

    rows = [
        {"prompt": [{"role": "user", "content": sample.input}], "target": sample.target}
        for sample in sums(split="train").dataset
    ]
    settings = GRPOConfig(
        output_dir=str(options.adapter / "trl"),
        max_steps=options.steps,
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        max_completion_length=TOKENS,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LoraConfig(
            r=LORA_RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[times],
    )
    trainer.train()
    trainer.save_model(str(options.adapter))


if __name__ == "__main__":
    main()

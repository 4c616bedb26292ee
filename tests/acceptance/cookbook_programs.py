"""tinker_cookbook's own loops, unmodified, as a user starts them: `cookbook_programs.py NAME URL MODEL`.

Local data is where the loops look for it: `datasets` and `transformers` take a folder of the asked name in
the working directory before they ask a hub.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import chz
from tinker_cookbook.renderers import TrainOnWhat, get_renderer
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

from inspect_tinker_bridge import load_environment

ROOT = Path(__file__).parents[2]
TASK = f"{ROOT / 'examples' / 'arithmetic.py'}@arithmetic"
RENDERER = "qwen3_instruct"
DIGITS = (7, 3)
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
STRAWBERRY = [
    ("user", "How many r's are in strawberry?" + SUFFIX),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    ),
]
"""What rl_loop puts before each question of its dataset."""


@chz.chz
class ArithmeticBuilder(RLDatasetBuilder):
    """The example task through inspect_tinker_bridge, as rl.train takes its datasets."""

    model: str
    groups: int
    group_size: int
    held_out: int

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        renderer = get_renderer(RENDERER, get_tokenizer(self.model))
        train = load_environment(
            TASK,
            renderer,
            num_envs_per_group=self.group_size,
            batch_size=self.groups,
            task_args={"split": "train"},
        )
        test = load_environment(
            TASK, renderer, max_samples=self.held_out, batch_size=self.held_out, task_args={"split": "test"}
        )
        return train, test


def rl_train(url: str, model: str) -> None:
    from tinker_cookbook.rl import train

    config = train.Config(
        base_url=url,
        model_name=model,
        recipe_name="arithmetic",
        log_path="log",
        dataset_builder=ArithmeticBuilder(model=model, groups=16, group_size=8, held_out=80),
        learning_rate=1e-3,
        loss_fn="ppo",
        num_substeps=4,
        max_tokens=8,
        max_steps=5,
        eval_every=4,
        save_every=5,
        num_groups_to_log=0,
        rollout_json_export=False,
    )
    asyncio.run(train.main(config))


def sl_loop(url: str, model: str) -> None:
    """Chats in the place of no_robots: rl_loop's questions, answered rightly in half of the cases."""
    from tinker_cookbook.recipes import sl_loop

    rng = random.Random(1)
    rows: list[dict[str, Any]] = []
    for _ in range(32 * 40):
        asked, answer = _problem(rng.choice(DIGITS)), rng.choice(DIGITS)
        turns = [*STRAWBERRY, ("user", asked + SUFFIX), ("assistant", f"\\boxed{{{answer}}}")]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    _dataset("HuggingFaceH4/no_robots", "default", rows)
    sl_loop.main(
        sl_loop.Config(
            base_url=url,
            model_name=model,
            log_path="log",
            batch_size=32,
            learning_rate=3e-3,
            train_on_what=TrainOnWhat.LAST_ASSISTANT_MESSAGE,
            save_every=0,
        )
    )


def rl_loop(url: str, model: str) -> None:
    """One question, whose right answer the model of `sl_loop` gives half of the time."""
    from tinker_cookbook.recipes import rl_loop

    digit = DIGITS[0]
    row = {"question": _problem(digit), "answer": f"#### {digit}"}
    _dataset("openai/gsm8k", "main", [row] * (16 * 8))
    rl_loop.main(
        rl_loop.Config(
            base_url=url,
            model_name=model,
            log_path="log",
            batch_size=16,
            group_size=8,
            learning_rate=5e-4,
            max_tokens=12,
            save_every=5,
        )
    )


def _problem(digit: int) -> str:
    return f"Which digit is {digit}?"


def _dataset(name: str, config: str, rows: list[dict[str, Any]]) -> None:
    """A dataset folder of one split, where `datasets.load_dataset(name, config)` finds it."""
    folder = Path(name)
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    files = "data_files:\n  - split: train\n    path: train.jsonl"
    card = f"---\nconfigs:\n- config_name: {config}\n  {files}\n---\n"
    (folder / "README.md").write_text(card, encoding="utf-8")


PROGRAMS = {"rl_train": rl_train, "sl_loop": sl_loop, "rl_loop": rl_loop}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2], sys.argv[3])

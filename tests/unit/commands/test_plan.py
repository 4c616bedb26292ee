"""`tinkerscript train --plan` says what would run where; every example has a plan."""

from __future__ import annotations

import re
import shutil
from itertools import takewhile
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import Qwen3Config

from tinkerscript.commands.plan import check_fits, plan
from tinkerscript.config import load_config
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL

EXAMPLES = Path(__file__).parents[3] / "examples"
START = (EXAMPLES.parent / "docs" / "start.md").read_text()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


CONFIGS = sorted(
    path for path in EXAMPLES.rglob("*.yaml") if path.parent.name not in ("kubernetes", "monitoring")
)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_has_a_plan(path: Path) -> None:
    lines = plan(load_config(path))
    assert lines[0].startswith("processes that the run starts, on ")
    assert any(line.startswith("  trainer ") for line in lines)


def test_a_node_of_replicas() -> None:
    lines = plan(load_config(EXAMPLES / "scale" / "one_node.yaml"))
    text = "\n".join(lines)
    assert "cuda:0, bfloat16: LoRA adapter of rank 32 of Qwen/Qwen3-8B" in text
    gpus = [line.split("=")[1] for line in lines if "CUDA_VISIBLE_DEVICES" in line]
    assert gpus == [f"{number} \\" for number in range(1, 8)]
    assert "worker -> interchange server -> trainer -> one of 7 vLLM replicas" in text
    assert "2 live versions and a free slot, of 4" in text
    assert "200 steps of 64 groups of 16: 1024 a step, at most 1024 at once" in text


def test_a_recipe_is_spelled_out() -> None:
    """The demo's config has a clip of its own."""
    lines = plan(load_config(EXAMPLES / "arithmetic.yaml", ["training.recipe=dapo"]))
    text = "\n".join(lines)
    assert "recipe\n  dapo: Yu et al. 2025, arXiv:2503.14476\n" in text
    assert "\n    batch_rule: differing_groups\n" in text
    assert "\n    clip_high: 0.2, yours in place of 0.28\n" in text
    assert "\n    loss_config.kl_k3: 0.0, yours in place of 0.04" in "\n".join(
        plan(
            load_config(
                EXAMPLES / "arithmetic.yaml", ["training.recipe=grpo", "training.loss_config={kl_k3: 0}"]
            )
        )
    )


def qwen3(folder: Path, **sizes: int) -> Path:
    """The folder of a model of Qwen 3's family, without weights."""
    shutil.copyfile(TINY_MODEL / "tokenizer.json", folder / "tokenizer.json")
    shape = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    more = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True}
    Qwen3Config(**(shape | more | sizes)).save_pretrained(folder)
    return folder


def test_the_first_command_for_a_real_model_fits_a_gpu_of_24_gib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/start.md, "Real models". Without its last setting, plan and run say that batches may not fit."""
    (command,) = re.findall(r"tinkerscript train my.yaml (--set engine.model=Qwen/.*?)```", START, re.DOTALL)
    settings = re.findall(r"--set (\S+)", command)
    folder = qwen3(tmp_path, hidden_size=1024, intermediate_size=3072)
    assert settings[0] == "engine.model=Qwen/Qwen3-0.6B"
    monkeypatch.setattr("tinkerscript.engine.memory.available_memory", lambda _: 24 * 2**30)
    config = load_config(EXAMPLES / "arithmetic.yaml", [f"engine.model={folder}", *settings[1:]])
    assert not [line for line in plan(config) if "not fit" in line]
    assert settings[-1] == "engine.activation_checkpointing=true"
    without = load_config(EXAMPLES / "arithmetic.yaml", [f"engine.model={folder}", *settings[1:-1]])
    (problem,) = [line for line in plan(without) if line.startswith("may not fit: ")]
    assert "engine.activation_checkpointing=true" in problem
    notes: list[str] = []
    check_fits(without, tmp_path, notes.append)
    assert [note.split(":")[0] for note in notes] == ["may not fit"]


def test_the_memory_of_a_models_training_and_sampling(tmp_path: Path) -> None:
    """Qwen3-1.7B: 1.72 billion parameters, 28 layers with 1,024 channels of keys."""
    qwen3(tmp_path, hidden_size=2048, intermediate_size=6144)
    overrides = [f"engine.model={tmp_path}", "sampling.max_tokens=2000"]
    one = load_config(EXAMPLES / "scale" / "one_gpu.yaml", overrides)
    to_train, to_sample = memory_lines(plan(one))
    assert re.search(r"to train +\d\.\d GiB: 4\.\d GiB of weights and AdamW", to_train), to_train
    cache = 2 * 2 * 1024 * 28 * 32 * 2112 / 2**30  # 2,073 tokens, and what is left of 64.
    wanted = r"to sample +(\S+) GiB more, for 32 sequences of 2,073 tokens; (\S+) GiB in all"
    more = re.search(wanted, to_sample)
    assert more, to_sample
    assert cache < float(more[1]) < 1.5 * cache
    assert float(more[2]) < 24, "the example says that 24 GiB are enough"

    two = load_config(EXAMPLES / "scale" / "laptop.yaml", ["engine.devices=2", "engine.sharding=shard"])
    shared = plan(two)
    assert "on each device" in memory_lines(shared)[0]
    assert "the first device also 3 MiB, to sample" in memory_lines(shared)[0]

    node = load_config(EXAMPLES / "scale" / "one_node.yaml", [f"engine.model={tmp_path}"])
    to_train, of_vllm = memory_lines(plan(node))
    assert "3.2 GiB of weights per GPU" in of_vllm


def test_frozen_roles_count_once_for_each_base_that_is_not_there_already(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(TINY_MODEL, copy)
    overrides = [
        "roles.start.kind=frozen",
        "roles.copy.kind=frozen",
        f"roles.copy.model={copy}",
        "roles.again.kind=frozen",
        f"roles.again.model={copy}",
        "roles.far.kind=frozen",
        "roles.far.base_url=http://127.0.0.1:1",
    ]
    whole = frozen_lines(plan(load_config(EXAMPLES / "arithmetic.yaml", overrides)))
    assert [line.split()[0] for line in whole] == ["start", "copy", "again"]
    assert re.search(r"[2-9] MiB of weights, frozen", whole[0]), whole[0]
    assert whole[0].split()[1:3] == whole[1].split()[1:3]
    assert "nothing more" in whole[2]
    adapter = plan(load_config(EXAMPLES / "arithmetic.yaml", [*overrides, "engine.lora.rank=8"]))
    assert "nothing more" in frozen_lines(adapter)[0], "the adapter's base"


def frozen_lines(lines: list[str]) -> list[str]:
    return [line for line in memory_lines(lines) if line.split()[0] in ("start", "copy", "again", "far")]


def test_the_memory_of_a_model_that_cannot_be_read_is_not_known() -> None:
    config = load_config(EXAMPLES / "scale" / "laptop.yaml", ["engine.model=/nowhere"])
    assert memory_lines(plan(config)) == [
        line for line in plan(config) if "not known: engine.model: '/nowhere' does" in line
    ]


def memory_lines(lines: list[str]) -> list[str]:
    at = next(index for index, line in enumerate(lines) if line.startswith("memory"))
    return list(takewhile(lambda line: line.startswith(" "), lines[at + 1 :]))


def huge_model(folder: Path) -> Path:
    """The folder of a model of 40 billion parameters, without weights."""
    shutil.copyfile(TINY_MODEL / "tokenizer.json", folder / "tokenizer.json")
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=8192,
        intermediate_size=24_576,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
    ).save_pretrained(folder)
    return folder


def test_a_run_without_room_is_refused_and_its_plan_says_what_to_change(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "arithmetic.yaml", [f"engine.model={huge_model(tmp_path)}"])
    (problem,) = [line for line in plan(config) if line.startswith("will not fit: ")]
    with pytest.raises(ConfigError) as refused:
        check_fits(config, tmp_path, print)
    for text in (problem, str(refused.value)):
        assert re.search(r"engine.model: .* will not fit: .* GiB free; use engine.lora.rank=16", text), text


def test_checkpoints_without_room_are_refused(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "arithmetic.yaml", ["training.keep_checkpoints=100000000"])
    with pytest.raises(ConfigError, match=r"the checkpoints will not fit: .*lower training.keep_checkpoints"):
        check_fits(config, tmp_path, print)


def test_the_plan_is_for_the_tasks_own_lengths() -> None:
    """The demo's prompts and replies are short, and a step of 16 of them is less than a microbatch."""
    small = ["training.groups_per_step=4", "training.group_size=4", "sampling.max_tokens=8"]
    to_train, to_sample = memory_lines(plan(load_config(EXAMPLES / "arithmetic.yaml", small)))
    length = re.search(r"sequences of (\d+) tokens", to_sample)
    assert length, to_sample
    assert int(length[1]) < 120
    assert f"a microbatch of {16 * int(length[1]):,} tokens" in to_train


def test_a_checkpoint_takes_what_the_plan_says() -> None:
    """The tiny model's are 2.8 MB of weights and 5.5 MB of AdamW's moments."""
    lines = plan(load_config(EXAMPLES / "arithmetic.yaml"))
    (checkpoints,) = [line for line in lines if line.startswith("  checkpoints ")]
    assert checkpoints.endswith("24 MiB: 2 that are kept and one being written, 8 MiB each"), checkpoints


def test_the_plan_says_what_is_not_held_out() -> None:
    apart = plan(load_config(EXAMPLES / "arithmetic.yaml"))
    assert apart[-2] == "  1,000 held out, before and after training"
    same = plan(load_config(EXAMPLES / "arithmetic.yaml", ["task.eval_args={split: train}"]))
    assert same[-2] == (
        "  1,000 to evaluate, before and after training; not held out: "
        "1,000 of their 1,000 samples are trained on too"
    )


def test_the_plan_says_whether_evaluations_run_beside_training() -> None:
    demo = load_config(EXAMPLES / "arithmetic.yaml")
    often = "  200 to evaluate, after every 5 steps"
    beside = f"{often}, beside training: at most 5% of the episodes"
    steps = 200 / 0.05 * 0.95 / 256
    assert 14 < steps < 15
    assert plan(demo)[-1].startswith(f"{beside}, so one takes 15 steps, or 5 with evaluation.share=0.14, if ")
    just = load_config(EXAMPLES / "arithmetic.yaml", ["evaluation.share=0.14"])
    assert "so one takes" not in plan(just)[-1]
    adapters = ["engine.lora.rank=8", "evaluation.share=0.25"]
    assert plan(load_config(EXAMPLES / "arithmetic.yaml", adapters))[-1] == (
        f"{often}, beside training: at most 25% of the episodes"
    )
    replicas = ["inference.backend=vllm", "inference.replicas=[http://10.0.0.1:8000]"]
    all_weights = load_config(EXAMPLES / "arithmetic.yaml", replicas)
    assert plan(all_weights)[-1].startswith(f"{often}: training waits for them, ")
    adapters = load_config(EXAMPLES / "arithmetic.yaml", [*replicas, *adapters, "inference.max_loras=2"])
    assert plan(adapters)[-1].startswith(f"{often}: training waits for them, ")


def test_a_service_and_a_run_in_one_process() -> None:
    service = "\n".join(plan(load_config(EXAMPLES / "scale" / "tinker_service.yaml")))
    assert "trainer -> the Tinker service" in service
    alone = "\n".join(plan(load_config(EXAMPLES / "arithmetic.yaml", ["enable_tinkerscript_mode=false"])))
    assert "trainer -> its engine, at most 128 sequences at once (in one process" in alone
    assert "at most 32 at once" in alone, "one worker's"

"""`tinkerscript train --plan` says what would run where, which is what every launcher starts."""

from __future__ import annotations

import os
import re
import shutil
from itertools import takewhile
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import Qwen3Config

from tinkerscript.commands.plan import check_fits, plan
from tinkerscript.config import load_config, parse_config
from tinkerscript.errors import ConfigError
from tinkerscript.model_folder import TINY_MODEL
from tinkerscript.processes.children import worker_command
from tinkerscript.processes.launcher import Slot
from tinkerscript.processes.planned import PlannedProcess, plan_of

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


def of(example: str, *overrides: str) -> list[str]:
    """The lines of an example's plan."""
    return plan(load_config(EXAMPLES / f"{example}.yaml", list(overrides)))


def test_a_node_of_replicas() -> None:
    lines = of("scale/one_node")
    text = "\n".join(lines)
    assert "cuda:0, bfloat16: LoRA adapter of rank 32 of Qwen/Qwen3-8B" in text
    gpus = [line.split("=")[1] for line in lines if "CUDA_VISIBLE_DEVICES" in line]
    assert gpus == [f"{number} \\" for number in range(1, 8)]
    assert "worker -> interchange server -> trainer -> one of 7 vLLM replicas" in text
    assert "2 live versions and a free slot, of 4" in text
    assert "200 steps of 64 groups of 16: 1024 a step, at most 1024 at once" in text


def test_a_service_and_a_run_in_one_process() -> None:
    assert "trainer -> the Tinker service" in "\n".join(of("scale/tinker_service"))
    alone = "\n".join(of("arithmetic", "enable_tinkerscript_mode=false"))
    assert "trainer -> its engine, at most 128 sequences at once (in one process" in alone
    assert "at most 32 at once" in alone, "one worker's"


def test_a_recipe_is_spelled_out() -> None:
    """The demo's config has a clip of its own."""
    text = "\n".join(of("arithmetic", "training.recipe=dapo"))
    assert "recipe\n  dapo: Yu et al. 2025, arXiv:2503.14476\n" in text
    assert "\n    batch_rule: differing_groups\n" in text
    assert "\n    clip_high: 0.2, yours in place of 0.28\n" in text


# Memory


def memory_lines(lines: list[str]) -> list[str]:
    at = next(index for index, line in enumerate(lines) if line.startswith("memory"))
    return list(takewhile(lambda line: line.startswith(" "), lines[at + 1 :]))


def qwen3(folder: Path, hidden: int, intermediate: int, layers: int = 28) -> str:
    """The setting of a model of Qwen 3's family, without weights, in a folder that is made."""
    shutil.copyfile(TINY_MODEL / "tokenizer.json", folder / "tokenizer.json")
    shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    more = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": True}
    Qwen3Config(**(shape | heads | more)).save_pretrained(folder)
    return f"engine.model={folder}"


def test_the_first_real_model_fits_a_gpu_of_24_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/start.md, "Real models". Without its last setting, plan and run say that batches may not fit."""
    (command,) = re.findall(r"tinkerscript train my.yaml (--set engine.model=Qwen/.*?)```", START, re.DOTALL)
    model, *settings = re.findall(r"--set (\S+)", command)
    assert (model, settings[-1]) == ("engine.model=Qwen/Qwen3-0.6B", "engine.activation_checkpointing=true")
    settings.insert(0, qwen3(tmp_path, 1024, 3072))
    monkeypatch.setattr("tinkerscript.engine.memory.available_memory", lambda _: 24 * 2**30)
    assert not [line for line in of("arithmetic", *settings) if "not fit" in line]
    (problem,) = [line for line in of("arithmetic", *settings[:-1]) if line.startswith("may not fit: ")]
    assert settings[-1] in problem
    notes: list[str] = []
    check_fits(load_config(EXAMPLES / "arithmetic.yaml", settings[:-1]), tmp_path, notes.append)
    assert [note.split(":")[0] for note in notes] == ["may not fit"]


def test_the_memory_of_a_models_training_and_sampling(tmp_path: Path) -> None:
    """Qwen3-1.7B: 1.72 billion parameters, 28 layers with 1,024 channels of keys."""
    model = qwen3(tmp_path, 2048, 6144)
    to_train, to_sample = memory_lines(of("scale/one_gpu", model, "sampling.max_tokens=2000"))
    assert re.search(r"to train +\d\.\d GiB: 4\.\d GiB of weights and AdamW", to_train), to_train
    cache = 2 * 2 * 1024 * 28 * 32 * 2112 / 2**30  # 2,073 tokens, and what is left of 64.
    wanted = r"to sample +(\S+) GiB more, for 32 sequences of 2,073 tokens; (\S+) GiB in all"
    more = re.search(wanted, to_sample)
    assert more, to_sample
    assert cache < float(more[1]) < 1.5 * cache
    assert float(more[2]) < 24, "the example says that 24 GiB are enough"
    shared = memory_lines(of("scale/laptop", "engine.devices=2", "engine.sharding=shard"))[0]
    assert "on each device" in shared
    assert "the first device also 3 MiB, to sample" in shared
    assert "3.2 GiB of weights per GPU" in memory_lines(of("scale/one_node", model))[1]


def test_frozen_roles_count_once_for_each_base_that_is_not_there_already(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(TINY_MODEL, copy)
    model = {"start": "", "copy": f", model: {copy}", "again": f", model: {copy}"}
    roles = [f"roles.{name}={{kind: frozen{which}}}" for name, which in model.items()]
    roles.append("roles.far={kind: frozen, base_url: 'http://127.0.0.1:1'}")
    start, copied, again, *far = memory_lines(of("arithmetic", *roles))[-3:]
    assert re.search(r"start +[2-9]\.?\d* MiB of weights, frozen", start), start
    assert start.split()[1:3] == copied.split()[1:3]
    assert "nothing more" in again
    assert not far, "it is computed elsewhere"
    adapter = memory_lines(of("arithmetic", *roles, "engine.lora.rank=8"))[-3]
    assert "nothing more" in adapter, "the adapter's base"


def test_the_memory_of_a_model_that_cannot_be_read_is_not_known() -> None:
    (line,) = memory_lines(of("scale/laptop", "engine.model=/nowhere"))
    assert "not known: engine.model: '/nowhere' does" in line


def test_a_run_without_room_is_refused_and_its_plan_says_what_to_change(tmp_path: Path) -> None:
    """With 40 billion parameters."""
    model = qwen3(tmp_path, 8192, 24_576, layers=48)
    (problem,) = [line for line in of("arithmetic", model) if line.startswith("will not fit: ")]
    with pytest.raises(ConfigError) as refused:
        check_fits(load_config(EXAMPLES / "arithmetic.yaml", [model]), tmp_path, print)
    for text in (problem, str(refused.value)):
        assert re.search(r"engine.model: .* will not fit: .* GiB free; use engine.lora.rank=16", text), text


def test_checkpoints_without_room_are_refused(tmp_path: Path) -> None:
    config = load_config(EXAMPLES / "arithmetic.yaml", ["training.keep_checkpoints=100000000"])
    with pytest.raises(ConfigError, match=r"the checkpoints will not fit: .*lower training.keep_checkpoints"):
        check_fits(config, tmp_path, print)


def test_the_plan_is_for_the_tasks_own_lengths() -> None:
    """The demo's prompts and replies are short, and a step of 16 of them is less than a microbatch."""
    small = ["training.groups_per_step=4", "training.group_size=4", "sampling.max_tokens=8"]
    to_train, to_sample = memory_lines(of("arithmetic", *small))
    length = re.search(r"sequences of (\d+) tokens", to_sample)
    assert length, to_sample
    assert int(length[1]) < 120
    assert f"a microbatch of {16 * int(length[1]):,} tokens" in to_train


def test_a_checkpoint_takes_what_the_plan_says() -> None:
    """The tiny model's are 2.8 MB of weights and 5.5 MB of AdamW's moments."""
    (checkpoints,) = [line for line in of("arithmetic") if line.startswith("  checkpoints ")]
    assert checkpoints.endswith("24 MiB: 2 that are kept and one being written, 8 MiB each"), checkpoints


# Evaluations


def test_the_plan_says_what_is_not_held_out() -> None:
    assert of("arithmetic")[-2] == "  1,000 held out, before and after training"
    same = of("arithmetic", "task.eval_args={split: train}")[-2]
    assert same.endswith("; not held out: 1,000 of their 1,000 samples are trained on too")


def test_the_plan_says_whether_evaluations_run_beside_training() -> None:
    often = "  200 to evaluate, after every 5 steps"
    beside = f"{often}, beside training: at most 5% of the episodes"
    steps = 200 / 0.05 * 0.95 / 256
    assert 14 < steps < 15
    assert of("arithmetic")[-1].startswith(
        f"{beside}, so one takes 15 steps, or 5 with evaluation.share=0.14, if "
    )
    assert "so one takes" not in of("arithmetic", "evaluation.share=0.14")[-1]
    replicas = ["inference.backend=vllm", "inference.replicas=[http://10.0.0.1:8000]"]
    adapters = ["engine.lora.rank=8", "inference.max_loras=2", "evaluation.share=0.25"]
    for settings in (replicas, [*replicas, *adapters]):
        assert of("arithmetic", *settings)[-1].startswith(f"{often}: training waits for them, ")


# What launchers start


VLLM = EXAMPLES / "arithmetic_vllm.yaml"


def processes(*overrides: str) -> dict[str, PlannedProcess]:
    return {process.name: process for process in plan_of(load_config(VLLM, list(overrides)), Path("run"))}


def test_a_run_has_a_server_a_trainer_replicas_and_workers() -> None:
    found = processes("engine.devices=2", "workers.count=3")
    assert list(found) == [
        *("interchange server", "trainer", "page", "trainer rank 1", "replica 0", "replica 1"),
        *("worker 0", "worker 1", "worker 2"),
    ]
    beside = [name for name, process in found.items() if process.on_trainer_machine]
    assert beside == ["interchange server", "trainer", "page"]
    assert [name for name, process in found.items() if not process.resources.cpus] == ["page"]
    assert found["trainer rank 1"].environment["RANK"] == "1"
    assert all(process.after == ("interchange server",) for name, process in found.items() if "w" in name)
    assert [process.log for process in found.values()][:6] == [
        *("server.log", "trainer.log", "page.log", "rank-1.log", "replica-0.log", "replica-1.log")
    ]


def test_no_command_has_a_secret_or_a_value_that_is_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERSCRIPT_CLIENT_TOKEN", "the-clients-secret-token")
    monkeypatch.setenv("HF_TOKEN", "the-token-of-the-hub")
    found = processes("cluster.environment=[HF_TOKEN]", "cluster.launcher=ray")
    assert "secret-token" not in repr(found)
    assert "HF_TOKEN" in found["worker 0"].secrets
    assert "HF_TOKEN" in found["replica 0"].secrets
    child = found["worker 0"].child(Path("run"), lambda n: {Slot.CLIENT: f"c-{n}"}, os.environ)
    assert child.argv(3)[-2:] == ["c-3", "--exit-with-parent"]
    assert child.environ["HF_TOKEN"] == "the-token-of-the-hub"
    assert child.environ["TINKERSCRIPT_CLIENT_TOKEN"] == "the-clients-secret-token"
    assert "secret-token" not in " ".join(child.argv(0)) + repr(child)
    assert "TINKERSCRIPT_ADMIN_TOKEN" not in found["worker 0"].secrets


def test_keys_of_roles_are_withheld_from_whoever_needs_none() -> None:
    judge = "{kind: outside, base_url: http://127.0.0.1:9/v1, model: m, api_key_env: JUDGE_KEY}"
    teacher = "{kind: frozen, base_url: http://127.0.0.1:9/v1, model: m, api_key_env: TEACHER_KEY}"
    found = processes("engine.devices=2", f"roles.judge={judge}", f"roles.teacher={teacher}")
    for name, process in found.items():
        withheld = {"JUDGE_KEY", "TEACHER_KEY"} & {*process.withheld}
        expected = {"interchange server": {"TEACHER_KEY"}, "trainer": set[str]()}
        assert withheld == expected.get(name, {"JUDGE_KEY", "TEACHER_KEY"}), name
    assert "TINKERSCRIPT_ADMIN_TOKEN" in found["worker 0"].withheld
    assert "TINKERSCRIPT_ADMIN_TOKEN_FILE" not in found["interchange server"].withheld


def test_replicas_take_the_gpus_that_are_named_or_that_ray_chooses() -> None:
    pair = "inference.launch.tensor_parallel=2"
    named = processes("inference.launch.gpus=[4,5,6,7]", pair)
    assert [named[f"replica {n}"].environment["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["4,5", "6,7"]
    chosen = processes("inference.launch.gpus=any", pair, "cluster.launcher=ray")
    assert chosen["replica 1"].resources.gpus == 2
    assert "CUDA_VISIBLE_DEVICES" not in chosen["replica 1"].environment


LAUNCH = "engine: {{lora: {{rank: 1}}}}\ninference: {{backend: vllm, launch: {{replicas: 1, gpus: {}}}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: {address: '10.0.0.1:6379'}", "'10.0.0.1:6379' is for cluster.launcher: ray"),
        ("cluster: {launcher: ray}\nengine: {device: 'cuda:1'}", "cuda, not 'cuda:1'"),
        ("cluster: {launcher: ray}\nmethod: sft", "method: sft and enable_tinkerscript_mode"),
        (f"cluster: {{launcher: ray}}\n{LAUNCH.format('[0]')}", r"Ray chooses the GPUs: any, not \[0\]"),
        (LAUNCH.format("any"), "any is for cluster.launcher: ray"),
    ],
)
def test_what_a_launcher_cannot_place_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(text, source="c")


def test_the_plan_prints_the_commands_that_are_executed() -> None:
    config = load_config(VLLM, ["workers.count=2", "cluster.launcher=ray"])
    lines = plan(config)
    assert lines[0] == "processes that the run starts, on a new Ray cluster on this machine"
    for process in plan_of(config, Path("run")):
        program = [word for word in process.command if not word.startswith("run")][:3]
        assert any(all(word in line for word in program) for line in lines), process.name
    assert any(line.startswith("  worker 0-1 ") for line in lines)


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("workers: {script: /home/me/my agents/a b.py}", "'a b.py'"),
        ("task: {name: /home/me/tasks.py@words}", "--task tasks.py@words"),
        ("tasks: [{name: verifiers:a}, {name: mine.py@a b}]", "--task verifiers:a --task 'mine.py@a b'"),
        (
            "tasks: [{name: /home/me/t.py@one, train_args: {n: 1}}, {name: two, eval_args: {n: 2}}]",
            """--task t.py@one --task-args '{"n": 1}' --eval-args '{}' """
            """--task two --task-args '{}' --eval-args '{"n": 2}'""",
        ),
        (
            "task: {name: t.py@sums, sandbox_type: docker, sandbox_config: /home/me/compose.yaml}",
            "--task t.py@sums --sandbox docker:compose.yaml",
        ),
        ("{}", "SCRIPT"),
    ],
)
def test_the_command_of_a_worker_names_what_runs_on_another_machine(text: str, run: str) -> None:
    """The script or the tasks without this machine's folders, in words that a shell takes as they are."""
    command = worker_command(parse_config(text, source="c"), "http://a:7")
    assert command == f"tinkerscript worker {run} --server http://a:7"

"""The plan of a run as a value: what every launcher starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tinkerscript.commands.plan import plan
from tinkerscript.config import load_config, parse_config
from tinkerscript.errors import ConfigError
from tinkerscript.processes.children import worker_command
from tinkerscript.processes.launcher import Slot
from tinkerscript.processes.planned import PlannedProcess, plan_of

EXAMPLES = Path(__file__).parents[3] / "examples"
VLLM = EXAMPLES / "arithmetic_vllm.yaml"


def of(*overrides: str, path: Path = VLLM) -> dict[str, PlannedProcess]:
    return {process.name: process for process in plan_of(load_config(path, list(overrides)), Path("run"))}


def test_a_run_has_a_server_a_trainer_replicas_and_workers() -> None:
    found = of("engine.devices=2", "workers.count=3")
    assert list(found) == [
        *("interchange server", "trainer", "page", "trainer rank 1", "replica 0", "replica 1"),
        *("worker 0", "worker 1", "worker 2"),
    ]
    beside = [name for name, process in found.items() if process.on_trainer_machine]
    assert beside == ["interchange server", "trainer", "page"]
    assert [name for name, process in found.items() if not process.resources.cpus] == ["page"], (
        "it needs no room"
    )
    assert found["trainer rank 1"].environment["RANK"] == "1"
    assert all(process.after == ("interchange server",) for name, process in found.items() if "w" in name)
    assert [process.log for process in found.values()][:6] == [
        *("server.log", "trainer.log", "page.log", "rank-1.log", "replica-0.log", "replica-1.log")
    ]


def test_no_command_has_a_secret_or_a_value_that_is_known_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKERSCRIPT_CLIENT_TOKEN", "the-clients-secret-token")
    monkeypatch.setenv("HF_TOKEN", "the-token-of-the-hub")
    found = of("cluster.environment=[HF_TOKEN]", "cluster.launcher=ray")
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
    found = of("engine.devices=2", f"roles.judge={judge}", f"roles.teacher={teacher}")
    for name, process in found.items():
        withheld = {"JUDGE_KEY", "TEACHER_KEY"} & {*process.withheld}
        expected = {"interchange server": {"TEACHER_KEY"}, "trainer": set[str]()}
        assert withheld == expected.get(name, {"JUDGE_KEY", "TEACHER_KEY"}), name
    assert "TINKERSCRIPT_ADMIN_TOKEN" in found["worker 0"].withheld
    assert "TINKERSCRIPT_ADMIN_TOKEN_FILE" not in found["interchange server"].withheld


def test_replicas_take_the_gpus_that_are_named_or_that_ray_chooses() -> None:
    pair = "inference.launch.tensor_parallel=2"
    named = of("inference.launch.gpus=[4,5,6,7]", pair)
    assert [named[f"replica {n}"].environment["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["4,5", "6,7"]
    chosen = of("inference.launch.gpus=any", pair, "cluster.launcher=ray")
    assert chosen["replica 1"].resources.gpus == 2
    assert "CUDA_VISIBLE_DEVICES" not in chosen["replica 1"].environment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: {address: '10.0.0.1:6379'}", "'10.0.0.1:6379' is for cluster.launcher: ray"),
        ("cluster: {launcher: ray}\nengine: {device: 'cuda:1'}", "cuda, not 'cuda:1'"),
        ("cluster: {launcher: ray}\nmethod: sft", "method: sft and enable_tinkerscript_mode"),
        (
            "cluster: {launcher: ray}\nengine: {lora: {rank: 1}}\n"
            "inference: {backend: vllm, launch: {replicas: 1, gpus: [0]}}",
            r"Ray chooses the GPUs: any, not \[0\]",
        ),
        (
            "engine: {lora: {rank: 1}}\ninference: {backend: vllm, launch: {replicas: 1, gpus: any}}",
            "any is for cluster.launcher: ray",
        ),
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
        (
            "tasks: [{name: verifiers:gsm8k}, {name: mine.py@a b}]",
            "--task verifiers:gsm8k --task 'mine.py@a b'",
        ),
        (
            "task: {name: /home/me/t.py@sums, train_args: {split: train}, eval_args: {split: test}}",
            """--task t.py@sums --task-args '{"split": "train"}' --eval-args '{"split": "test"}'""",
        ),
        (
            "tasks: [{name: one}, {name: two, eval_args: {n: 2}}]",
            "--task one --task-args '{}' --eval-args '{}' "
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
    config = parse_config(text, source="c")
    assert (
        worker_command(config, "http://127.0.0.1:7")
        == f"tinkerscript worker {run} --server http://127.0.0.1:7"
    )

"""A whole run in one process: server and worker are tasks of the trainer's."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from inspect_ai._util.entrypoints import clear_entry_points_state
from inspect_ai.log import list_eval_logs, read_eval_log_async

from plain_sums import SUMS
from run_ledger import ask, outcomes, rows
from short_runs import short_run
from tinkerscript.config import EvaluationConfig, RunConfig, parse_config
from tinkerscript.errors import EngineError, NoSuccessError
from tinkerscript.ledger.health import health_rows
from tinkerscript.ledger.reader import LedgerReader
from tinkerscript.ledger.rows import EpisodeRow, StepRow
from tinkerscript.testing import QuietReporter
from tinkerscript.train.run import run_training
from tinkerscript.trainer_link.messages import EpisodeAccepted, EpisodeFailed

TASKS = '''
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, accuracy, scorer, Target
from inspect_ai.solver import TaskState, generate

SAMPLES = [Sample(id=f"s{i}", input=f"What is {i}+1?", target=str(i + 1)) for i in range(6)]


@scorer(metrics=[accuracy()])
def even_answer():
    """The model's answers are noisy, which gives groups something to compare."""
    async def score(state: TaskState, target: Target) -> Score:
        if state.sample_id == "s3" or Path("broken").exists():
            raise RuntimeError("this sample cannot be scored")
        if Path("equal").exists():
            return Score(value=CORRECT)
        return Score(value=CORRECT if state.output.completion[-1:] in set("02468") else INCORRECT)
    return score


@task
def words():
    config = GenerateConfig(max_tokens=4, temperature=TEMPERATURE)
    return Task(dataset=SAMPLES, solver=[generate()], scorer=even_answer(), config=config)
'''


def config(tmp_path: Path, temperature: float | None = None, **training: Any) -> RunConfig:
    """`temperature`: the task's own, which comes before the run's."""
    (tmp_path / "tasks.py").write_text(TASKS.replace("TEMPERATURE", str(temperature)))
    return RunConfig.model_validate(
        {
            "experiment_dir": str(tmp_path / "run"),
            "enable_tinkerscript_mode": False,
            "interchange_server": {"interchange_server_port": 0},
            "task": {"name": f"{tmp_path / 'tasks.py'}@words"},
            "training": {"steps": 2, "groups_per_step": 6, "group_size": 4, "minibatches": 2, **training},
            "evaluation": {"episodes": 6},
        }
    )


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs copy their summary to `runs/latest` of the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("evaluated", [0, 6])
async def test_a_run_in_which_everything_fails_ends_and_can_be_resumed(
    tmp_path: Path, evaluated: int
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    short = config(tmp_path, steps=1, group_size=2, minibatches=1).model_copy(
        update={"evaluation": EvaluationConfig(episodes=evaluated)}
    )
    where = "evaluation before: all 6" if evaluated else "step 1: all 12"
    with pytest.raises(NoSuccessError, match=rf"{where} episodes[^$]*RuntimeError\('this sample cannot"):
        await run_training(short, QuietReporter())
    assert not (tmp_path / "run" / "summary.json").exists()
    broken.unlink()
    folder = await run_training(short, QuietReporter(), path=tmp_path / "run")
    summary = json.loads((folder.path / "summary.json").read_text())
    assert summary["train_episodes"] == 10
    assert (summary["episodes_lost"], summary["steps"]) == (0, 1)


async def test_a_task_that_names_the_temperature_0_trains_nothing_and_is_told(tmp_path: Path) -> None:
    given = config(tmp_path, 0.0, steps=1).model_copy(update={"evaluation": EvaluationConfig(episodes=0)})
    progress = QuietReporter()
    folder = await run_training(given, progress)
    summary = json.loads((folder.path / "summary.json").read_text())
    told = "\n".join(progress.notes)
    assert "tasks.py@words asks for temperature 0, which leaves nothing to train on" in told
    assert summary["tokens_trained"] == 0
    assert any("greedy: sampled at temperature 0" in line for line in summary["alignment"])


class CurveWatcher(QuietReporter):
    """Looks at a run's learning curve after each step."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self._run = run
        self.drawn: list[bool] = []

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        is_png = (self._run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
        self.drawn.append(is_png and not (self._run / "summary.json").exists())


EVERY_SETTING: dict[str, Any] = {
    "advantage_baseline": "leave_one_out",
    "advantage_scale": "group_deviation",
    "epochs_per_batch": 2,
    "kl_penalty_coef": 0.1,
    "warmup_steps": 1,
    "lr_schedule": "cosine",
    "loss_fn": "cispo",
    "learning_rate": 1e-2,
}


async def test_a_run_leaves_a_folder_that_says_what_happened(tmp_path: Path) -> None:
    """With every setting of the update, and a task that has a temperature of its own."""
    watcher = CurveWatcher(tmp_path / "run")
    made = config(tmp_path, 0.5, inspect_log_every=2, **EVERY_SETTING)
    sampling = made.sampling.model_copy(update={"max_tokens": 10**6})
    folder = await run_training(made.model_copy(update={"sampling": sampling}), watcher)
    told = "\n".join(watcher.notes)
    assert "training.learning_rate: 0.01 is too high for all weights of a small model" in told
    assert "sampling.max_tokens: 1000000 leaves no room for a prompt" in told
    assert watcher.drawn == [True, True], "after each step, while the run goes on"
    assert watcher.waits == [
        "the interchange server",
        "the server to say where the run continues",
        "the engine to load tiny",
        "the engine to try the loss",
        "the first weights to be published",
        "step 1 to train",
        "step 2 to train",
        "the checkpoint of step 2",
        "the last episodes to end",
        "the final checkpoint",
    ]
    summary = json.loads((folder.path / "summary.json").read_text())
    events = outcomes(folder.path)
    accepted = [e for e in events if isinstance(e, EpisodeAccepted)]
    failed = [e for e in events if isinstance(e, EpisodeFailed)]
    # One sample of six has a scorer that raises: 2 steps x 4 episodes, and one of each evaluation.
    assert len(failed) == 2 * 4 + 2
    assert all("this sample cannot be scored" in e.failures[0]["message"] for e in failed)
    assert len(accepted) == 2 * 5 * 4 + 2 * 5
    assert (summary["episodes_lost"], summary["episodes_failed"]) == (0, 10)
    assert (summary["train_episodes"], summary["eval_episodes"], summary["eval_failed"]) == (40, 5, 2)
    assert summary["sequences_per_episode"] == 1.0
    assert summary["max_abs_dlogp"] <= 1e-4
    assert summary["tokens_trained"] > 0
    assert summary["policy_version"] == 2
    assert [step["groups/dropped"] for step in watcher.steps] == [1, 1]
    assert not any("lag/1" in step for step in watcher.steps)
    first, second = watcher.steps
    assert first["train/kl_start"] == pytest.approx(0, abs=1e-5), "the first step samples from the start"
    assert second["train/kl_start"] != 0
    assert (first["train/learning_rate"], second["train/learning_rate"]) == (5e-3, 1e-2)
    assert "waits" not in {row.name for row in health_rows(LedgerReader(folder.path))}
    assert inspect_labels(folder.path) == ["eval-after", "eval-before", "step-0002"]
    assert json.loads((tmp_path / "runs/latest/summary.json").read_text()) == summary
    for name in ("config.yaml", "metrics.jsonl", "learning_curve.png", "alignment.json"):
        assert (folder.path / name).stat().st_size
    for name in ("config.json", "model.safetensors", "tokenizer.json", "optimizer.pt"):
        assert (folder.path / "checkpoints" / "final" / name).stat().st_size
    # The scorer that raises leaves a transcript too, in each of three attempts.
    assert ask(folder.path, "SELECT count(*) FROM transcripts") == [(len(accepted) + 3 * len(failed),)]
    lines = gzip.decompress((folder.path / "rollouts" / "step_0001.jsonl.gz").read_bytes()).splitlines()
    rollouts = [json.loads(line) for line in lines]
    assert len(rollouts) == 24
    assert sum("failures" in r for r in rollouts) == 4
    trained = next(r for r in rollouts if "sequences" in r)
    assert "<|im_start|>user\nWhat is " in trained["sequences"][0]["text"]
    advantages = [each["advantage"] for each in rollouts if each.get("advantage")]
    # Rewards 1 and 0 in a group of 4: one apart from three, or two and two, over the deviation.
    possible = [2.0, 2 / 3, 2 / 3**0.5]
    assert all(min(abs(abs(value) - one) for one in possible) < 1e-4 for value in advantages)
    await a_refused_resumption_leaves_the_config_as_it_was(folder.path)


async def a_refused_resumption_leaves_the_config_as_it_was(run: Path) -> None:
    kept = (run / "config.yaml").read_text()
    wrong = parse_config(kept, source="config", overrides=["engine.lora.rank=4", "training.steps=3"])
    with pytest.raises(EngineError, match="is not a LoRA adapter"):
        await run_training(wrong, QuietReporter(), path=run)
    assert (run / "config.yaml").read_text() == kept
    right = parse_config(kept, source="config", overrides=["training.steps=3"])
    await run_training(right, QuietReporter(), path=run)
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert "steps: 3" in (run / "config.yaml").read_text()


def inspect_labels(run: Path) -> list[str]:
    """What each of a run's Inspect logs is of: `eval-before`, `step-0005`."""
    names = [info.name for info in list_eval_logs(str(run / "inspect"))]
    return sorted(found[1] for name in names if (found := re.search(r"-((step|eval)-\w+)_", name)))


async def test_groups_train_up_to_the_limit_and_none_is_lost_while_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next steps' groups are sampled while a step trains, so some of them are behind. Inspect changes the
    folder for the whole process while it loads a task."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    class Moving(QuietReporter):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            super().step(step, metrics)
            monkeypatch.chdir(elsewhere)

    watcher = Moving()
    training = {"steps": 4, "groups_per_step": 6, "group_size": 4, "max_policy_lag": 2}
    await run_training(short_run("run", task=SUMS, training=training), watcher)
    run = tmp_path / "run"
    assert not (elsewhere / "run").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_lost"]) == (4, 0)
    assert [step["policy_version"] for step in watcher.steps] == [1, 2, 3, 4]
    assert max(row.max_lag or 0 for row in rows(run, StepRow)) <= 2
    assert sum(step.get("lag/1", 0) for step in watcher.steps) > 0
    assert (summary["episodes_discarded"], summary["episodes_cancelled"]) == (0, 0)
    assert {
        step["groups/trained"] + step["groups/same_reward"] + step["groups/dropped"] for step in watcher.steps
    } == {6}
    assert "waits" in {row.name for row in health_rows(LedgerReader(run))}


async def test_tasks_share_a_run_by_weight_and_come_from_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One task by file, one by the name under which an installed package registers it."""
    package = tmp_path / "site-packages" / "tinkerscript_test_tasks"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        TASKS.replace("def words", "def packaged").replace("TEMPERATURE", "None")
    )
    about = tmp_path / "site-packages" / "tinkerscript_test_tasks-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tinkerscript_test_tasks\nVersion: 1\n")
    entry_point = "[inspect_ai]\ntinkerscript_test_tasks = tinkerscript_test_tasks\n"
    (about / "entry_points.txt").write_text(entry_point)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    clear_entry_points_state()  # Inspect looks for installed packages once in a process.
    whole = config(tmp_path, steps=1, inspect_log_every=1).model_dump(mode="json")
    name = whole.pop("task")["name"]
    whole["tasks"] = [{"name": name}, {"name": "tinkerscript_test_tasks/packaged", "weight": 2}]
    await run_training(RunConfig.model_validate(whole), QuietReporter())
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (metrics,) = (line for line in lines if "reward/mean" in line)
    assert metrics["failure/task_error"] == metrics["episodes/failed"]
    assert 0 <= metrics["episode/score/even_answer"] <= 1
    tasks = {"tasks.py@words": 2, "tinkerscript_test_tasks/packaged": 4}
    registered = rows(run, EpisodeRow, "WHERE episode_type = 'train'")
    assert len(registered) == sum(tasks.values()) * 4
    assert inspect_labels(run) == sorted(2 * ["eval-after", "eval-before", "step-0001"])
    written = list_eval_logs(str(run / "inspect"))
    logs = [await read_eval_log_async(info) for info in written if "step-0001" in info.name]
    sizes = {log.eval.task: len(log.samples or []) for log in logs}
    assert sizes.keys() == tasks.keys()
    assert sum(sizes.values()) == metrics["episodes/accepted"]
    assert {f"reward/{task}" for task in tasks} <= metrics.keys()
    assert any("eval/score/tasks.py@words" in line for line in lines)

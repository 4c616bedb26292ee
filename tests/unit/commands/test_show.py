"""`tinkerscript show`: what the page shows, as text and as its API's JSON; and what is not there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from rich.console import Console
from typer.testing import CliRunner

from made_run import MadeRun
from tinkerscript.cli import CANNOT_RUN, app
from tinkerscript.commands.show import show_command
from tinkerscript.dashboard import one_line, plain
from tinkerscript.errors import ConfigError, NotRecordedError
from tinkerscript.files import RUN_ID
from tinkerscript.lifecycle import ProcessId
from tinkerscript.page.annotation import Annotation, write_annotation
from tinkerscript.page.web_app import create_page
from tinkerscript.protocol import Failure
from written_run import WrittenRun, said, trained_sequence

ADDS = {"id": "t", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "reasoning_content": "hm", "content": "", "tool_calls": [ADDS]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "made"
    return MadeRun(folder, steps=6, groups=3, group_size=4, evaluation_every=3, evaluation_samples=8).write()


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """Three episodes: one with a tool, a failed attempt and a fork, a plain one, and one that failed."""
    first = said(None, [1], [2, 3], "1+1?", "", reply=json.dumps(CALLED))
    calls = [
        first,
        said(first, [4], [5], "2", "two\x1b[2J"),
        said(None, [1], [7], "1+1?", "again", fork_reason="history_edited"),
    ]
    lost = Failure(kind="lease_expired", message="gone", attempt=1, client_uuid="w")
    boom = Failure(kind="task_error", message="boom [red]", attempt=1, client_uuid="w")
    metadata = {"scores": {"exact": 1.0}, "explanations": {"exact": {"answer": "2", "explanation": "it is"}}}
    with WrittenRun(tmp_path, task={"name": "t.py@adding"}) as run:
        run.status(state="stopped", step=1, steps=9)
        more = {"metadata": metadata, "log_metrics": {"turns": 2.0}, "failures": [lost]}
        run.episode("aaaa1", calls, client="w", attempt=2, **more)
        run.episode("aaab2", reward=0.0)
        run.episode("bbbb3", reward=None, failures=[boom])
        run.trained(1, "aaaa1", [trained_sequence(0, 3), trained_sequence(1, 1)], advantage=0.5)
        metrics = {"failure/task_error": 1.0, "episodes/failed": 1.0}
        run.step(1, metrics, accepted=2, failed=1, trained=1)
        run.step(2, stopped="logprob_gap")
    return tmp_path


def shown(folder: Path, what: str = "", **options: Any) -> str:
    file = io.StringIO()
    assert show_command(folder, what, Console(file=file, width=120), **options) == 0
    return file.getvalue()


def test_json_and_paths_are_what_the_api_answers(made: Path) -> None:
    with TestClient(create_page(made.parent, admin_token=None), base_url="http://localhost") as client:

        def answer(path: str) -> Any:
            return client.get(f"/api/{path}").json()

        assert json.loads(shown(made.parent, as_json=True)) == answer("runs")
        assert json.loads(shown(made, as_json=True)) == answer("runs/made")
        for path in ("steps?limit=2&before=5", "steps/3?show=best", "search?q=reward<0.5", "comparison"):
            assert json.loads(shown(made, f"/{path}")) == answer(f"runs/made/{path}")
        uuid = answer("runs/made/episodes?show=trained")["episodes"][0]["uuid"]
        assert json.loads(shown(made, uuid[:8], as_json=True)) == answer(f"episodes/{uuid}")
        tokens = f"episodes/{uuid}/tokens"
        assert json.loads(shown(made, f"/api/{tokens}")) == answer(tokens)
    assert shown(made.parent, "/api/runs")
    with pytest.raises(NotRecordedError, match=r"/steps/99: .*no step 99"):
        shown(made, "/steps/99")


def test_a_run_shows_its_state_steps_failures_and_episodes(told: Path) -> None:
    write_annotation(told, Annotation(note="lr too [high]", tags=["baseline", "seed 2"]))
    assert "(baseline, seed 2)" in shown(told.parent)
    text = shown(told)
    assert "\nbaseline, seed 2\nlr too [high]\n" in text
    assert "grpo of tiny on t.py@adding\nstopped at step 1 of 9\n" in text
    assert "failed: 1 x task_error: boom [red]   (episode bbbb3)\n" in text
    assert "stopped: logprob_gap" in text
    rows = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.split()}
    assert rows["1"].startswith("1 0.500 2 1 1 0 1 "), rows
    assert rows["bbbb3"] == "bbbb3 step 1 failed task_error: boom [red]"
    assert rows["aaaa1"] == "aaaa1 step 1 1 +0.500 3 4 trained again"


def test_a_folder_that_cannot_be_read_is_named_and_the_others_are_listed(told: Path) -> None:
    (told.parent / "broken").mkdir()
    (told.parent / "broken" / RUN_ID).write_text("run")
    text = shown(told.parent)
    assert f"broken: {told.parent / 'broken'} is not the folder of a run" in " ".join(text.split())
    assert "stopped" in text


def test_an_episode_shows_every_sequence_score_and_attempt(told: Path) -> None:
    text = shown(told, "aaaa")
    assert "train episode aaaa1, group step-1/sample-0: reward 1\n" in text
    assert "attempt 1 of w failed: lease_expired: gone" in text
    assert "score exact: 1.0, answer 2; it is" in text
    assert 'metrics: {"turns": 2.0}' in text
    assert "step 1: trained, advantage +0.500" in text
    first, second = text.split("sequence 2 of 2, forked: history_edited")
    assert first.index("1+1?") < first.index('-> add({"a": 1})') < first.index("two")
    assert r"two\x1b[2J" in first, "the terminal is not the model's"
    assert "again" in second
    assert "3 calls, 4 tokens sampled" in second
    assert "training sequence 1: 2 tokens, 1 sampled, 1 that train" in second


def test_an_evaluation_does_not_train(tmp_path: Path) -> None:
    call = said(None, [1], [2], "1+1?", "2")
    with WrittenRun(tmp_path) as run:
        run.status(state="running", process=ProcessId.own(), step=0, steps=9)
        run.episode("e1", [call], label="before", step=0, reward=0.5)
        run.evaluation("before", 0)
    text = shown(tmp_path, "e1")
    assert "1 call, 1 token sampled\n" in text
    assert "training sequence 0: 2 tokens, 1 sampled\n" in text
    (row,) = (line for line in shown(tmp_path.parent).splitlines() if "running" in line)
    assert "0.500" in row
    assert "→" not in row, "one evaluation is no gain"
    assert "evaluation before: 0.500  (1 episode)\n" in shown(tmp_path)


def test_the_command(made: Path) -> None:
    listed = CliRunner().invoke(app, ["show", str(made), "/steps?limit=2"])
    assert [step["step"] for step in json.loads(listed.stdout)["steps"]] == [6, 5]
    refused = CliRunner().invoke(app, ["show", str(made), "zz"])
    assert refused.exit_code == CANNOT_RUN
    assert refused.stderr.startswith("error: no episode that ended begins with 'zz' in ")
    assert "; the newest are " in refused.stderr


def test_a_folder_without_runs_is_named(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.parent)
    missing = "there is no folder runs; this folder has made; `tinkerscript train` makes one per run"
    for folder, message in {
        Path("runs"): missing,
        made.parent / "nowhere": "there is no .*nowhere; .* has made",
        tmp_path: r"not the folder of a run, and has none in it \(no run_id\)",
    }.items():
        with pytest.raises(ConfigError, match=message):
            shown(folder)


def test_text_is_shown_as_text() -> None:
    hostile = "a\x1b]0;title\x07\r\nb\tc\ud83d\x9b2J"
    assert plain(hostile) == r"a\x1b]0;title\x07\r" + "\nb\tc" + r"\ud83d\x9b2J"
    assert one_line(hostile) == r"a\x1b]0;title\x07 b c\ud83d\x9b2J"

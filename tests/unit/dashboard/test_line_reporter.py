"""A run without a terminal: lines that a program can read."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from tinkerscript.dashboard import terminal
from tinkerscript.dashboard.terminal import LineReporter, print_summary, shown_progress


@pytest.fixture
def printed() -> io.StringIO:
    return io.StringIO()


def test_each_step_is_a_line_whatever_the_width(printed: io.StringIO) -> None:
    with shown_progress(Console(file=printed, width=20)) as progress:
        progress.note("watch the run at http://127.0.0.1:10086")
        progress.begin(3, done=1)
        progress.step(2, {"reward/mean": 0.5, "policy_version": 7.0, "episodes_per_s": 2.0, "other": 1.0})
        progress.step(3, {"train/nll": 0.25, "tokens_per_s": 99.0, "episodes_per_s": 0.25})
        progress.evaluation("after", 0.75, 40, 2)
    assert printed.getvalue().splitlines() == [
        "watch the run at http://127.0.0.1:10086",
        "step 2/3  reward 0.500  policy 7  2 episodes/s",
        "step 3/3  nll 0.2500  0.25 episodes/s  99 tokens/s",
        "evaluation after: 0.750  (40 episodes, 2 failed)",
    ]


def test_no_wait_is_named_before_the_address_of_the_page(printed: io.StringIO) -> None:
    progress = LineReporter(Console(file=printed, width=200), report_after_s=0.001)
    with progress.waiting("the interchange server"):
        assert "progress" in {thread.name for thread in threading.enumerate()}
        threading.Event().wait(0.1)
    progress.note("watch the run at http://here")
    with progress.waiting("the model [to load]"):
        until(lambda: "[to load]" in printed.getvalue())
    assert printed.getvalue().splitlines()[:2] == [
        "watch the run at http://here",
        "waiting for the model [to load]",
    ]


def test_a_batch_says_how_far_it_is(printed: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REPORT_PROGRESS_AFTER_S", 0.01)
    progress = LineReporter(Console(file=printed))
    with progress.phase("step 1", total=0) as phase:
        phase.advance(2)
        until(lambda: printed.getvalue())
    assert re.match(r"step 1: 2/\? episodes\n", printed.getvalue())


SUMMARY = {
    **{"eval_before": 0.25, "eval_before_margin": None, "eval_after": 0.5, "eval_after_margin": 0.0456},
    **{
        "eval_episodes": 40,
        "train_episodes": 9,
        "episodes_per_s": 1.0,
        "tokens_trained": 9,
        "train_seconds": 9,
    },
    **{"episodes_lost": 0, "episodes_failed": 0, "episodes_retried": 0, "max_abs_dlogp": 0.0},
    **{"sequences_per_episode": 1.0, "alignment": ["clean"]},
}


def test_the_final_table_has_the_interval_of_a_score(printed: io.StringIO) -> None:
    print_summary(Console(file=printed, width=200), SUMMARY, Path("run"))
    rows = dict(re.findall(r"│ (.*?) +│ +(.*?) │", printed.getvalue()))
    assert rows["held-out score before"] == "0.250"
    assert rows["held-out score after"] == "0.500 ± 0.046"


def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("not within 10 s")

"""A run's progress: a table in a terminal, at any width, and lines elsewhere, which a program can read."""

from __future__ import annotations

import io
import re
import shlex
import threading
import time
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from tinkerscript.dashboard import terminal
from tinkerscript.dashboard.run_table import RunTable
from tinkerscript.dashboard.terminal import LineReporter, TableReporter, print_summary, shown_progress

STEP = {
    **{"reward/mean": 0.5, "reward/deviation": 0.25, "policy_version": 3.0, "train/entropy": 0.4},
    **{"response_tokens/mean": 33.25, "response_tokens/cut_off": 0.125, "episodes_per_s": 53.0},
    **{"lag/0": 5.0, "lag/2": 1.0, "lag/gone": 1.0, "failure/task_error": 1.0, "episodes/retried": 1.0},
    **{"time/rollout_s": 42.2, "time/train_s": 130.5, "time/publish_s": 0.5},
    **{"groups/trained": 30.0, "groups/same_reward": 2.0},
}


class Terminal(io.StringIO):
    """A file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self, columns: int = 100, rows: int = 40) -> list[str]:
        """What a terminal shows of all that was written."""
        screen = pyte.Screen(columns, rows)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        return [line.rstrip() for line in screen.display]


def console(terminal: Terminal) -> Console:
    return Console(file=terminal, width=100, height=40, force_terminal=True, legacy_windows=False)


@pytest.fixture
def table() -> RunTable:
    table = RunTable(0.0)
    table.page = "http://127.0.0.1:10086"
    table.begin(20, 0)
    table.evaluation("before", 0.25, 0)
    for step in range(1, 8):
        table.step(step, STEP | {"reward/mean": step / 10}, 10.0 * step)
    table.evaluation("step-7", 0.75, 2)
    table.batch, table.batch_began = ("step 8", 64, 256), 70.0
    return table


def text(table: RunTable, columns: int, rows: int = 40) -> list[str]:
    return [line.plain.rstrip() for line in table.frame(columns, rows, 78.0)]


def test_what_the_table_says(table: RunTable) -> None:
    lines = text(table, 140)
    assert lines[0].startswith("step 7 of 20  ━")
    assert lines[0].endswith("1:18 min, about 2:02 min left"), "13 steps of 10 s, of which 8 s have passed"
    assert lines[1] == f"sampling step 8: 64 of 256 episodes   8 ep/s  {'━' * 6}{'─' * 18}"
    titles = "step reward held out reply cut off lag sample train publish rate entropy"
    assert " ".join(lines[3].split()) == titles
    assert [line.split()[0] for line in lines[4:9]] == ["3", "4", "5", "6", "7"], "the last five"
    assert " ".join(lines[8].split()) == (
        "7 0.700 ±0.25 0.750 33.2 tok 12% 2 42.2 s 2:10 min 0.50 s 53 ep/s 0.400"
    )
    assert lines[10:] == [
        "reward    ▁▂▃▅▆▇█  0.100 → 0.700",
        "held out  0.250 before → 0.750 step-7",
        "failed    7 task_error, 2 of evaluation step-7",
        "look at   7 retried, 14 of 224 groups without signal",
        "page      http://127.0.0.1:10086",
    ]


@pytest.mark.parametrize(
    ("steps", "now", "says"),
    [
        (20, 72.0, "about 2:08 min left"),
        (20, 83.0, "about 2:00 min left"),  # The step takes longer than the others: 12 are left after it.
        (20, 91.0, ""),  # More than twice as long.
        (8, 75.0, "about 5 s left"),
        (8, 81.0, ""),
    ],
)
def test_the_time_left_is_told_while_it_is_known(table: RunTable, steps: int, now: float, says: str) -> None:
    table.begin(steps, 7)
    assert table.frame(140, 40, now)[0].plain.partition(", ")[2] == says


NOTE = (
    "no workers on this machine (workers.count: 0); start some where their files are, and a long note, "
    "with\n"
    """  tinkerscript worker --task my_eval.py@sums --task-args '{"split": "train", "of": "pairs"}' """
    """--eval-args '{"split": "test"}' --server http://training.example.com:10086"""
)


def test_a_note_is_broken_between_words_and_its_command_can_be_pasted() -> None:
    terminal = Terminal()
    TableReporter(console(terminal)).note(NOTE)
    lines = [line for line in terminal.screen() if line]
    prose, command = lines[:2], lines[2:]
    assert " ".join(prose) == NOTE.splitlines()[0]
    assert len(command) > 1
    assert all(line.endswith(" \\") for line in command[:-1])
    assert shlex.split("\n".join(command).replace("\\\n", "")) == shlex.split(NOTE.splitlines()[1])


@pytest.mark.parametrize("columns", [20, 45, 60, 80, 140, 300])
@pytest.mark.parametrize("rows", [3, 6, 12, 50])
def test_it_fits_any_screen(table: RunTable, columns: int, rows: int) -> None:
    lines = table.frame(columns, rows, 78.0)
    assert 0 < len(lines) < rows
    assert max(line.cell_len for line in lines) < columns


def test_the_table_stays_below_what_is_printed_and_leaves_the_last_steps() -> None:
    terminal = Terminal()
    screen = console(terminal)
    with shown_progress(screen) as progress:
        assert isinstance(progress, TableReporter)
        progress.note("watch the run at http://here")
        progress.begin(2)
        progress.evaluation("before", 0.25, 40, 1)
        with progress.phase("step 1", total=8) as phase:
            phase.advance(3)
        print("a line of a library")
        progress.step(1, STEP)
        progress.note("a note with [brackets]")
        deadline = time.monotonic() + 20  # It is drawn twice a second.
        while "step 1 of 2" not in "\n".join(shown := terminal.screen()):
            assert time.monotonic() < deadline, shown
            time.sleep(0.05)
        assert shown[:4] == [
            "watch the run at http://here",
            "evaluation before: 0.250  (40 episodes, 1 failed)",
            "a line of a library",
            "a note with [brackets]",
        ]
        assert shown[4].startswith("step 1 of 2"), shown
        assert sum("step 1 of 2" in line for line in shown) == 1
    left = terminal.screen()
    assert left[:4] == shown[:4]
    assert [line.split()[:1] for line in left[4:8]] == [[], ["step"], ["0"], ["1"]]
    assert not any("of 2" in line or "waiting" in line for line in left)
    assert terminal.getvalue().count("\x1b[?25l") == 1
    assert "\x1b[?25l\x1b[?25h" in terminal.getvalue(), "a process that is killed leaves a cursor"
    screen.print("after")
    assert [line for line in terminal.screen() if line][-1] == "after"


# Without a terminal


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
    assert printed.getvalue() == "watch the run at http://here\n"
    with progress.waiting("the model [to load]"):
        until(printed, "\nwaiting for the model [to load]\n")


def test_a_batch_says_how_far_it_is(printed: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REPORT_PROGRESS_AFTER_S", 0.01)
    with LineReporter(Console(file=printed)).phase("step 1", total=0) as phase:
        phase.advance(2)
        until(printed, "step 1: 2/? episodes\n")


SUMMARY = {
    **{"eval_before": 0.25, "eval_before_margin": None, "eval_after": 0.5, "eval_after_margin": 0.0456},
    **{"eval_episodes": 40, "train_episodes": 9, "episodes_lost": 0, "episodes_failed": 0},
    **{"episodes_retried": 0, "episodes_per_s": 1.0, "tokens_trained": 9, "train_seconds": 9},
    **{"max_abs_dlogp": 0.0, "sequences_per_episode": 1.0, "alignment": ["clean"]},
}


def test_the_final_table_has_the_interval_of_a_score(printed: io.StringIO) -> None:
    print_summary(Console(file=printed, width=200), SUMMARY, Path("run"))
    rows = dict(re.findall(r"│ (.*?) +│ +(.*?) │", printed.getvalue()))
    assert rows["held-out score before"] == "0.250"
    assert rows["held-out score after"] == "0.500 ± 0.046"


def until(printed: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 20
    while text not in printed.getvalue():
        assert time.monotonic() < deadline, printed.getvalue()
        time.sleep(0.01)

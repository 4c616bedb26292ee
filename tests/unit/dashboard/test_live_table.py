"""The table of a run in a terminal: what is on the screen, at any width, and what is left there."""

from __future__ import annotations

import io
import shlex
import time

import pyte
import pytest
from rich.console import Console

from tinkerscript.dashboard import wrapped
from tinkerscript.dashboard.run_table import RunTable
from tinkerscript.dashboard.terminal import TableReporter, shown_progress

STEP = {
    "reward/mean": 0.5,
    "reward/deviation": 0.25,
    "response_tokens/mean": 33.25,
    "response_tokens/cut_off": 0.125,
    "policy_version": 3.0,
    "lag/0": 5.0,
    "lag/2": 1.0,
    "lag/gone": 1.0,
    "time/rollout_s": 42.2,
    "time/train_s": 130.5,
    "time/publish_s": 0.5,
    "failure/task_error": 1.0,
    "groups/trained": 30.0,
    "groups/same_reward": 2.0,
    "episodes/retried": 1.0,
    "episodes_per_s": 53.0,
    "train/entropy": 0.4,
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


def console(**options: object) -> Console:
    given = {"file": Terminal(), "width": 100, "height": 40, "force_terminal": True, "legacy_windows": False}
    return Console(**given | options)  # type: ignore[arg-type]


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


def test_a_late_score_is_in_the_row_of_its_step(table: RunTable) -> None:
    table.evaluation("step-5", 0.625, 0)
    table.evaluation("step-1", 0.375, 0)  # Of a row that is gone.
    rows = {line.split()[0]: line for line in text(table, 140)[4:9]}
    assert [step for step, line in rows.items() if "0.625" in line] == ["5"]
    assert [step for step, line in rows.items() if "0.750" in line] == ["7"]
    assert not any("0.375" in line for line in rows.values())


def test_the_first_step_tells_how_long_the_rest_takes() -> None:
    table = RunTable(0.0)
    table.begin(5, 2)
    table.batch, table.batch_began = ("step 3", 0, 64), 40.0
    assert text(table, 100)[0].endswith("  1:18 min")
    table.step(3, STEP, 70.0)
    assert text(table, 100)[0].endswith("about 52 s left"), "two steps of 30 s, of which 8 s have passed"


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (72.0, "about 2:08 min left"),
        (83.0, "about 2:00 min left"),  # The step takes longer than the others: 12 are left after it.
        (91.0, ""),  # More than twice as long.
    ],
)
def test_a_long_step_does_not_run_the_time_left_down(table: RunTable, now: float, says: str) -> None:
    heading = table.frame(140, 40, now)[0].plain
    assert heading.partition(", ")[2] == says


def test_no_time_is_left_after_the_last_step(table: RunTable) -> None:
    table.begin(8, 7)
    assert table.frame(140, 40, 75.0)[0].plain.endswith("about 5 s left")
    assert "left" not in table.frame(140, 40, 81.0)[0].plain
    table.step(8, STEP, 82.0)
    assert "left" not in table.frame(140, 40, 83.0)[0].plain


def test_a_rate_below_one_is_not_nothing(table: RunTable) -> None:
    table.batch, table.batch_began = ("step 8", 3, 256), 68.0
    table.step(8, STEP | {"episodes_per_s": 0.34}, 80.0)
    lines = text(table, 140)
    assert lines[1].startswith("sampling step 8: 3 of 256 episodes   0.3 ep/s  ")
    assert "  0.34 ep/s  " in lines[8]


NOTE = (
    "no workers on this machine (workers.count: 0); start some where their files are, and a long note, "
    "with\n"
    """  tinkerscript worker --task my_eval.py@sums --task-args '{"split": "train", "of": "pairs"}' """
    """--eval-args '{"split": "test"}' --server http://training.example.com:10086"""
)


def test_a_note_is_broken_between_words_and_its_command_can_be_pasted() -> None:
    screen = console()
    assert isinstance(screen.file, Terminal)
    TableReporter(screen).note(NOTE)
    lines = [line for line in screen.file.screen() if line]
    prose, command = lines[:2], lines[2:]
    assert " ".join(prose) == NOTE.splitlines()[0]
    assert len(command) > 1
    assert all(line.endswith(" \\") for line in command[:-1])
    assert shlex.split("\n".join(command).replace("\\\n", "")) == shlex.split(NOTE.splitlines()[1])


@pytest.mark.parametrize("width", [20, 45, 60, 79])
def test_no_line_is_broken_within_a_word(width: int) -> None:
    text = f"{NOTE}\nserve the model    tinkerscript serve --checkpoint runs/2026-11-25/checkpoints/final"
    lines = wrapped(text, width).split("\n")
    words = " ".join(line.removesuffix("\\") for line in lines).split()
    assert words == text.split()


@pytest.mark.parametrize("columns", [20, 45, 60, 80, 140, 300])
@pytest.mark.parametrize("rows", [3, 6, 12, 50])
def test_it_fits_any_screen(table: RunTable, columns: int, rows: int) -> None:
    lines = table.frame(columns, rows, 78.0)
    assert 0 < len(lines) < rows
    assert max(line.cell_len for line in lines) < columns


def test_the_table_stays_below_what_is_printed_and_leaves_the_last_steps() -> None:
    screen = console()
    assert isinstance(screen.file, Terminal)
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
        while "step 1 of 2" not in "\n".join(shown := screen.file.screen()):
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
    left = screen.file.screen()
    assert left[:4] == shown[:4]
    assert [line.split()[:1] for line in left[4:8]] == [[], ["step"], ["0"], ["1"]]
    assert not any("of 2" in line or "waiting" in line for line in left)
    assert screen.file.getvalue().count("\x1b[?25l") == 1
    assert "\x1b[?25l\x1b[?25h" in screen.file.getvalue(), "a process that is killed leaves a cursor"
    screen.print("after")
    assert [line for line in screen.file.screen() if line][-1] == "after"

"""`tinkerscript train` in a terminal: its table, and what is left at the end and after Ctrl-C."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from command_line import COMMAND, DEMO, SHORT, as_options, metrics_lines
from terminal import terminal

pytestmark = pytest.mark.timeout(400)


def training(**settings: object) -> list[str]:
    short = {**SHORT, "training.groups_per_step": 6, "evaluation.episodes": 20, **settings}
    return [str(COMMAND), "train", str(DEMO), *as_options(short)]


def step_is_drawn(lines: list[str], steps: int) -> bool:
    """Whether any step is: each may be over before it is drawn."""
    return any(re.match(f"step [1-9][0-9]* of {steps} ", line) for line in lines)


def test_a_run_is_a_table_that_leaves_its_last_steps(tmp_path: Path) -> None:
    steps = 6
    settings = {"training.steps": steps, "enable_tinkerscript_mode": "false"}
    with terminal(training(**settings), tmp_path) as shown:
        lines = shown.until(lambda lines: step_is_drawn(lines, steps))
        assert shown.cursor_is_shown, "a process that is killed leaves a cursor"
        assert lines[0].startswith("watch the run at http://127.0.0.1:")
        assert sum(f" of {steps}  " in line for line in lines) == 1, "drawn in place"
        (titles,) = (line.split() for line in lines if line.startswith("step  "))
        assert titles[:6] == ["step", "reward", "held", "out", "reply", "cut"]
        assert any(line.startswith("page      http://127.0.0.1:") for line in lines)
        assert shown.wait() == 0
        left = shown.lines()
        text = "\n".join(left)
        assert f" of {steps}  " not in text
        assert "waiting for" not in text
        assert "held-out score after" in text
        assert re.search("^health +all well$", text, re.MULTILINE)
        assert shown.cursor_is_free


@pytest.mark.long
def test_workers_are_shown_and_ctrl_c_saves_the_last_step_and_leaves_the_screen_clean(tmp_path: Path) -> None:
    with terminal(training(**{"training.steps": 500, "training.checkpoint_every": 100}), tmp_path) as shown:
        shown.until(lambda lines: step_is_drawn(lines, 500))
        shown.until(lambda lines: any(line.startswith("workers   worker 0: ") for line in lines))
        shown.press("\x03")
        assert shown.wait(seconds=30) == 130
        text = "\n".join(shown.lines())
        assert "stopping; resume with: tinkerscript train --resume" in text
        assert " of 500  " not in text
        assert text.rstrip().endswith("stopped")
        assert shown.cursor_is_free
    last = max(line["step"] for line in metrics_lines(tmp_path))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step_{last:04d}"]

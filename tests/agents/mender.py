"""What the scripted policy says to each agent: calls of the agent's own tools, until the test passes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TITLE = "Repair of a sum"
DONE = "The test passes now."

_REPLIES = re.compile(r"<\|im_start\|>assistant\n.*?<\|im_end\|>", re.DOTALL)


def call(name: str, **arguments: Any) -> str:
    """A tool call as the tiny model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _edits(name: str, file: str, old: str, new: str) -> Callable[[str, str], str]:
    def edit(was: str, becomes: str) -> str:
        # Claude Code adds `replace_all` to the history where the model left it out: a rewritten history.
        whole = {"replace_all": False} if name == "Edit" else {}
        return call(name, **whole, **{file: "/work/calc.py", old: was, new: becomes})

    return edit


_claude = _edits("Edit", "file_path", "old_string", "new_string")
_opencode = _edits("edit", "filePath", "oldString", "newString")


def _patch(was: str, becomes: str) -> str:
    change = f"@@\n-    return {was}\n+    return {becomes}\n"
    patch = f"*** Begin Patch\n*** Update File: calc.py\n{change}*** End Patch\n"
    return call("exec_command", cmd=f"apply_patch <<'EOF'\n{patch}EOF\n")


RUN = "python3 test_calc.py"
# Of different lengths: Python takes a compiled file of the same second and length for the new one.
WRONG = ("a - b", "a * b * 1")
RIGHT = ("a * b * 1", "a + b")

MENDING: Mapping[str, Sequence[str]] = {
    "claude-code": [
        call("Bash", command=RUN, description="Run the test"),
        call("Read", file_path="/work/calc.py"),
        _claude(*WRONG),
        call("Bash", command=RUN),
        _claude(*RIGHT),
        call("Bash", command=RUN),
        DONE,
    ],
    "codex": [
        call("exec_command", cmd=RUN),
        _patch(*WRONG),
        call("exec_command", cmd=RUN),
        _patch(*RIGHT),
        call("exec_command", cmd=RUN),
        DONE,
    ],
    "mini-swe-agent": [
        call("bash", command=RUN),
        call("bash", command="sed -i 's/a - b/a * b * 1/' calc.py && " + RUN),
        call("bash", command="sed -i 's/a \\* b \\* 1/a + b/' calc.py && " + RUN),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "opencode": [
        call("bash", command=RUN, description="Run the test"),
        call("read", filePath="/work/calc.py"),
        _opencode(*WRONG),
        call("bash", command=RUN, description="Run the test"),
        _opencode(*RIGHT),
        call("bash", command=RUN, description="Run the test"),
        DONE,
    ],
}


def answering(script: Sequence[str]) -> Callable[[str], str]:
    """The script's next line, by how many replies the prompt holds; a title to who offers no tools."""

    def answer(prompt: str) -> str:
        if "<tools>" not in prompt:
            return TITLE
        return script[min(len(_REPLIES.findall(prompt)), len(script) - 1)]

    return answer

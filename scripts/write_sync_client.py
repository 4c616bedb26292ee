"""Write `client/sync_client.py`, the blocking face of the client, from `client/async_client.py`.

`python scripts/write_sync_client.py`. A unit test checks that the file is up to date.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "src" / "tinkerscript" / "client"

DOCSTRING = '''"""`TinkerScriptClient`: the client for ordinary, blocking programs.

Generated from `async_client.py` by `scripts/write_sync_client.py`: change that file, then run the script.
"""
'''

REPLACEMENTS = {
    "For asyncio programs.": "May be used from several threads.",
    "an `async with`": "a `with`",
    "Awaitable[object]": "object",
    "Awaitable, ": "",
    "import asyncio\n": "",
    "asyncio.Event": "threading.Event",
    "pause_task": "pause_thread",
    "renewed_by_task": "renewed_by_thread",
    "async ": "",
    "await ": "",
    "enter_async_context": "enter_context",
    "asynccontextmanager": "contextmanager",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "aclose": "close",
    **{f"Async{name}": name for name in ("TinkerScriptClient", "ClaimedEpisode", "ExitStack")},
    **{f"Async{name}": name for name in ("Generator", "Connections")},
}


def sync_source() -> str:
    """The text of `sync_client.py`."""
    text = (CLIENT / "async_client.py").read_text(encoding="utf-8")
    text = re.sub(r'\A""".*?"""\n', lambda _: DOCSTRING, text, flags=re.DOTALL)
    for written, blocking in REPLACEMENTS.items():
        text = text.replace(written, blocking)
    return _ruff("format", text=_ruff("check", "--select", "I", "--fix", text=text))


def _ruff(*command: str, text: str) -> str:
    run = [
        sys.executable,
        "-m",
        "ruff",
        *command,
        "--quiet",
        "--stdin-filename",
        str(CLIENT / "sync_client.py"),
        "-",
    ]
    return subprocess.run(
        run, input=text, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout


if __name__ == "__main__":
    (CLIENT / "sync_client.py").write_text(sync_source(), encoding="utf-8")

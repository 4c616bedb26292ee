"""How a client's program is driven: one feature a job, each in a fork with the job's environment alone.

A program imports its library once and calls `serve(...)` with functions that are named for features. A job is
a line of JSON on stdin: {"feature", "environ", "result"}. What the function returns goes, as JSON, into the
file `result`: {"value": ...}, or {"error": class and message} for an exception of the library.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Feature = Callable[[], Any]


def serve(*features: Feature) -> None:
    """Run jobs until stdin ends."""
    table = {feature.__name__: feature for feature in features}
    print(json.dumps(sorted(table)), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(table[job["feature"]], job))
        os.waitpid(child, 0)
        print("done", flush=True)


def _run(feature: Feature, job: dict[str, Any]) -> int:
    os.environ.update(job["environ"])
    try:
        outcome: dict[str, Any] = {"value": feature()}
    except Exception as error:  # noqa: BLE001 - the test decides which errors are right.
        traceback.print_exc()
        outcome = {"error": f"{type(error).__name__}: {error}"}
    path = Path(job["result"])
    path.with_suffix(".part").write_text(json.dumps(outcome))
    path.with_suffix(".part").rename(path)
    sys.stderr.flush()
    return 0

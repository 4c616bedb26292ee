"""Whatever a program put into samples, messages and metadata: every view of it answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tinkerscript.page.search_index import SearchIndex
from tinkerscript.page.web_app import create_page
from written_run import WrittenRun, said, sample_row

TEXTS = st.text(max_size=5) | st.sampled_from(["\0", "text", "NaN", "<script>"])
LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXTS
KEYS = st.sampled_from(
    ["content", "text", "type", "role", "input", "target", "id", "scores", "explanations", "answer"]
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=4)

VIEWS = (
    *("runs", "runs/run", "runs/run/steps", "runs/run/evaluations", "runs/run/search?q=x", "episodes/e-1"),
    *("runs/run/samples/{sample}", "episodes/e-1/tokens", "runs/run/search?q=reward%3E0"),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sample=OBJECTS, messages=JSON, reply=JSON, tools=JSON, metadata=OBJECTS)
@example(sample={"input": 5}, messages=5, reply=5, tools=5, metadata={"scores": 5})
@example(sample={"input": [1]}, messages=[1], reply=[1], tools=[1], metadata={"scores": {"a": float("nan")}})
@example(
    sample={"input": [{"content": [1, {"text": 5}]}], "id": [1], "target": float("inf")},
    messages=[{"content": [1, None], "role": []}],
    reply={"content": {}, "tool_calls": 7},
    tools={},
    metadata={"scores": {"a": {"b": 1}}, "explanations": {"a": [1]}},
)
def test_every_view_answers(
    tmp_path: Path, sample: dict[str, Any], messages: Any, reply: Any, tools: Any, metadata: dict[str, Any]
) -> None:
    folder = tmp_path / "runs" / "run"
    if folder.exists():
        shutil.rmtree(folder)
        SearchIndex.forget(folder)
    made = {"messages": json.dumps(messages), "reply": json.dumps(reply), "tools": json.dumps(tools)}
    with WrittenRun(folder) as run:
        run.status(state="finished", steps=1, step=1)
        run.episode(
            "e-1", [said(None, [1, 2], [3, 4], "ask", "reply", **made)], sample=sample, metadata=metadata
        )
        run.episode("e-2", sample={"input": "fine"})
    app = create_page(tmp_path / "runs", admin_token=None)
    with TestClient(app, base_url="http://localhost") as client:
        for view in VIEWS:
            answer = client.get(f"/api/{view}".format(sample=sample_row(sample).digest.hex()))
            assert answer.status_code == 200, (view, answer.text)

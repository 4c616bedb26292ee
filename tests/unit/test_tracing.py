"""Spans of episodes in one process; `tests/runs/test_traces.py` has a whole run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tinkerscript import tracing


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.start_tracing("tried", exporter=exporter)
    yield exporter
    tracing.stop_tracing()


def test_without_an_endpoint_nothing_is_imported_or_told() -> None:
    code = (
        "import sys; from tinkerscript import tracing; tracing.start_tracing('x', environ={});"
        "off = {'OTEL_EXPORTER_OTLP_ENDPOINT': 'a', 'OTEL_SDK_DISABLED': 'true'};"
        "tracing.start_tracing('x', environ=off);"
        "assert tracing.traceparent() == tracing.claim_traceparent('e', 1) == '';"
        'exec(\'with tracing.span("a"), tracing.call_span("e", 1): pass\');'
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    tracing.start_tracing("x", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"})
    assert not tracing.is_on()
    assert "pip install 'tinkerscript[otel]'" in caplog.text


def test_the_context_goes_from_the_claim_to_the_step(exported: InMemorySpanExporter) -> None:
    with tracing.span("episode", parent=tracing.claim_traceparent("e", 2)):
        sent = tracing.traceparent()
    tracing.came_with(sent)
    with tracing.call_span("e", 2, prompt_tokens=7):
        over_the_link = tracing.traceparent()
    with tracing.span("sampling", parent=over_the_link):
        pass
    tracing.claim_over("e", 2, began=100.0, ended=101.5, outcome="ended")
    with tracing.span("train step", links=[("e", 2)], step=1):
        pass
    episode, call, sampling, claim, step = exported.get_finished_spans()
    ids = tracing.claim_ids("e", 2)
    assert (claim.context.trace_id, claim.context.span_id, claim.parent) == (*ids, None)
    assert claim.end_time - claim.start_time == 1_500_000_000
    for parent, child in ((claim, episode), (episode, call), (call, sampling)):
        assert (child.parent.span_id, child.context.trace_id) == (parent.context.span_id, ids[0])
    assert [(link.context.trace_id, link.context.span_id) for link in step.links] == [ids]
    assert step.context.trace_id != ids[0]


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + 32 * "a" + "-" + 16 * "b" + "-01"])
def test_a_client_cannot_put_its_calls_into_another_trace(exported: InMemorySpanExporter, sent: str) -> None:
    tracing.came_with(sent)
    with tracing.call_span("e", 1):
        pass
    (call,) = exported.get_finished_spans()
    assert (call.context.trace_id, call.parent.span_id) == tracing.claim_ids("e", 1)

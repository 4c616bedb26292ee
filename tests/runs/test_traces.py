"""A run exports its traces to a collector: an episode's spans hang together across all processes."""

from __future__ import annotations

import gzip
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from command_line import DEMO, SHORT, as_options, start
from tinkerscript.tracing import claim_ids


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP, as collectors do."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Any]] = []
        """The service and the span."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def named(self, service: str, name: str) -> list[Any]:
        found = [
            span for where, span in self.spans if where == f"tinkerscript-{service}" and span.name == name
        ]
        assert found, (service, name)
        return found


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            spans = [span for scope in resource.scope_spans for span in scope.spans]
            self.server.spans += [(names["service.name"], span) for span in spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Not to the tests' output."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_run_traces_its_episodes_through_all_processes(tmp_path: Path, collector: Collector) -> None:
    settings = {**SHORT, "training.steps": 2, "training.groups_per_step": 4, "evaluation.episodes": 0}
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    command = start(tmp_path, "train", str(DEMO), *as_options(settings), env=os.environ | environ)
    assert command.wait(seconds=200) == 0, command.text()
    claims = {span.span_id: span for span in collector.named("server", "claim")}
    rollouts = {span.span_id: span for span in collector.named("worker", "episode")}
    calls = {span.span_id: span for span in collector.named("server", "model call")}
    assert len(claims) == len(rollouts) == 2 * 4 * 4
    for span in claims.values():
        about = {each.key: each.value for each in span.attributes}
        trace, span_id = claim_ids(about["episode"].string_value, about["attempt"].int_value)
        assert (span.trace_id, span.span_id) == (trace.to_bytes(16, "big"), span_id.to_bytes(8, "big"))
        assert span.start_time_unix_nano < span.end_time_unix_nano
    for parents, children in ((claims, rollouts), (rollouts, calls)):
        for span in children.values():
            assert span.trace_id == parents[span.parent_span_id].trace_id
    for span in collector.named("trainer", "sampling"):
        assert span.trace_id == calls[span.parent_span_id].trace_id
    steps = collector.named("trainer", "train step")
    assert len(steps) == 2
    linked = [link.span_id for span in steps for link in span.links]
    assert len(linked) == len(set(linked)) > 0
    assert set(linked) <= claims.keys()

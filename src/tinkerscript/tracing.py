"""OpenTelemetry traces of episodes across a run's processes (extra `otel`).

A trace is an episode. Its id comes from the episode's uuid, and a claim's span id from the attempt, so every
process can compute them. W3C's `traceparent` connects the rest: claim -> client -> model call -> link ->
sampling. A training step is its own trace, with links to its claims.

Without OpenTelemetry's environment variables none of it is imported, and a span costs one check of a
variable. A client's `traceparent` is used only for its own episode.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

# Either one turns on export.
COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

HEADER = "traceparent"
MAX_LINKS = 10_000
_FORMAT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_OFF = nullcontext()

logger = logging.getLogger(__name__)

_tracer: Any = None  # None while tracing is off.

_incoming: ContextVar[str] = ContextVar("incoming traceparent", default="")
_forced: ContextVar[tuple[int, int] | None] = ContextVar("ids of the next span", default=None)


def start_tracing(service: str, *, environ: Mapping[str, str] = os.environ, exporter: Any = None) -> None:
    """Export spans to `exporter`, or where the environment says, or nowhere."""
    global _tracer
    is_wanted = any(environ.get(name) for name in COLLECTOR_VARIABLES)
    if exporter is None and (not is_wanted or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"):
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor: Any = BatchSpanProcessor(OTLPSpanExporter())
        else:
            processor = SimpleSpanProcessor(exporter)
    except ModuleNotFoundError as error:
        remedy = "pip install 'tinkerscript[otel]'"
        logger.warning(
            "no traces: %s is set, but %s is missing: %s", COLLECTOR_VARIABLES[1], error.name, remedy
        )
        return

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            forced = _forced.get()
            return forced[0] if forced else super().generate_trace_id()

        def generate_span_id(self) -> int:
            forced = _forced.get()
            return forced[1] if forced else super().generate_span_id()

    resource = Resource.create({"service.name": f"tinkerscript-{service}"})
    limits = SpanLimits(max_links=MAX_LINKS)
    provider = TracerProvider(id_generator=Ids(), resource=resource, span_limits=limits)
    provider.add_span_processor(processor)
    _tracer = provider.get_tracer("tinkerscript")


def stop_tracing() -> None:
    """Stop exporting. For tests."""
    global _tracer
    _tracer = None


def is_on() -> bool:
    return _tracer is not None


def claim_ids(episode_uuid: str, attempt: int) -> tuple[int, int]:
    trace = hashlib.blake2b(episode_uuid.encode(), digest_size=16).digest()
    span_id = hashlib.blake2b(f"{attempt}/{episode_uuid}".encode(), digest_size=8).digest()
    return int.from_bytes(trace) or 1, int.from_bytes(span_id) or 1


def claim_traceparent(episode_uuid: str, attempt: int) -> str:
    """Return a claim's `traceparent`, empty while tracing is off."""
    if _tracer is None:
        return ""
    trace, span_id = claim_ids(episode_uuid, attempt)
    return f"00-{trace:032x}-{span_id:016x}-01"


def claim_over(episode_uuid: str, attempt: int, *, began: float, ended: float, outcome: str) -> None:
    """Export a claim's span. Times are Unix seconds."""
    if _tracer is None:
        return
    from opentelemetry.context import Context

    token = _forced.set(claim_ids(episode_uuid, attempt))
    try:
        found = _tracer.start_span("claim", Context(), start_time=int(began * 1e9))
    finally:
        _forced.reset(token)
    found.set_attributes({"episode": episode_uuid, "attempt": attempt, "outcome": outcome})
    found.end(int(ended * 1e9))


def span(
    name: str,
    *,
    parent: str = "",
    links: Iterable[tuple[str, int]] = (),
    **attributes: str | float,
) -> AbstractContextManager[Any]:
    """Open a span under `parent` or else the surrounding one. `links` are claims: episode and attempt."""
    return _OFF if _tracer is None else _span(name, parent, links, attributes)


@contextmanager
def _span(
    name: str, parent: str, links: Iterable[tuple[str, int]], attributes: Mapping[str, str | float]
) -> Generator[None]:
    from opentelemetry.trace import Link

    linked = [Link(_remote(*claim_ids(*claim))) for claim in links]
    with _tracer.start_as_current_span(name, _context(parent), attributes=attributes, links=linked):
        yield


def passing_on(parent: str) -> AbstractContextManager[Any]:
    """Send under `parent` from this block, without a span of our own."""
    return _OFF if _tracer is None else _passing_on(parent)


@contextmanager
def _passing_on(parent: str) -> Generator[None]:
    from opentelemetry.context import attach, detach

    context = _context(parent)
    token = None if context is None else attach(context)
    try:
        yield
    finally:
        if token is not None:
            detach(token)


def call_span(episode_uuid: str, attempt: int, **attributes: str | float) -> AbstractContextManager[Any]:
    """Open a claim's span, under the request's if it is of the same episode."""
    if _tracer is None:
        return _OFF
    claim, incoming = claim_traceparent(episode_uuid, attempt), _incoming.get()
    named = _FORMAT.fullmatch(incoming)
    is_own = named is not None and int(named[1], 16) == claim_ids(episode_uuid, attempt)[0]
    parent = incoming if is_own else claim
    about = {"episode": episode_uuid, "attempt": attempt}
    return _span("model call", parent, (), {**about, **attributes})


def came_with(traceparent: str) -> None:
    """Set the `traceparent` of this task's request."""
    _incoming.set(traceparent)


def traceparent() -> str:
    """Return the current span's `traceparent`, empty without a span."""
    if _tracer is None:
        return ""
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _context(parent: str) -> Any:
    found = _FORMAT.fullmatch(parent)
    if found is None:
        return None
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(_remote(int(found[1], 16), int(found[2], 16))))


def _remote(trace: int, span_id: int) -> Any:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(trace, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

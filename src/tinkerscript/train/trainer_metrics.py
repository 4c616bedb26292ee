"""`TrainerMetrics`: what the trainer and its replicas do, for the server's `/metrics`.

Invariant: how many series there are follows from the config, never from what clients report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from tinker_cookbook.utils.ml_log import Logger

PUSH_S = 5.0
"""Between two messages to the server."""

MAX_NAMES = 256
"""Metrics of a step that are exported, at most."""

REPORTED = ("episode/", "limit/", "tool_error/", "failure/")
"""What begins the names that clients choose."""


class ReplicaFigures(Protocol):
    """What is exported of a replica."""

    name: str
    serving: bool
    pinned: int
    tokens: float

    @property
    def load(self) -> tuple[int, int]: ...


class TrainerMetrics(Logger):
    """A logger of step metrics that keeps the last value of each."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(namespace="tinkerscript_trainer", registry=self._registry)
        self._step = Gauge("tinkerscript_trainer_step", "Last finished step.", registry=self._registry)
        self._values = Gauge(
            "tinkerscript_trainer_metric",
            "A metric of the last finished step or evaluation, as in metrics.jsonl.",
            ["metric"],
            registry=self._registry,
        )
        self._names = set[str]()
        self._replicas = _Replicas()
        self._registry.register(self._replicas)

    def log_hparams(self, config: Any) -> None:
        """They are in the run folder."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep the values, except for those whose names clients choose."""
        if step is not None:
            self._step.set(step)
        for name, value in metrics.items():
            if name.startswith(REPORTED) or (name not in self._names and len(self._names) >= MAX_NAMES):
                continue
            self._names.add(name)
            self._values.labels(name).set(value)

    def watch(self, replicas: Iterable[ReplicaFigures]) -> None:
        """Export what these replicas do."""
        self._replicas.replicas = list(replicas)

    def text(self) -> bytes:
        """All of it, as of now."""
        return generate_latest(self._registry)

    async def push(self, send: Callable[[bytes], object]) -> None:
        """Send it again and again, until cancelled."""
        while True:
            send(self.text())
            await asyncio.sleep(PUSH_S)


class _Replicas(Collector):
    def __init__(self) -> None:
        self.replicas: list[ReplicaFigures] = []

    def collect(self) -> Iterator[Metric]:
        gauges = {
            "serving": "Whether the replica samples for the run.",
            "calls_in_flight": "Model calls that wait for the replica.",
            "episodes": "Episodes that stay with the replica.",
        }
        families = [
            GaugeMetricFamily(f"tinkerscript_replica_{name}", text, labels=["replica"])
            for name, text in gauges.items()
        ]
        tokens = CounterMetricFamily(
            "tinkerscript_replica_sampled_tokens", "Tokens that the replica has sampled.", labels=["replica"]
        )
        for replica in self.replicas:
            for family, value in zip(
                families, (replica.serving, replica.load[0], replica.pinned), strict=True
            ):
                family.add_metric([replica.name], float(value))
            tokens.add_metric([replica.name], replica.tokens)
        return iter([*families, tokens])

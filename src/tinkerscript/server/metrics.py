"""The server's metrics, in its own Prometheus registry, with the trainer's.

Episodes are counted at each scrape, so counts survive a restart; other counters begin at 0. The number of
series never depends on clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tinkerscript.server.episodes.book import EpisodeBook

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

CALL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

TRAINERS = ("tinkerscript_trainer_", "tinkerscript_replica_")  # Prefixes of the trainer's metrics.

MAX_TRAINERS_BYTES = 2**20


class ServerMetrics:
    def __init__(self, book: EpisodeBook) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_BookCollector(book))
        ProcessCollector(namespace="tinkerscript_server", registry=self._registry)
        self._claims = self._counter("claims", "Claims made.")
        self._requeues = self._counter("requeues", "Episodes registered again after a lost claim.")
        self._expired_claims = self._counter("expired_claims", "Claims whose lease ran out.")
        self._calls = self._counter("model_calls", "Model calls recorded.")
        self._tokens = self._counter("sampled_tokens", "Tokens sampled in recorded calls.")
        self._gateway_restarts = self._counter("gateway_restarts", "Gateway processes started again.")
        self._call_s = Histogram(
            "tinkerscript_model_call_seconds",
            "Time to sample a model call of a claim.",
            buckets=CALL_BUCKETS_S,
            registry=self._registry,
        )
        self._link_drops = Counter(
            "tinkerscript_link_drops",
            "Frames and messages of the link that were dropped.",
            ["reason"],
            registry=self._registry,
        )
        self._trainers = b""

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tinkerscript_{name}", text, registry=self._registry)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(f"tinkerscript_{name}", text, registry=self._registry).set_function(value)

    def count_claim(self) -> None:
        self._claims.inc()

    def count_requeues(self, number: int) -> None:
        self._requeues.inc(number)

    def count_expired_claims(self, number: int) -> None:
        self._expired_claims.inc(number)

    def count_call(self, sampled_tokens: int) -> None:
        self._calls.inc()
        self._tokens.inc(sampled_tokens)

    def observe_call(self, seconds: float) -> None:
        self._call_s.observe(seconds)

    def count_gateway_restart(self) -> None:
        self._gateway_restarts.inc()

    def count_link_drop(self, reason: str) -> None:
        self._link_drops.labels(reason).inc()

    def add_trainers(self, text: bytes) -> bool:
        try:
            names = [family.name for family in text_string_to_metric_families(text.decode())]
        except (ValueError, KeyError, IndexError):
            return False
        if len(text) > MAX_TRAINERS_BYTES or not all(name.startswith(TRAINERS) for name in names):
            return False
        self._trainers = text
        return True

    def forget_trainer(self) -> None:
        self._trainers = b""

    def render(self) -> bytes:
        return generate_latest(self._registry) + self._trainers


class _BookCollector(Collector):
    def __init__(self, book: EpisodeBook) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            "tinkerscript_episodes", "Episodes by type and state.", labels=["type", "state"]
        )
        pools = GaugeMetricFamily(
            "tinkerscript_pool_episodes",
            "Episodes by pool and state; pools with unfinished episodes and the trainer's (an empty name).",
            labels=["pool", "state"],
        )
        accepted = CounterMetricFamily(
            "tinkerscript_results_accepted", "Results that the trainer has used or left out.", labels=["type"]
        )
        failed = CounterMetricFamily(
            "tinkerscript_episodes_failed", "How often an episode failed.", labels=["type"]
        )
        active = GaugeMetricFamily("tinkerscript_active_clients", "Clients that hold a claim.")
        for kind, count in self._book.counts.by_type().items():
            for state, number in count.model_dump().items():
                states.add_metric([kind, state], number)
            accepted.add_metric([kind], count.accepted)
        for pool, count in self._book.counts.by_pool(unfinished_only=True).items():
            for state, number in count.model_dump().items():
                pools.add_metric([pool, state], number)
        for kind, number in self._book.counts.failures().items():
            failed.add_metric([kind], number)
        active.add_metric([], self._book.active_clients)
        yield from (states, pools, accepted, failed, active)

"""The server's metrics, in a Prometheus registry of its own.

Invariant: the counts of episodes are read from the book at each scrape, so they are right after a restart
too; the other counters start at 0 with the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinkerscript.server.episodes.book import EpisodeBook

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Counters, incremented by the parts of the server, and the book's counts."""

    def __init__(self, book: EpisodeBook) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_BookCollector(book))
        self._claims = self._counter("claims", "Claims made.")
        self._requeues = self._counter("requeues", "Episodes registered again after a lost claim.")
        self._expired_claims = self._counter("expired_claims", "Claims whose lease ran out.")
        self._calls = self._counter("model_calls", "Model calls recorded.")
        self._tokens = self._counter("sampled_tokens", "Tokens sampled in recorded calls.")
        self._gateway_restarts = self._counter("gateway_restarts", "Gateway processes started again.")
        self._link_drops = Counter(
            "tinkerscript_link_drops",
            "Frames and messages of the link that were dropped.",
            ["reason"],
            registry=self._registry,
        )

        self._clients: Counter | None = None
        """Made with the first client that has its own token."""

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"tinkerscript_{name}", text, registry=self._registry)

    def watch_waiting_clients(self, long_polls: Sized) -> None:
        """Export the number of clients that wait for an episode in long polls."""
        gauge = Gauge("tinkerscript_waiting_clients", "Clients in long polls.", registry=self._registry)
        gauge.set_function(lambda: len(long_polls))

    def count_claim(self) -> None:
        self._claims.inc()

    def count_requeues(self, number: int) -> None:
        self._requeues.inc(number)

    def count_expired_claims(self, number: int) -> None:
        self._expired_claims.inc(number)

    def count_call(self, sampled_tokens: int) -> None:
        self._calls.inc()
        self._tokens.inc(sampled_tokens)

    def count_client(self, client: str, what: str, number: int = 1) -> None:
        """`what`: claims, registrations, bytes or refusals of a client with its own token."""
        if self._clients is None:
            self._clients = Counter(
                "tinkerscript_client_usage",
                "Claims, registrations, bytes of requests and refusals of clients with their own tokens.",
                ["client", "what"],
                registry=self._registry,
            )
        self._clients.labels(client, what).inc(number)

    def count_gateway_restart(self) -> None:
        self._gateway_restarts.inc()

    def count_link_drop(self, reason: str) -> None:
        self._link_drops.labels(reason).inc()

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _BookCollector(Collector):
    """The book's own counts."""

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
            "tinkerscript_results_accepted", "Results that the trainer acknowledged.", labels=["type"]
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

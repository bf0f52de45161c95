"""The router's Prometheus metrics, all named ``tpla_router_*``, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tpla.router.breaker import BreakerState
from tpla.router.registry import WorkerReport

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

_BREAKER_LEVEL = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


class RouterMetrics:
    """Counters and histograms; the gauges of workers are read when scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests answered", "route", "status")
        self.retries = self._counter("retries", "Further attempts after a failed one")
        self.leg_failures = self._counter(
            "leg_failures", "Legs that failed of their own accord", "role", "reason"
        )
        self.kv_transfer_failures = self._counter(
            "kv_transfer_failures", "Requests whose KV did not reach decode"
        )
        self.client_disconnects = self._counter(
            "client_disconnects", "Clients that left before the end of their answer", "when"
        )
        self.aborts = self._counter("aborts", "Aborts sent to workers", "role", "result")
        self.ttft = self._histogram("ttft_seconds", "Until the first token", "route")
        self.prefill = self._histogram("prefill_duration_seconds", "Duration of prefill legs")
        self.duration = self._histogram("request_duration_seconds", "Whole requests", "route")

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read when scraped."""
        Gauge(f"tpla_router_{name}", text, registry=self.registry).set_function(read)

    def watch_workers(self, report: Callable[[], list[WorkerReport]]) -> None:
        """Add the gauges of each worker."""
        self.registry.register(_WorkerGauges(report))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"tpla_router_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(
            f"tpla_router_{name}", text, labels, registry=self.registry, buckets=SECONDS
        )


class _WorkerGauges(Collector):
    def __init__(self, report: Callable[[], list[WorkerReport]]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        labels = ("worker", "role", "url")
        healthy = GaugeMetricFamily("tpla_router_worker_healthy", "1 if healthy", labels=labels)
        active = GaugeMetricFamily("tpla_router_worker_active", "Active legs", labels=labels)
        breaker = GaugeMetricFamily(
            "tpla_router_breaker_state", "0 closed, 1 half open, 2 open", labels=labels
        )
        for worker in self._report():
            key = (worker.id, worker.role.value, worker.url)
            healthy.add_metric(key, float(worker.healthy))
            active.add_metric(key, float(worker.active))
            breaker.add_metric(key, float(_BREAKER_LEVEL[worker.breaker]))
        yield from (healthy, active, breaker)

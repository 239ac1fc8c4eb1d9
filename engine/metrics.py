"""What /metrics shows: numbers read from their owners when asked, all present from the start."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.engine_loop import EngineLoop
from engine.prefix import PrefixCache
from engine.prefix_disk import DiskStats
from engine.scheduler import StepReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
_WAIT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
STEP_KINDS = ("prefill", "decode")
END_REASONS = ("stop", "length", "cancelled", "error")
REFUSALS = ("400", "401", "404", "405", "408", "413", "429", "503")


class Metrics:
    """Owns a registry of its own; histograms are fed, everything else is read when scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._steps = Histogram(
            "flare_step_seconds",
            "Time of one engine step",
            ["kind"],
            buckets=_STEP_BUCKETS,
            registry=self.registry,
        )
        self._first_token = Histogram(
            "flare_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_WAIT_BUCKETS,
            registry=self.registry,
        )
        self.refusals = dict.fromkeys(REFUSALS, 0)
        for kind in STEP_KINDS:
            self._steps.labels(kind)

    def observe_step(self, report: StepReport, seconds: float) -> None:
        """Count a step; called by the engine's thread."""
        self._steps.labels(report.kind).observe(seconds)

    def observe_first_token(self, seconds: float) -> None:
        """Count a request's wait."""
        self._first_token.observe(seconds)

    def count_refusal(self, status: int) -> None:
        """Count an answer that was an error of HTTP."""
        self.refusals[str(status)] = self.refusals.get(str(status), 0) + 1

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Reads the engine's own counters; one snapshot, so that the pages add up."""

    def __init__(
        self,
        loop: EngineLoop,
        prefix: PrefixCache,
        disk: DiskStats,
        page_tokens: int,
        metrics: Metrics,
    ):
        self._loop, self._prefix, self._disk = loop, prefix, disk
        self._page_tokens, self._metrics = page_tokens, metrics

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client.registry.Collector."""
        yield from self._pages_and_queues()
        yield from self._tokens()
        yield from self._prefix_cache()
        yield from self._drafts()

    def _pages_and_queues(self) -> Iterator[Metric]:
        snapshot, scale = self._loop.snapshot, self._page_tokens
        pages = snapshot.pages
        yield _gauge("flare_total_kv_tokens", "Tokens the KV pool holds", pages.total * scale)
        yield _gauge("flare_free_kv_tokens", "Tokens of pages nobody holds", pages.free * scale)
        yield _gauge(
            "flare_cached_kv_tokens", "Tokens of pages only the cache holds", pages.cached * scale
        )
        yield _gauge("flare_used_kv_tokens", "Tokens of sequences' pages", pages.used * scale)
        yield _gauge("flare_requests_running", "Sequences with a slot", snapshot.running)
        yield _gauge("flare_requests_waiting", "Sequences in the queue", snapshot.waiting)

    def _tokens(self) -> Iterator[Metric]:
        stats = self._loop.scheduler.stats
        yield _counter("flare_prompt_tokens", "Prompt tokens admitted", stats.prompt_tokens)
        yield _counter("flare_generation_tokens", "Tokens produced", stats.generation_tokens)
        yield _counter("flare_preemptions", "Sequences sent back to the queue", stats.preemptions)
        ended = {reason: stats.ended[reason] for reason in END_REASONS}
        yield _labelled("flare_requests", "Sequences ended", "reason", ended)
        yield _labelled("flare_refusals", "HTTP errors", "status", self._metrics.refusals)

    def _prefix_cache(self) -> Iterator[Metric]:
        stats, disk = self._prefix.stats, self._disk
        yield _counter(
            "flare_prefix_query_tokens", "Tokens of full pages looked up", stats.query_tokens
        )
        yield _labelled("flare_prefix_hit_tokens", "Tokens found", "source", stats.hit_tokens)
        yield _counter("flare_prefix_evicted_pages", "Pages given up", stats.evicted_pages)
        size = {"memory": self._prefix.size_bytes, "disk": disk.size_bytes}
        yield _labelled("flare_prefix_bytes", "Bytes of cached prefixes", "place", size, "gauge")
        yield _labelled("flare_prefix_disk_blocks", "Disk blocks", "event", disk.blocks)
        yield _labelled("flare_prefix_disk_errors", "Disk trouble", "kind", disk.errors)

    def _drafts(self) -> Iterator[Metric]:
        stats = self._loop.scheduler.stats
        proposed = {str(i): n for i, n in enumerate(stats.drafts_proposed)}
        accepted = {str(i): n for i, n in enumerate(stats.drafts_accepted)}
        yield _labelled("flare_draft_proposed", "Drafts verified", "position", proposed)
        yield _labelled("flare_draft_accepted", "Drafts accepted", "position", accepted)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(
    name: str, text: str, label: str, values: dict[str, int], kind: str = "counter"
) -> Metric:
    family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
    metric = family(name, text, labels=[label])
    for key, value in list(values.items()):
        metric.add_metric([key], value)
    return metric

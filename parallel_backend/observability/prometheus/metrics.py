"""Counts events of rank groups for Prometheus; docs/metrics.md explains each metric.

Names, units and suffixes follow https://prometheus.io/docs/practices/naming/. No label contains a path, and each has
few values: devices, strategies without their shares, words of closed sets, and models that used device time.
"""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    generate_latest,
)
from prometheus_client import Gauge as PriceGauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...errors import FAILURES
from ...sidecar.group.events import Event, Loaded, Released, RequestEnded, RequestFailed, Started, Stepped
from ...sidecar.group.lease import State
from ...sidecar.status import GroupStatus, RankStatus
from ...strategy import ParallelStrategy
from ...wire.protocol import VERSION
from ..cost import device_seconds, model_name
from ..gauges import Gauge

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "parallel_sampling_"
JOBS = ("sample", "decode", "encode")  # requests that a person sees as a job
RESULTS = ("done", "cancelled", "refused", "out_of_memory", "failed")
# Bucket limits in seconds: a cancel takes tens of milliseconds, a large image on one device minutes.
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
_MOST_LETTERS = 80  # of a model's name in a label
MOST_MODELS = 50  # models with their own label; others are labelled `other`
# Lines on creation times of series, which double the text. The library's own switch for them would affect other packs.
_TIMES = re.compile(rb"^(?:# \w+ )?\w+_created[ {].*\n", re.MULTILINE)
_PROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"

Statuses = Callable[[], Iterable[GroupStatus]]
Gauges = Callable[[tuple[str, ...]], Mapping[str, Gauge]]

# (name, help text, function that returns the value or None if unknown) for each reading of a device.
_READINGS: tuple[tuple[str, str, Callable[[Gauge], float | None]], ...] = (
    ("device_memory_total_bytes", "Memory of a device", lambda gauge: gauge.total_bytes or None),
    (
        "device_memory_free_bytes",
        "Memory of a device that no process holds",
        lambda gauge: gauge.free_bytes or None,
    ),
    (
        "device_utilization_ratio",
        "Part of the last moment in which a device computed",
        lambda gauge: gauge.utilisation,
    ),
    ("device_temperature_celsius", "Temperature of a device", lambda gauge: gauge.temperature),
    ("device_power_watts", "Power that a device draws", lambda gauge: gauge.power),
)


class Metrics:
    """Counts events and answers scrapes. `statuses`: returns every group's status; `gauges`: returns the readings of
    devices; `price`: returns the price of a device-hour, 0 for none. All are called at each scrape."""

    def __init__(self, statuses: Statuses, gauges: Gauges, price: Callable[[], float] = lambda: 0.0) -> None:
        # A separate registry: other packs may use the library's global one.
        self._registry = registry = CollectorRegistry()
        self._statuses, self._gauges = statuses, gauges
        self._known: set[tuple[str, ...]] = set()
        self._models: set[str] = set()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, labels, buckets=_SECONDS, registry=registry)

        self._jobs = counter(
            "jobs_total", "Sampling, decoding and encoding jobs that ended", "request", "result"
        )
        self._job_seconds = seconds(
            "job_seconds", "Jobs that were done, from their turn to their end", "request", "strategy"
        )
        self._step_seconds = seconds("step_seconds", "Steps of sampling jobs", "strategy")
        self._device_seconds = counter(
            "device_seconds_total",
            "Devices times the seconds that requests held them",
            *("request", "strategy", "model", "result"),
        )
        self._idle_seconds = counter(
            "idle_device_seconds_total",
            "Devices times the seconds that processes waited for a request",
            "devices",
        )
        self._images = counter(
            "images_total", "Images of the jobs that were done", "request", "strategy", "model"
        )
        self._cancel_seconds = seconds("cancel_seconds", "From a cancel to the end of its request")
        self._start_seconds = seconds("start_seconds", "Starts of groups until every process was ready")
        self._restarts = counter("restarts_total", "Starts of groups after a process failed", "devices")
        self._failures = counter("rank_failures_total", "Processes that failed", "device", "reason")
        self._load_seconds = seconds("load_seconds", "Loads of models, by the slowest process")
        self._loaded_bytes = counter("loaded_bytes_total", "Sizes of the models that were loaded")
        build = Info(PREFIX + "build", "Versions of what runs", registry=registry)
        build.info(
            {
                "version": pack_version(),
                "protocol": str(VERSION),
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            }
        )
        per_hour = PriceGauge(
            PREFIX + "price_per_device_hour", "Price in Settings, 0 for none", registry=registry
        )
        per_hour.set_function(price)
        registry.register(self)  # which calls `collect` at each scrape
        # A series must exist at 0, or Prometheus would not see the first event as a change.
        for result in RESULTS:
            for request in JOBS:
                self._jobs.labels(request, result)

    def on_event(self, event: Event) -> None:
        """Counts one event."""
        self._know(event.devices)
        if isinstance(event, (RequestEnded, Released)):
            idle = len(event.devices) * event.idle_s
            self._idle_seconds.labels(_listed(event.devices)).inc(idle)
        if isinstance(event, RequestEnded):
            self._ended(event)
        elif isinstance(event, Stepped):
            self._step_seconds.labels(_named(event.strategy)).observe(event.seconds)
        elif isinstance(event, RequestFailed):
            self._failures.labels(event.device, event.reason).inc()
        elif isinstance(event, Loaded):
            self._load_seconds.observe(event.info.seconds)
            self._loaded_bytes.inc(event.info.bytes)
        elif isinstance(event, Started):
            self._start_seconds.observe(event.seconds)
            if event.after:
                self._restarts.labels(_listed(event.devices)).inc()

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format; its type is CONTENT_TYPE."""
        return _TIMES.sub(b"", generate_latest(self._registry))

    def collect(self) -> Iterator[Metric]:
        """Yields group states, rank notes and device readings of this moment. CPUs have no readings, because their
        ranks share them."""
        groups = tuple(self._statuses())
        yield from self._groups(groups)
        yield from self._devices(tuple(sorted({device for group in groups for device in group.devices})))

    def _know(self, devices: tuple[str, ...]) -> None:
        if devices in self._known:
            return
        self._known.add(devices)
        self._restarts.labels(_listed(devices))
        self._idle_seconds.labels(_listed(devices))
        for device in devices:
            for reason in FAILURES:
                self._failures.labels(device, reason)

    def _ended(self, event: RequestEnded) -> None:
        if event.cancel_s is not None:
            self._cancel_seconds.observe(event.cancel_s)
        if event.request not in JOBS:
            return
        self._jobs.labels(event.request, event.result).inc()
        if event.result == "refused":
            return
        # A decode or encode has no strategy: devices split its rows.
        strategy = f"rows {len(event.devices)}" if event.strategy is None else _named(event.strategy)
        model = self._model_label(event)
        self._device_seconds.labels(event.request, strategy, model, event.result).inc(device_seconds(event))
        if event.result != "done":
            return
        self._job_seconds.labels(event.request, strategy).observe(event.seconds)
        self._images.labels(event.request, strategy, model).inc(event.images)

    def _model_label(self, event: RequestEnded) -> str:
        if event.spec is None:
            return "vae"
        name = model_name(event.spec)[:_MOST_LETTERS]
        if name not in self._models and len(self._models) >= MOST_MODELS:
            return "other"
        self._models.add(name)
        return name

    @staticmethod
    def _groups(groups: Iterable[GroupStatus]) -> Iterator[Metric]:
        state = _gauge("group_state", "1 for the state that a group is in", "devices", "state")
        memory = _gauge(
            "device_memory_bytes", "Memory of processes for weights and beside them", "device", "kind"
        )
        models = _gauge("held_models", "Models that a group holds in its devices' memory", "devices")
        text = "Bytes that a process sent to others since it began"
        sent = CounterMetricFamily(PREFIX + "sent_bytes", text, labels=("device",))
        ranks: dict[str, RankStatus] = {}  # by device: Prometheus refuses a scrape with a series twice
        for group in groups:
            for one in State:
                state.add_metric([_listed(group.devices), one.value], float(group.state == one.value))
            models.add_metric([_listed(group.devices)], len(group.models))
            ranks |= {rank.device: rank for rank in group.ranks}
        for device, rank in ranks.items():
            memory.add_metric([device, "weights"], rank.weight_bytes)
            memory.add_metric([device, "working"], rank.working_bytes)
            sent.add_metric([device], rank.sent_bytes)
        yield from (state, memory, sent, models)

    def _devices(self, devices: tuple[str, ...]) -> Iterator[Metric]:
        read = {device: gauge for device, gauge in self._gauges(devices).items() if not gauge.shared}
        for name, text, value in _READINGS:
            family = _gauge(name, text, "device")
            for device, gauge in read.items():
                if (known := value(gauge)) is not None:
                    family.add_metric([device], known)
            yield family


@functools.cache
def pack_version(project: Path = _PROJECT) -> str:
    """Returns the pack's version from pyproject.toml, such as "0.1.0"; "unknown" if the file is missing."""
    try:
        found = re.search(r'^version = "([^"]+)"$', project.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else "unknown"


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def _named(strategy: ParallelStrategy) -> str:
    """Returns the strategy in words without its shares: arbitrary numbers would make endless labels."""
    if not strategy.device_shares:
        return strategy.describe()
    return f"{replace(strategy, device_shares=()).describe()}, unequal shares"


def _listed(devices: tuple[str, ...]) -> str:
    return ",".join(devices)

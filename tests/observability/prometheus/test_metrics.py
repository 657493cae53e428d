"""The metrics that Prometheus reads after jobs on real ranks; the dashboard and the page name exactly these."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fake_nvml import GIB
from parallel_backend.errors import FAILURES, RANK_CRASHED, RankFailed, from_wire
from parallel_backend.observability.gauges import Gauge
from parallel_backend.observability.prometheus.metrics import MOST_MODELS, PREFIX, Metrics, pack_version
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.events import Released, RequestEnded, Stepped, listen
from parallel_backend.sidecar.status import GroupStatus
from parallel_backend.strategy import ParallelStrategy
from scripted import (
    CRASH,
    cancel_after_a_step,
    scripted_request,
    scripted_sidecar,
    scripted_weights,
    two_ranks,
)
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = json.loads((ROOT / "docs" / "grafana.json").read_text("utf-8"))
PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")


class Scrape:
    """The metrics of one scrape, parsed as Prometheus parses them."""

    def __init__(self, text: bytes) -> None:
        self.families = list(text_string_to_metric_families(text.decode()))
        self._values = {
            (one.name, frozenset(one.labels.items())): one.value
            for family in self.families
            for one in family.samples
        }
        assert len(self._values) == sum(len(family.samples) for family in self.families)  # no series twice

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._values.get((PREFIX + name, frozenset(labels.items())))

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._values}

    def labels(self, name: str) -> set[str]:
        return {label for found, labels in self._values if found == name for label, _ in labels}

    def states(self) -> set[str]:
        found = [labels for (name, labels), value in self._values.items() if "group_state" in name and value]
        return {dict(labels)["state"] for labels in found}


CARD = Gauge("a card", 48 * GIB, 40 * GIB, 0.2, 41, 250.5, 300.0)


def scrape_after(*events, price=0.0):
    metrics = Metrics(list, lambda devices: {}, lambda: price)
    for event in events:
        metrics.on_event(event)
    return Scrape(metrics.text())


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Three scrapes: while ranks hold a model, after an idle rank has died, and after the ranks were stopped."""
    sidecar = scripted_sidecar()
    weights = scripted_weights(tmp_path_factory.mktemp("weights") / "a private name.safetensors", "good 0.5")
    metrics = Metrics(lambda: [sidecar.status()], lambda devices: dict.fromkeys(devices, CARD))
    stop = listen(metrics.on_event)
    try:
        sidecar.sample(weights, scripted_request(steps=3), two_ranks())
        cancel_after_a_step(sidecar, weights)
        warm = Scrape(metrics.text())
        with pytest.raises(RankFailed):
            sidecar.sample(weights, scripted_request(CRASH), two_ranks())
        sidecar.load(weights)
        os.kill(sidecar.pids[0], signal.SIGKILL)  # while the ranks are idle
        wait_until(lambda: sidecar.state.value == "failed")
        dead = Scrape(metrics.text())
        sidecar.stop()
    finally:
        stop()
        sidecar.stop()
    return warm, dead, Scrape(metrics.text())


def test_jobs_are_counted_apart_by_how_they_ended(story):
    _, _, after = story
    results = {
        r: after("jobs_total", request="sample", result=r) for r in ("done", "cancelled", "failed", "refused")
    }
    assert results == {"done": 1, "cancelled": 1, "failed": 1, "refused": 0}
    assert after("jobs_total", request="decode", result="done") == 0


def test_times_are_told_by_strategy_and_fill_buckets_up_to_ten_minutes(story):
    warm, _, after = story
    assert after("job_seconds_count", request="sample", strategy="Ulysses 2") == 1
    assert after("step_seconds_count", strategy="Ulysses 2") >= 3 + 1  # finished job, cancelled job
    assert after("step_seconds_bucket", strategy="Ulysses 2", le="600.0") >= 4
    job = {"request": "sample", "strategy": "Ulysses 2"}
    model = {"model": "a private name.safetensors"}
    done = warm("device_seconds_total", **job, **model, result="done")
    assert done == pytest.approx(2 * warm("job_seconds_sum", **job))
    assert warm("device_seconds_total", **job, **model, result="cancelled") > 0
    assert after("device_seconds_total", **job, **model, result="failed") > 0
    assert warm("images_total", **job, **model) == 1
    assert 0 < after("cancel_seconds_sum") < 600 and after("cancel_seconds_count") == 1


def test_failures_have_a_device_and_a_reason_and_what_never_happened_stands_at_0(story):
    _, _, after = story
    assert after("rank_failures_total", device="cpu:1", reason="signal") == 1
    assert after("rank_failures_total", device="cpu:0", reason="signal") == 1  # killed while idle
    assert after("rank_failures_total", device="cpu:1", reason="hang") == 0
    assert after("restarts_total", devices="cpu:0,cpu:1") == 1 and after("start_seconds_count") == 2
    assert after("load_seconds_count") == 2 and after("loaded_bytes_total") == 2 * 4


def test_states_memory_and_bytes_are_those_of_the_moment(story):
    warm, _, after = story
    assert [scrape.states() for scrape in story] == [{"ready"}, {"failed"}, {"down"}]
    assert warm("group_state", devices="cpu:0,cpu:1", state="broken") == 0
    assert warm("device_memory_bytes", device="cpu:1", kind="working") > 0
    assert warm("device_memory_bytes", device="cpu:1", kind="weights") == 0  # a scripted model has none
    assert warm("sent_bytes_total", device="cpu:0") >= 0
    assert after("device_memory_bytes", device="cpu:1", kind="working") is None
    assert [scrape("held_models", devices="cpu:0,cpu:1") for scrape in (warm, after)] == [1, 0]


def test_each_device_has_its_gauges_and_the_cpu_which_ranks_share_nothing():
    """The second card does not measure its power."""
    group = GroupStatus(("cuda:0", "cuda:1", "cpu:0"), "down", "", None, (), 0, 0, (), ())
    gauges = {"cuda:0": CARD, "cuda:1": replace(CARD, power=None), "cpu:0": replace(CARD, shared=True)}
    scrape = Scrape(Metrics(lambda: [group], lambda devices: gauges).text())
    for name, values in (
        ("utilization_ratio", [0.2, 0.2, None]),
        ("temperature_celsius", [41, 41, None]),
        ("power_watts", [250.5, None, None]),
        ("memory_free_bytes", [40 * GIB, 40 * GIB, None]),
        ("memory_total_bytes", [48 * GIB, 48 * GIB, None]),
    ):
        assert [scrape(f"device_{name}", device=device) for device in group.devices] == values


def test_the_build_is_named_and_only_what_costs_names_a_model(story):
    tomllib = pytest.importorskip("tomllib")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert pack_version() == version and pack_version(Path("nowhere.toml")) == "unknown"
    builds = [f for f in story[2].families if f.name == PREFIX + "build_info"]
    assert builds[0].samples[0].labels["version"] == version
    labels = [one.labels for family in story[2].families for one in family.samples]
    assert "private name" not in repr([one | {"model": ""} for one in labels]) and "/" not in repr(labels)


def test_shares_of_any_number_make_one_label_and_a_decode_has_its_own():
    shares = [ParallelStrategy(ulysses_degree=2, device_shares=(1, share)) for share in (1.5, 2.5)]
    scrape = scrape_after(
        *(Stepped(("a", "b"), 1, 1, 0.3, strategy) for strategy in shares),
        RequestEnded(("a", "b"), "decode", "done", 0.5, None, None, None, 4),
        RequestEnded(("a", "b"), "sample", "refused", 0.0, None, None, None, 0),
    )
    assert scrape("step_seconds_count", strategy="Ulysses 2, unequal shares") == 2
    decode = {"request": "decode", "strategy": "rows 2", "model": "vae"}
    assert scrape("images_total", **decode) == 4
    assert scrape("device_seconds_total", **decode, result="done") == 1.0
    assert scrape("jobs_total", request="sample", result="refused") == 1


def test_waiting_is_counted_with_the_request_that_ends_it_and_with_the_end_of_the_ranks(story):
    _, dead, after = story
    assert dead("idle_device_seconds_total", devices="cpu:0,cpu:1") > 0
    ended = RequestEnded(("a", "b"), "decode", "done", 0.5, None, None, None, 4, idle_s=3.0)
    scrape = scrape_after(ended, Released(("a", "b"), 4.0), price=2.5)
    assert scrape("idle_device_seconds_total", devices="a,b") == 14.0
    assert scrape("price_per_device_hour") == 2.5 and after("price_per_device_hour") == 0


def test_models_without_end_make_no_labels_without_end():
    one = ParallelStrategy()
    names = ["x" * 200, *range(1, MOST_MODELS + 5)]
    specs = [ModelSpec(f"/models/{name}.safetensors") for name in names]
    scrape = scrape_after(
        *(RequestEnded(("a",), "sample", "done", 1.0, None, None, one, 1, spec) for spec in specs)
    )
    job = {"request": "sample", "strategy": one.describe()}
    assert scrape("images_total", **job, model="other") == 5
    assert scrape("images_total", **job, model="x" * 80) == 1
    assert scrape("images_total", **job, model="7.safetensors") == 1


# The dashboard and the page.


def _expressions() -> list[tuple[str, dict]]:
    """Returns (panel title, target) of every query in the dashboard."""
    return [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def _read(expression: str) -> list[promql_parser.Expr]:
    nodes: list[promql_parser.Expr] = []
    plain = expression.replace("$__rate_interval", "5m").replace("$__range", "1h")
    promql_parser.walk(promql_parser.parse(plain), lambda node: nodes.append(node))
    return nodes


def _metrics_in(expression: str) -> set[str]:
    return {node.name for node in _read(expression) if isinstance(node, promql_parser.VectorSelector)}


def test_every_expression_of_the_dashboard_uses_metrics_and_labels_that_exist(story):
    scrape = story[0]
    for title, target in _expressions():
        nodes, names = _read(target["expr"]), _metrics_in(target["expr"])
        assert names and names <= scrape.names, title
        labels = set().union(*(scrape.labels(name) for name in names))
        used = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        for node in nodes:
            if isinstance(node, promql_parser.VectorSelector):
                used |= {matcher.name for matcher in node.matchers.matchers}
            elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                used |= set(node.modifier.labels)
        assert used - {"job", "instance"} <= labels, title


def test_the_dashboard_and_the_page_know_every_metric_and_the_page_no_other(story):
    suffix = re.compile(r"_(bucket|sum|count)$")  # of histograms
    samples = [(family.type, one.name) for family in story[0].families for one in family.samples]
    bases = {suffix.sub("", name) if kind == "histogram" else name for kind, name in samples}
    shown = {suffix.sub("", name) for _, t in _expressions() for name in _metrics_in(t["expr"])}
    assert bases - shown == set()
    assert set(re.findall(rf"`({PREFIX}\w+)", PAGE)) == bases


def test_the_page_explains_every_reason_of_a_failure():
    assert set(re.findall(r"^\| `(\w+)` \| \w", PAGE, re.MULTILINE)) >= set(FAILURES)
    assert from_wire(RANK_CRASHED, "AcceleratorError: CUDA error", 1).reason == "device"


def test_the_dashboard_can_be_imported_anywhere_and_its_panels_do_not_overlap():
    (source,) = [v for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource"]
    assert source["query"] == "prometheus" and DASHBOARD.get("id") is None
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}, panel[
                "title"
            ]
            assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"], panel["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_listener_may_ask_for_all_sidecars_while_one_is_stopped(no_leaks, monkeypatch):
    """The pool holds its lock while it ends a group, and so while it calls the listeners."""
    monkeypatch.setattr(pool, "_sidecars", {})
    seen = []
    stop = listen(lambda event: seen.append(pool.all_sidecars()))
    try:
        pool.get_sidecar(("cpu:0",))
        other = pool.get_sidecar(("cpu:0", "cpu:1"))
    finally:
        stop()
        pool.stop_all()
    assert seen and other.devices == ("cpu:0", "cpu:1")

"""exchange_dtype fp8 in the real ComfyUI gives nearly the stock latent, and the report explains the approximation."""

from __future__ import annotations

from any_graphs import AnyGraph
from any_runs import latents
from differences import relative_difference

ROUNDED = "result: approximate (exchange_dtype fp8 rounds what devices send each other; same is exact)"


def _both(comfy, kind, **choice):
    """Returns (the largest difference from the stock latent, relative to its largest value; the report)."""
    graph = AnyGraph(comfy, kind)
    stock, request, options = graph.stock(), graph.request(), {"steps": 3, "cfg": 1.0}
    sampler = graph.parallel_sampler(
        [graph.parallel(stock, exchange_dtype="fp8", **choice), 1], *request, **options
    )
    ways = {"stock": graph.ksampler(stock, *request, **options), "ours": sampler}
    found = latents(comfy, graph, ways, {"report": [sampler[0], 1]})
    return relative_difference(found["ours"], found["stock"]), found["report"]


def test_the_latent_is_near_stocks_and_the_report_says_that_it_is_not_the_same(comfy):
    difference, report = _both(comfy, "wan_t2v", ulysses=2)
    assert 1e-5 < difference < 0.1
    assert ROUNDED in report and "note: what devices sent each other for attention was rounded" in report


def test_a_strategy_that_shares_out_no_tokens_is_exact_and_says_that_nothing_was_rounded(comfy):
    difference, report = _both(comfy, "flux", devices="cpu:1")
    assert difference <= 1e-5
    assert "result: exact" in report and "note: exchange_dtype fp8 had nothing to do: no tokens" in report

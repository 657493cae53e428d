"""The validation against published measurements: what it reads and holds out, and that shipped numbers are its."""

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fit  # noqa: E402
import published  # noqa: E402
import selector as benchmark  # noqa: E402

from parallel_backend.planner.cost.model import DEFAULT  # noqa: E402
from parallel_backend.planner.ranking import BAND_WITH_ONE_GPU, BAND_WITHOUT  # noqa: E402

KEYS = {
    "groups",
    "within_5pct",
    "mean_regret",
    "worst_regret",
    "rule_mean_regret",
    "speedup_error_median",
    "speedup_error_p90",
}


@pytest.fixture(scope="module")
def rows():
    return published.read_rows(published.DATA)[0]


@pytest.fixture(scope="module")
def fitted(rows):
    return benchmark.constants_without(rows)


def _write(path, records):
    with published.DATA.open(newline="") as file:
        names = csv.DictReader(file).fieldnames
    base = {
        "source": "elsewhere", "model": "flux1", "gpu": "L40", "interconnect": "pcie", "resolution": "1024x1024",
        "frames": "1", "steps": "28", "cfg": "1", "ulysses": "1", "ring": "1", "pipefusion": "1", "tp": "1",
        "mode": "eager", "measure": "e2e", "true_cfg": "1", "ring_impl": "p2p", "n_gpus": "1", "url": "x",
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({**base, **record} for record in records)
    return path


def test_every_row_is_used_or_said_why_not(rows):
    with published.DATA.open(newline="") as file:
        count = sum(1 for _ in csv.DictReader(file))
    left_out = published.read_rows(published.DATA)[1]
    assert len(rows) + len(left_out) == count == 188
    assert all("split" in line for line in left_out)


def test_every_published_row_keeps_its_source():
    with published.DATA.open(newline="") as file:
        records = list(csv.DictReader(file))
    assert all(r["url"] or r["verified"] == "given" for r in records)


def test_rows_of_one_project_are_held_out_together(rows):
    families = {row.source: row.family_of_source for row in rows}
    assert (
        families["xdit-docs/flux"]
        == families["xdit-issue416"]
        == families["xdit-docs/flux@bf5e294"]
        == "xdit"
    )
    assert families["sglang-pr19673"] == families["sglang-ci"] == "sglang"
    assert families["para-attn"] != families["cache-dit"]


def test_a_source_does_not_influence_its_own_constants(rows):
    """Three times the times of a source's multi-device rows leave the constants it is judged with as they were."""

    def without(family):  # by itself: the benchmark fits for every family at once, which takes long
        return fit.fit([row for row in plain if row.family_of_source != family])

    bent = [
        replace(row, seconds=row.seconds * 3) if row.family_of_source == "para-attn" and row.gpus > 1 else row
        for row in rows
        if row.seconds
    ]
    plain = [row for row in rows if row.seconds]
    constants = benchmark.constants_without(bent)
    assert constants["para-attn"] == without("para-attn")
    assert constants["cache-dit"] != without("cache-dit")


def test_the_choice_is_never_much_worse_than_the_rule(rows, fitted):
    for group in published.find_groups(rows):
        outcome = benchmark.choose(group, fitted[group.rows[0].family_of_source])
        assert outcome.regret <= outcome.rule_regret + 0.05, (group.source, outcome.chosen.strategy)


def test_the_shipped_bands_cover_nine_of_ten_errors(rows, fitted):
    speedups = benchmark.predict_speedups(rows, fitted)
    assert benchmark.quantile([s.error for s in speedups], 0.9) <= BAND_WITH_ONE_GPU
    assert benchmark.quantile(benchmark.one_gpu_errors(rows, fitted), 0.9) <= BAND_WITHOUT


def test_the_shipped_constants_are_the_fitted_ones(rows):
    found = fit.fit(rows)
    for name, value in vars(DEFAULT).items():
        assert value == pytest.approx(getattr(found, name), rel=0.05), name


def test_quantile_is_the_smallest_value_that_covers_the_share():
    assert benchmark.quantile([3, 1, 2, 4, 5, 6, 7, 8, 9, 10], 0.9) == 9
    assert benchmark.quantile([1.0], 0.9) == 1.0


def test_a_new_file_is_judged_and_reported_as_one_json_object(tmp_path):
    """One and two devices, a run that has no time because memory ran out, and one whose split is not stated."""
    path = _write(
        tmp_path / "new.csv",
        [
            {"latency_s": "15", "speedup": "1"},
            {"latency_s": "8.4", "n_gpus": "2", "ulysses": "2"},
            {"latency_s": "8.9", "n_gpus": "2", "ring": "2"},
            {"latency_s": "", "speedup": "", "n_gpus": "2", "tp": "2", "note": "OOM"},
            {"latency_s": "5", "n_gpus": "4", "ulysses": "0"},
        ],
    )
    done = subprocess.run(
        [sys.executable, "benchmarks/selector.py", "--data", str(path), "--details", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) == KEYS
    assert result["groups"] == 1 and result["mean_regret"] == 0.0 and result["within_5pct"] == 1.0
    assert "1 rows are left out" in done.stdout


def test_what_ran_out_of_memory_is_a_candidate_and_not_chosen(tmp_path):
    """Flux in bf16 needs 24 GB for its weights alone: whole on a 24 GB card it was tried and failed."""
    path = _write(
        tmp_path / "memory.csv",
        [
            {"gpu": "RTX4090", "note": "OOM", "n_gpus": "2", "ulysses": "2"},
            {"gpu": "RTX4090", "latency_s": "20", "n_gpus": "2", "tp": "2"},
        ],
    )
    (group,) = published.find_groups(published.read_rows(path)[0])
    outcome = benchmark.choose(group, DEFAULT)
    assert outcome.chosen.strategy.tensor_degree == 2 and outcome.regret == 0
    assert outcome.rule.failed and outcome.rule_regret == benchmark.FAILED


def test_only_speedups_are_enough_to_rank(tmp_path):
    path = _write(
        tmp_path / "ratios.csv",
        [
            {"speedup": "1.9", "n_gpus": "2", "cfg": "2", "true_cfg": "2"},
            {"speedup": "1.6", "n_gpus": "2", "ulysses": "2", "true_cfg": "2"},
        ],
    )
    rows, _ = published.read_rows(path)
    (group,) = published.find_groups(rows)
    outcome = benchmark.choose(group, DEFAULT)
    assert outcome.best.strategy.cfg_degree == 2 and outcome.regret == 0
    assert outcome.group.contested


def test_an_empty_file_gives_an_empty_result(tmp_path):
    rows, _ = published.read_rows(_write(tmp_path / "none.csv", []))
    assert benchmark.summary([], []) == {"groups": 0, **{k: None for k in KEYS - {"groups"}}} and rows == []

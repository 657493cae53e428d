"""The selection rule against published measurements: the rows that are read, the choice, and the report."""

import csv
import json

import published
import pytest
import selector as benchmark

KEYS = {"groups", "within_5pct", "mean_regret", "worst_regret", "rule_mean_regret"}


@pytest.fixture(scope="module")
def rows():
    return published.read_rows(published.DATA)[0]


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


def test_every_row_is_used_or_said_why_not_and_keeps_its_source(rows):
    with published.DATA.open(newline="") as file:
        records = list(csv.DictReader(file))
    left_out = published.read_rows(published.DATA)[1]
    assert len(rows) + len(left_out) == len(records) == 188
    assert all("split" in line for line in left_out)
    assert all(record["url"] or record["verified"] == "given" for record in records)


def test_the_choice_is_never_worse_than_the_rule(rows):
    for group in published.find_groups(rows):
        outcome = benchmark.choose(group)
        assert outcome.regret <= outcome.rule_regret, (group.source, outcome.chosen.strategy)


def test_a_new_file_is_judged_and_reported_as_one_json_object(tmp_path, monkeypatch, capsys):
    """The file has runs on 1, 2 and 4 devices: one has no time because memory ran out, one does not state its split."""
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
    monkeypatch.setattr("sys.argv", ["selector.py", "--data", str(path), "--details", "--json"])
    benchmark.main()
    said = capsys.readouterr().out
    result = json.loads(said.splitlines()[-1])
    assert set(result) == KEYS
    assert result["groups"] == 1 and result["mean_regret"] == 0.0 and result["within_5pct"] == 1.0
    assert "1 rows are left out" in said


def test_what_ran_out_of_memory_is_a_candidate_and_not_chosen(tmp_path):
    """In bf16 Flux needs 24 GB for its weights alone: a run with all weights on a 24 GB card was tried and failed."""
    path = _write(
        tmp_path / "memory.csv",
        [
            {"gpu": "RTX4090", "note": "OOM", "n_gpus": "2", "ulysses": "2"},
            {"gpu": "RTX4090", "latency_s": "20", "n_gpus": "2", "tp": "2"},
        ],
    )
    (group,) = published.find_groups(published.read_rows(path)[0])
    outcome = benchmark.choose(group)
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
    outcome = benchmark.choose(group)
    assert outcome.best.strategy.cfg_degree == 2 and outcome.regret == 0
    assert outcome.group.contested


def test_an_empty_file_gives_an_empty_result(tmp_path):
    rows, _ = published.read_rows(_write(tmp_path / "none.csv", []))
    assert benchmark.summary([]) == {"groups": 0, **{k: None for k in KEYS - {"groups"}}} and rows == []

"""Shared results: a written file can be read again, a wrong one is refused with its fault, and the page shows them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import draw_results
from parallel_backend.__main__ import main
from parallel_backend.commands.bench import measure
from parallel_backend.commands.bench.report import BenchResult, StrategyRow
from parallel_backend.commands.bench.shared import read_shared, share
from parallel_backend.commands.gpu_check import run as gpu_check
from parallel_backend.commands.gpu_check.run import GpuReport
from parallel_backend.errors import RequestError
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux

ONE, ULYSSES, PIPE = (
    StrategyRow(ParallelStrategy(), "native", (2.0, 2.25, 2.5)),
    StrategyRow(ParallelStrategy(ulysses_degree=2), "native", (1.0, 1.25, 1.5), difference=1e-6),
    StrategyRow(ParallelStrategy(pipefusion_degree=2), "native", (0.5,), difference=0.1),
)
OUTCOME = BenchResult(
    rows=(ONE, ULYSSES, PIPE, StrategyRow(ParallelStrategy(ring_degree=2), problem="out of memory")),
    model="Flux.1, bfloat16, 24 GB",
    request="1024x1024, CFG, 512 text tokens, 4 steps a run",
    hardware=("2 × NVIDIA Mystery 1 (24 GiB), slowest path PCIe", "16 cores (A CPU)"),
    software=("python 3.11.7", "driver 999.0", "torch 2.13.0"),
    rounds=3,
    interleaved=True,
    links=("Ulysses 2 (nccl), all-to-all 9 GB/s a process",),
)


def shared(tmp_path: Path, outcome: BenchResult = OUTCOME) -> dict:
    path = tmp_path / "result.json"
    share(outcome, path)
    return json.loads(path.read_text())


def test_what_ran_is_shared_with_its_machine_and_times(tmp_path):
    shared(tmp_path)
    result = read_shared((tmp_path / "result.json").read_text())
    assert (result.model, result.hardware, result.links) == (OUTCOME.model, OUTCOME.hardware, OUTCOME.links)
    assert [(one.name, one.least_s, one.step_s, one.most_s) for one in result.strategies] == [
        ("one device", 2.0, 2.25, 2.5),
        ("Ulysses 2", 1.0, 1.25, 1.5),
        ("PipeFusion 2 ≈", 0.5, 0.5, 0.5),
    ]
    assert result.one_s == 2.25 and result.strategies[1].difference == 1e-6


def test_nothing_that_ran_is_nothing_to_share(tmp_path):
    with pytest.raises(RequestError, match="no strategy ran"):
        share(replace(OUTCOME, rows=OUTCOME.rows[3:]), tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


def test_a_latent_that_is_not_finite_is_reported_and_not_shared(tmp_path):
    wrong = replace(ULYSSES, difference=float("nan"))
    with pytest.raises(RequestError, match="Ulysses 2 gave a latent that is not finite"):
        share(replace(OUTCOME, rows=(ONE, wrong)), tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda result: result.update(format=2), "format 2 is unknown"),
        (lambda result: result.update(date="25.11.2026"), "is no date"),
        (lambda result: result.update(strategies=[]), "has 0 strategies"),
        (lambda result: result.update(prompt="a cat"), "expected the fields"),
        (lambda result: result["hardware"].append("x" * 401), "longer than 400"),
        (lambda result: result["hardware"].extend(["x"] * 64), "lines about the machine"),
        (lambda result: result["strategies"][0].update(least_s=9.0), "out of order"),
        (lambda result: result["strategies"][0].update(least_s=0.0), "took no time"),
        (lambda result: result["strategies"][0].update(step_s="fast"), "expected float"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, change, words):
    result = shared(tmp_path)
    change(result)
    with pytest.raises(RequestError, match=words):
        read_shared(json.dumps(result))
    with pytest.raises(RequestError, match="no result of bench --share"):
        read_shared("[]")


def test_the_page_tells_gpus_from_cpus_and_compares_with_one_device(tmp_path):
    gpus, cpus = tmp_path / "a.json", tmp_path / "b.json"
    share(OUTCOME, gpus)
    share(replace(OUTCOME, hardware=("no GPU, gloo on 2 cores (A | CPU)",)), cpus)
    _, on_gpus, on_cpus = re.split(r"^## (?:GPUs|CPUs.*)$", draw_results.page([gpus, cpus]), flags=re.M)
    assert "| 2.25 | Ulysses 2 | 1.80 | 1 to 1.5 | 1e-06 |" in on_gpus
    machine = "16 cores (A CPU); Ulysses 2 (nccl), all-to-all 9 GB/s a process; driver 999.0; torch 2.13.0 |"
    assert "](results/a.json): 2 × NVIDIA Mystery 1 (24 GiB), slowest path PCIe; " + machine in on_gpus
    assert "gloo on 2 cores (A / CPU)" in on_cpus and "Mystery" not in on_cpus
    assert "None yet." in draw_results.page([cpus]).split("## CPUs")[0]


def test_the_results_that_lie_here_are_on_the_page_and_name_no_path_and_nobody():
    files = sorted(draw_results.RESULTS.glob("*.json"))
    assert files, "the project's own runs lie there"
    assert draw_results.page(files) == draw_results.PAGE.read_text(), "run scripts/draw_results.py"
    for file in files:
        text = file.read_text()
        assert not re.search(r"/(home|root|mnt|Users|tmp)\b|\\\\|@|\.safetensors", text), file.name


def test_bench_shares_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "measure", lambda **asked: OUTCOME)
    model = write_tiny_flux(tmp_path / "tiny.safetensors")
    path, bench = tmp_path / "result.json", ["bench", "--model", str(model), "--out", str(tmp_path / "out")]
    assert main([*bench, "--share", str(path)]) == 0
    assert read_shared(path.read_text()).model == OUTCOME.model
    assert main([*bench, "--share", str(tmp_path / "no" / "x.json")]) == 2
    assert "names no file in a folder that exists" in capsys.readouterr().err


def test_the_gpu_check_measures_the_same_pictures_after_its_checks(tmp_path, monkeypatch):
    asked = {}

    def measured(**given):
        asked.update(given)
        return OUTCOME

    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.setattr(gpu_check, "run_checks", lambda *_, **__: GpuReport(("nothing",)))
    path = tmp_path / "result.json"
    options = ["doctor", "--gpu", "--devices", "cpu:2", "--report", str(tmp_path), "--share", str(path)]
    assert main(options) == 0
    assert read_shared(path.read_text()).rounds == OUTCOME.rounds
    assert (asked["devices"], asked["width"], asked["with_cfg"]) == ("cpu:2", 128, True)

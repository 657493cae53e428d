"""`python -m parallel_backend bench`: real strategies on two CPU ranks, the files written, and the inputs refused."""

import getpass
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import fake_nvml
from fault_injection import fault
from jobs import FP8, flux_job
from parallel_backend.__main__ import main
from parallel_backend.commands.bench import measure, report
from parallel_backend.commands.bench.candidates import (
    fit_side_by_side,
    parse_strategies,
    possible_strategies,
    split_by_memory,
)
from parallel_backend.commands.bench.report import BenchResult, StrategyRow, as_text
from parallel_backend.errors import StrategyError
from parallel_backend.machine.fingerprint import device_ids
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.planner.history import MeasurementHistory
from parallel_backend.planner.plan import USABLE_MEMORY
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.fit import Capacity
from parallel_backend.planner.workload.memory import predict_memory
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.cache_folder import VARIABLE
from tiny_flux import write_tiny_flux

ONE, ULYSSES, RING = ParallelStrategy(), ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)
PIPE, CFG = ParallelStrategy(pipefusion_degree=2), ParallelStrategy(cfg_degree=2)
CPUS = tuple(f"cpu:{index}" for index in range(4))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_flux(tmp_path_factory.mktemp("private_models") / "my_secret_finetune.safetensors")


@pytest.fixture(scope="module", autouse=True)
def fonts(tmp_path_factory):
    """Draws a first picture: matplotlib keeps its fonts open from then on, and a test would count that as a leak."""
    if report.can_draw():
        report.draw(outcome(), tmp_path_factory.mktemp("fonts") / "bench.png")


@pytest.fixture
def bench(model, tmp_path, monkeypatch, capsys):
    """Returns a function that runs the command on two CPU ranks and gives (exit status, output, output folder)."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments):
        small = ["--size", "128x96", "--text", "16", "--steps", "2", "--rounds", "2", "--devices", "cpu:2"]
        out = tmp_path / "out"
        status = main(["bench", "--model", str(model), *small, "--out", str(out), *arguments])
        return status, capsys.readouterr(), out

    return run


# A real run.


def test_strategies_are_measured_side_by_side_and_written_to_be_shared(bench, no_leaks, model, tmp_path):
    status, printed, out = bench("--strategies", "one,ulysses2,ring2,cfg2", "--cfg", "on")
    assert status == 0
    outcome = json.loads((out / "bench.json").read_text())
    assert [row["name"] for row in outcome["rows"]] == ["one device", "Ulysses 2", "Ring 2", "CFG 2"]
    for row in outcome["rows"]:
        assert row["problem"] == "" and row["steps_measured"] == 2 and row["step_s"] > 0
        assert row["difference"] <= 1e-5
        assert row["step_s_least"] <= row["step_s"] <= row["step_s_most"]
        assert row["predicted_memory_bytes"] > 0
    one, ulysses, *_ = outcome["rows"]
    assert ulysses["speedup"] == pytest.approx(one["step_s"] / ulysses["step_s"])
    assert one["sent_bytes_per_step"] == 0 < ulysses["sent_bytes_per_step"]
    assert outcome["label"] == "measured" and outcome["interleaved"] and len(outcome["links"]) == 3

    assert printed.out.startswith("MEASURED: Flux.1 dev form, 1+1 blocks of width 256")
    assert "predicted" not in printed.out.lower()
    picture = (out / "bench.png").read_bytes() if report.can_draw() else b""
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") is (out / "bench.png").exists() is report.can_draw()
    written = (out / "bench.json").read_text() + printed.out.partition("Written:")[0]
    for private in (model.name, model.stem, str(tmp_path), socket.gethostname(), str(Path.home())):
        assert private not in written
    assert getpass.getuser() not in written.replace("\n", " ").split()

    # The next choice can use the measurements.
    job = Job(CheckpointModel(inspect_flux(model)), width=128, height=96, text=16, prompts=2, steps=20)
    history = MeasurementHistory(("cpu:0", "cpu:1"), Topology(()))
    assert set(history.steps(job, "native")) == {ONE, ULYSSES, RING, ParallelStrategy(cfg_degree=2)}
    assert history.store.query("SELECT count(*) FROM runs GROUP BY strategy") == [(2,)] * 4


def test_without_matplotlib_it_says_so_and_writes_the_rest(bench, monkeypatch):
    monkeypatch.setattr(report, "can_draw", lambda: False)
    monkeypatch.setattr(measure, "measure", lambda **asked: outcome())
    status, printed, out = bench("--json")
    assert status == 0 and json.loads(printed.out)["rows"][0]["name"] == "one device"
    assert "matplotlib is not installed" in printed.err
    assert [path.name for path in out.iterdir()] == ["bench.json"]


def test_a_strategy_that_fails_costs_only_its_row(bench, no_leaks):
    with fault("raise", "load", rank=0):
        status, printed, out = bench("--strategies", "one,ring2")
    assert status == 1 and not (out / "bench.png").exists()
    rows = json.loads((out / "bench.json").read_text())["rows"]
    assert all("on purpose" in row["problem"] for row in rows)
    assert "did not run" in printed.out and "Nothing ran." in printed.out


def test_what_is_predicted_not_to_fit_is_listed_and_not_started(bench, monkeypatch):
    monkeypatch.setattr("parallel_backend.planner.workload.fit.host_memory", lambda: 1)
    status, printed, out = bench()
    rows = json.loads((out / "bench.json").read_text())["rows"]
    assert status == 1 and rows[0]["name"] == "one device"
    assert all("predicted not to fit" in row["problem"] for row in rows)
    assert "Nothing ran." in printed.out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--size", "big"], "WIDTHxHEIGHT"),
        (["--size", "99999x64"], "at most"),
        (["--steps", "0"], "at least 1"),
        (["--strategies", "warp9"], "not understood"),
        (["--strategies", "cfg2"], "--cfg on"),
        (["--strategies", "data2"], "--batch 2"),
        (["--strategies", "ulysses4"], "needs 4 devices"),
        (["--weight-dtype", "int3"], "weight-dtype"),
        (["--devices", "99"], "99"),
        (["--model", "{}/no-model.safetensors"], "no-model.safetensors"),
        (["--out", "{}/no-model.safetensors/x"], "cannot be made a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(bench, tmp_path, arguments, reason):
    (tmp_path / "no-model.safetensors").write_bytes(b"no")
    status, printed, out = bench(*(word.format(tmp_path) for word in arguments))
    assert status == 2 and reason in printed.err
    assert not (out / "bench.json").exists()


# Which strategies.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one", [ONE]),
        ("one, Ulysses 2,one", [ONE, ULYSSES]),
        ("cfg2xring2", [ParallelStrategy(cfg_degree=2, ring_degree=2)]),
        ("ulysses2 × sharded", [ParallelStrategy(ulysses_degree=2, shard_weights=True)]),
        ("ulysses2xgroups4", [ULYSSES.replace(head_groups=4)]),
        ("ulysses2xtokens", [ULYSSES.replace(sends_tokens=True)]),
    ],
)
def test_strategies_are_read_as_a_person_writes_them(text, expected):
    assert list(parse_strategies(text)) == expected


@pytest.mark.parametrize(
    "text", [",", "ulysses", "ulysses2xulysses2", "2", "ring0", "groups2", "ring2xgroups2"]
)
def test_a_strategy_that_means_nothing_is_refused(text):
    with pytest.raises(StrategyError):
        parse_strategies(text)


def test_all_that_occupy_every_device_are_compared_with_one_device():
    found = possible_strategies(flux_job(), CPUS)
    assert found[0] == ONE and {s.world_size for s in found} == {1, 4}
    assert found[1] == ParallelStrategy(ulysses_degree=4)
    exact = [s.pipefusion_degree == 1 for s in found]
    assert exact == sorted(exact, reverse=True)
    assert {s.world_size for s in possible_strategies(flux_job(), CPUS, fewer=True)} == {1, 2, 3, 4}


def test_on_gpus_exchanges_beside_attention_are_among_them():
    found = possible_strategies(flux_job(), ("cuda:0", "cuda:1"))
    two, four = (ULYSSES.replace(head_groups=groups) for groups in (2, 4))
    assert list(found[:6]) == [ONE, ULYSSES, two, two.replace(sends_tokens=True), four, RING]
    assert all(s == s.plain_exchange for s in possible_strategies(flux_job(), CPUS))


def test_tokens_stay_inside_the_machines_of_a_cluster_unless_a_person_names_them():
    machines = tuple(f"cpu:{index}@lab/{machine}" for machine in "ab" for index in (0, 1))
    found = possible_strategies(flux_job(prompts=2), machines)
    assert CFG.replace(ulysses_degree=2) in found and ParallelStrategy(ulysses_degree=4) not in found
    assert ParallelStrategy(ulysses_degree=4) in possible_strategies(flux_job(prompts=2), CPUS)  # one machine


# Turns, memory, text.


def test_strategies_take_turns_only_where_they_are_predicted_to_fit_side_by_side():
    job, two = flux_job(), ("cuda:0", "cuda:1")

    def peak(strategy):
        return max(memory.private_bytes for memory in predict_memory(job, strategy))

    def fit(strategies, size, used=0, devices=two):
        size = int(size / USABLE_MEMORY) + 1
        return fit_side_by_side(strategies, job, devices, Capacity((size, 2 * size), (used, 0)))

    assert fit_side_by_side((ONE, ULYSSES, PIPE), job, two, Capacity((0, 0)))  # nobody could measure
    both = peak(ONE) + max(peak(ULYSSES), peak(RING))  # Ulysses and Ring share a group
    assert fit((ONE, ULYSSES, RING), both) and not fit((ONE, ULYSSES, RING), both - 2**20)
    assert fit((ULYSSES, RING), both / 2) and not fit((ONE, ULYSSES, PIPE), both)
    assert not fit((ONE, ULYSSES, RING), both, used=2**20)
    assert fit((ONE, ULYSSES, RING), both + 2**20, used=2**20)
    machines = ("cpu:0@lab/a", "cpu:0@lab/b")  # each serves only one group
    assert fit_side_by_side((ULYSSES, RING), job, machines)
    assert not fit_side_by_side((ONE, ULYSSES), job, machines)


def test_groups_of_cpu_processes_share_the_computers_memory():
    job = flux_job()
    each = [memory.private_bytes for s in (ONE, ULYSSES) for memory in predict_memory(job, s, on_cpu=True)]
    enough = int(sum(each) / USABLE_MEMORY) + 1
    assert fit_side_by_side((ONE, ULYSSES), job, CPUS[:2], Capacity((enough,)))
    assert not fit_side_by_side((ONE, ULYSSES), job, CPUS[:2], Capacity((enough - 2**20,)))


def test_what_does_not_fit_is_left_out_and_tried_with_sharded_weights():
    sizes, devices = Capacity((23 * 2**30,) * 2), ("cuda:0", "cuda:1")
    sharded = ULYSSES.replace(shard_weights=True)
    run, left_out = split_by_memory((ONE, ULYSSES, PIPE), flux_job(), devices, sizes)
    assert run == [sharded, PIPE] and set(left_out) == {ONE, ULYSSES}
    assert all("predicted not to fit: 2" in reason for reason in left_out.values())
    assert split_by_memory((ONE, ULYSSES, PIPE), flux_job(FP8), devices, sizes) == ([ONE, ULYSSES, PIPE], {})


def outcome(*rows, **changes):
    rows = rows or (
        StrategyRow(ONE, "native", (1.0, 1.2, 0.8), difference=0.0),
        StrategyRow(ULYSSES, "native", (0.6, 0.6, 0.7), difference=1e-6, sent_bytes=2**21),
        StrategyRow(PIPE, "native", (0.5, 0.5, 0.5), difference=2e-2),
        StrategyRow(RING, problem="process 1 ran out of memory"),
    )
    base = BenchResult(tuple(rows), "Flux.1", "1024x1024", ("2 × card",), ("torch 2.13",), 3, True)
    return replace(base, **changes)


def test_the_text_says_what_is_fastest_what_is_approximate_and_what_did_not_run():
    text = as_text(outcome())
    assert max(map(len, text.splitlines())) <= 100
    assert "→ Ulysses 2" in text and "1.67x" in text and "2.0" in text
    assert "PipeFusion 2 ≈ is faster still, but approximate" in text
    assert "did not run: process 1 ran out of memory" in text
    assert "differ from one device's by 1.0e-06" in text


def test_latents_are_compared_with_the_first_strategy_that_ran():
    failed = outcome(
        StrategyRow(ONE, problem="process 0 ran out of memory"),
        StrategyRow(ULYSSES, "native", (0.6,), difference=0.0),
        StrategyRow(RING, "native", (0.7,), difference=3e-6),
    )
    assert "Latents of exact strategies differ from Ulysses 2's by 3.0e-06" in as_text(failed)
    assert failed.as_dict()["reference"] == "Ulysses 2"


def test_it_says_one_device_when_that_is_true():
    slower = outcome(
        StrategyRow(ONE, "native", (0.5,)), StrategyRow(ULYSSES, "native", (0.6,)), interleaved=False
    )
    text = as_text(slower)
    assert "One device is the fastest here" in text and "one after the other" in text
    assert slower.as_dict()["best"] == "one device"


def test_device_ids_are_uuids_where_they_are_known(tmp_path):
    box = read_topology(fake_nvml.two_4090(), sys_root=tmp_path)
    assert device_ids(("cuda:1", "cuda:0"), box) == (box.devices[1].uuid, box.devices[0].uuid)
    assert device_ids(("cpu:0", "cuda:7"), box) == ("cpu:0", "cuda:7")


def test_what_it_ran_on_is_told_also_of_gpus_that_nvml_does_not_know(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    told = measure._hardware(Topology(()), ("cuda:0", "cuda:1"))
    assert told[0] == "2 GPUs, of which nobody tells more" and "cores" in told[1]

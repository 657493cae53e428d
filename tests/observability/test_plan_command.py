"""`python -m parallel_backend plan`: sheets and bounds, labelled so, as a table and as JSON, and clear refusals."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = ["--gpus", "4", "--link", "pcie4", "--card", "rtx4090"]
ASKED = ["plan", "--model", "flux1-dev", *HARDWARE, "--size", "1024x1024", "--steps", "28"]


def _json(capsys, *more):
    assert main([*ASKED, "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_runs_as_a_module_without_torch_or_a_gpu():
    code = (
        "import sys; sys.modules['torch'] = None; from parallel_backend.__main__ import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *ASKED], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "COMPUTED from sizes and data sheets, not measured: flux1-dev, 1024x1024, 28 steps"
    )
    assert "74.4 TFLOP a step (59.5 in linear layers, 14.9 in attention)" in done.stdout
    assert "A bound is no prediction" in done.stdout and "does not fit" in done.stdout
    assert "±" not in done.stdout and "predicted" not in done.stdout.lower()


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "parallel_backend", *ASKED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and done.stdout.startswith("COMPUTED")


def test_json_has_the_sheet_of_each_candidate_and_calls_the_bound_one(capsys):
    plan = _json(capsys, "--weights", "fp8")
    assert plan["label"] == "computed" and "no prediction" in plan["bound"]
    assert plan["tflop_per_step"] == pytest.approx(74.36, abs=0.01)
    first = plan["candidates"][0]
    assert first["name"] == plan["chosen"] == "Ulysses 4" and first["fits"]
    assert first["tflop_per_gpu"] == pytest.approx(74.36 / 4, abs=0.01)
    assert first["gb_sent_per_gpu"] == pytest.approx(57 * 3 * 4608 / 4 * 3072 * 2 / 1e9, rel=1e-3)
    one = plan["candidates"][-1]
    assert one["name"] == "one device" and one["gb_sent_per_gpu"] == 0
    assert one["step_s_at_least"] == pytest.approx(74.36e12 / (2 * 165.2e12), rel=1e-3)
    assert not any("predicted" in key for row in plan["candidates"] for key in row)


def test_what_this_version_cannot_run_is_marked(capsys):
    rows = _json(capsys, "--rows", "100")["candidates"]
    kinds = {(row["strategy"]["tensor_degree"] > 1, row["strategy"]["pipefusion_degree"] > 1) for row in rows}
    assert {(True, False), (False, True)} <= kinds and any(row["shard_weights"] for row in rows)
    assert all(row["available"] for row in rows)
    main(["plan", "--model", "wan14b", "--gpus", "2", "--link", "nvlink", "--card", "h100", "--json"])
    others = json.loads(capsys.readouterr().out)["candidates"]
    assert not any(row["available"] for row in others)
    main(["plan", "--model", "wan14b", "--gpus", "2", "--link", "nvlink", "--card", "h100"])
    assert "not in this version of the pack" in capsys.readouterr().out


def test_approximation_and_memory_are_asked_for(capsys):
    assert _json(capsys, "--memory", "40")["chosen"] == "Ulysses 4"
    tight = _json(capsys, "--memory", "10", "--approximation", "never")
    assert all(row["exact"] for row in tight["candidates"] if row["permitted"] and row["fits"])


def test_videos_and_cfg_change_the_work(capsys):
    hardware = ["--gpus", "2", "--link", "nvlink", "--card", "h100"]
    main(["plan", "--model", "wan14b", *hardware, "--frames", "17", "--json"])
    short = json.loads(capsys.readouterr().out)
    main(["plan", "--model", "wan14b", *hardware, "--frames", "17", "--cfg", "off", "--json"])
    without = json.loads(capsys.readouterr().out)
    assert short["chosen"] == "CFG 2" and without["chosen"] == "Ulysses 2"
    assert short["tflop_per_step"] == pytest.approx(2 * without["tflop_per_step"], rel=1e-3)


def test_over_machines_tokens_stay_inside_and_the_network_bounds_the_rest(capsys):
    enough = ["--rows", "100", "--memory", "40"]
    machines = ["--machines", "2", *enough]
    one = _json(capsys, *enough)
    image = _json(capsys, *machines, "--network", "100")
    assert one["chosen"] == "Ulysses 4" and one["machines"] == 1
    assert image["chosen"] == "Ulysses 2" and image["machines"] == 2
    names = {row["name"] for row in image["candidates"]}
    assert "Ulysses 4" not in names and "PipeFusion 2 × Ulysses 2" in names
    assert not any(row["gb_between_machines"] for row in one["candidates"])

    fast = _json(capsys, *machines, "--cfg", "on", "--network", "100")
    slow = _json(capsys, *machines, "--cfg", "on", "--network", "0.0001")
    assert fast["chosen"] == slow["chosen"] == "CFG 2 × Ulysses 2"
    best, slowed = fast["candidates"][0], slow["candidates"][0]
    latent, tokens = 4096 * 64 * 4, (4096 + 512) * 3072 * 2  # float32, bfloat16
    assert best["gb_between_machines"] == pytest.approx(latent / 1e9, abs=1e-4)
    assert slowed["step_s_at_least"] == pytest.approx(latent / (0.0001e9 / 8), rel=1e-3)
    assert best["step_s_at_least"] < 1 < slowed["step_s_at_least"]
    inside = next(row for row in slow["candidates"] if row["name"] == "Ulysses 2")
    assert inside["gb_between_machines"] == 0 and inside["step_s_at_least"] < 1
    across = {
        row["name"]: row["gb_between_machines"] for row in slow["candidates"] if not row["shard_weights"]
    }
    assert across["PipeFusion 4"] == pytest.approx(tokens * 2 / 1e9, rel=1e-3)  # two rows
    assert across["CFG 2 × PipeFusion 2"] == pytest.approx(latent / 1e9, abs=1e-4)  # stages are inside


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--model", "flux9"), "known are .*flux1-dev"),
        (("--card", "rtx1"), "known are .*rtx4090"),
        (("--link", "wifi"), "known are .*pcie4"),
        (("--link", "nvlink"), "rtx4090 has no NVLink"),
        (("--size", "big"), "WIDTHxHEIGHT"),
        (("--gpus", "0"), "1 to 64"),
        (("--steps", "0"), "at least 1"),
        (("--frames", "9"), "makes images"),
        (("--memory", "-1"), "above 0"),
        (("--machines", "3", "--network", "10"), "4 cards do not divide"),
        (("--machines", "2"), "give the Gbit/s"),
        (("--network", "10"), "give --machines 2"),
    ],
)
def test_what_it_does_not_know_is_refused_with_what_it_knows(capsys, change, said):
    assert main([*ASKED, *change]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and re.search(said, captured.err)

"""The GPU check's list and report: every check is there, none can end the doctor, and nothing private is reported."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_backend.__main__ import main
from parallel_backend.commands.gpu_check import __main__ as with_ranks
from parallel_backend.commands.gpu_check import processes
from parallel_backend.commands.gpu_check.checks import Check
from parallel_backend.commands.gpu_check.run import CheckResult, GpuReport, choose, make_subject, run_checks
from parallel_backend.errors import RequestError
from parallel_backend.rank.checks import gpu as as_rank
from parallel_backend.wire import deadlines
from parallel_backend.wire.checks.findings import Finding

# No supervisor starts ranks here, so the process from which tests fork them need not be prepared: that takes long.
pytestmark = [pytest.mark.real_start, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.support.check_program"
CPU = ("cpu:0", "cpu:1")
# The checks that an audit requires in the first minutes on a GPU, in its order.
LIST = (
    *("installation", "device", "attention", "identity", "checkpoint", "steps", "syncs", "same bits"),
    *("fp8", "offload", "sleep", "comfyui", "links", "strategies"),
    *("pipefusion 1 2", "pipefusion 1 6", "pipefusion 0 2", "pipefusion 0 6"),
    *("one process", "cancel", "kill", "out of memory", "profile"),
)


def _run(*checks, subject=None, **wishes):
    chosen = choose((), {"Ends": checks})
    return run_checks(subject or make_subject(CPU), chosen, programs=(PROGRAM, PROGRAM), **wishes)


# The list.


def test_the_list_is_the_audits_in_its_order():
    assert [check.name for _, check in choose(())] == list(LIST)


def test_each_check_is_known_to_the_program_that_runs_it():
    subject = make_subject(("cpu:0",))
    with_them, by_them = with_ranks.make_checks(subject, 0, ""), as_rank.make_checks(subject, 0, "")
    for _, check in choose(()):
        assert check.name in (by_them if check.examine is None else with_them)


@pytest.mark.parametrize(
    ("devices", "skipped"),
    [
        (CPU, {"identity"}),
        (("cpu:0",), {"identity", "links", "strategies", "one process"}),
        (("cuda:0",), {"links", "strategies", "one process"}),
        (("cuda:0", "cuda:1", "cuda:2"), set()),
    ],
)
def test_a_check_says_why_it_does_not_fit_the_devices(devices, skipped):
    reasons = {check.name: check.why_not(make_subject(devices)) for _, check in choose(())}
    pipes = {name for name in reasons if name.startswith("pipefusion")} if len(devices) == 1 else set()
    assert {name for name, reason in reasons.items() if reason} == skipped | pipes
    assert "no GPU" in reasons["identity"] or devices[0].startswith("cuda")


def test_gpus_get_users_sizes_and_the_cpu_small_ones():
    gpu, cpu = make_subject(("cuda:0",)), make_subject(CPU)
    assert (gpu.pixels, gpu.attention_tokens, gpu.pipe_limit_s) == (1024, 4608, 60.0) and gpu.on_gpus
    assert cpu.pixels == 128 and not cpu.on_gpus and cpu.is_demo
    for subject in (gpu, cpu):
        assert all(side // 8 % 2 for side in subject.odd_pixels) and Path(subject.model).is_file()


def test_checks_are_chosen_by_name_or_group():
    assert [c.name for _, c in choose(("Faults", "device"))] == ["device", "cancel", "kill", "out of memory"]
    with pytest.raises(RequestError, match="'nonsense' is no check; choose from installation"):
        choose(("nonsense",))


# Checks that end badly.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("crash", "killed by SIGKILL"),
        ("leave", "exited with code 7"),
        ("hang", "did not end within 1 s"),
        ("garbage", "gave no answer"),
        ("raises", "out of luck"),
    ],
)
def test_a_check_that_ends_badly_is_a_finding_and_the_next_one_runs_in_a_new_process(
    name, words, no_leaks, monkeypatch
):
    monkeypatch.setattr(deadlines, "STACK", 3600.0)  # nobody waits so long for a stack that has been written
    limits = [("pid", 120.0), ("pid", 120.0), (name, 1.0 if name == "hang" else 120.0), ("pid", 120.0)]
    checks = (Check(n, examine=lambda ranks: (), limit_s=limit) for n, limit in limits)
    report = _run(*checks)
    first, again, ended, after = (result.verdicts[0] for result in report.results)
    assert (first.status, again.status, ended.status, after.status) == ("ok", "ok", "broken", "ok")
    assert words in ended.finding and ended.name == name
    assert any(line.endswith(" in hang") for line in ended.details) == (name == "hang")
    assert first.finding == again.finding != after.finding
    assert report.exit_status == 1 and "3 ok, 1 broken" in report.summary


def test_where_one_rank_dies_the_others_are_not_waited_for(no_leaks):
    (result,) = _run(Check("other_rank_dies", ranks=2, limit_s=240.0)).results
    assert "process 1" in result.verdicts[0].finding and "SIGSEGV" in result.verdicts[0].finding


def test_where_one_rank_raises_the_others_are_not_waited_for_to_the_end(no_leaks, monkeypatch):
    monkeypatch.setattr(processes, "_AFTER_AN_ERROR", 1.0)
    (result,) = _run(Check("other_rank_raises", ranks=2, limit_s=240.0)).results
    waits, raises = result.verdicts
    assert (waits.status, raises.status) == ("skipped", "broken") and "no such device" in raises.finding


def test_each_rank_answers_under_its_name(no_leaks):
    (result,) = _run(Check("pid", ranks=2)).results
    assert [v.name for v in result.verdicts] == ["pid, process 0", "pid, process 1"]
    assert len({v.finding for v in result.verdicts}) == 2


# The report.


def test_the_report_is_whole_after_each_check_and_names_nobody(tmp_path, no_leaks, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "bigbox")
    model = tmp_path / "janes-secret-finetune.safetensors"
    model.write_bytes(b"")
    seen = []

    def on_report(report):
        report.write(tmp_path)
        seen.append(json.loads((tmp_path / "gpu-check.json").read_text())["complete"])

    checks = (Check(name, examine=lambda ranks: ()) for name in ("pid", "leave", "raises"))
    report = _run(*checks, subject=replace(make_subject(CPU, str(model)), devices=CPU), on_report=on_report)
    assert seen == [False, False, True]
    markdown, text = (tmp_path / "gpu-check.md").read_text(), (tmp_path / "gpu-check.json").read_text()
    assert json.loads(text)["exit_status"] == report.exit_status == 1
    assert json.loads(text)["checks"][0]["verdicts"][0]["status"] == "ok"
    for shown in (markdown, text):
        assert "cannot open" in shown and "out of luck" in shown
        for private in ("janes", "secret-finetune", str(tmp_path), "bigbox", str(Path.home())):
            assert private not in shown, private
    assert "## Ends" in markdown and "### leave" in markdown and "- **broken** leave:" in markdown


def test_a_report_that_was_cut_off_says_so():
    done = CheckResult("pid", "Ends", 0.1, (Finding("pid", "ok", "7"),))
    assert "1 of 2 checks did not run" in GpuReport((), (done,), planned=2).summary
    assert "did not run" not in GpuReport((), (done, done), planned=2).summary


def test_the_command_asks_both_programs_and_leaves_the_report(tmp_path, no_leaks, capsys):
    chosen = ["--only", "installation", "--only", "device", "--report", str(tmp_path)]
    status = main(["doctor", "--gpu", "--devices", "cpu:1", *chosen])
    said = capsys.readouterr().out
    assert status == 0, said
    assert "[2/2] device …" in said and "Nothing is broken" in said
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    statuses = {v["name"]: v["status"] for check in report["checks"] for v in check["verdicts"]}
    assert report["complete"] and report["exit_status"] == 0
    assert statuses["Software: torch"] == statuses["device"] == "ok"
    assert str(ROOT) not in (tmp_path / "gpu-check.md").read_text()

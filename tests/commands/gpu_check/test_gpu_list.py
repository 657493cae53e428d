"""The GPU check's list and report: every check is there, none can end the doctor, and nothing private is reported."""

import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from fault_injection import fault
from parallel_backend.__main__ import main
from parallel_backend.commands.gpu_check.ranks import Check
from parallel_backend.commands.gpu_check.run import CheckResult, GpuReport, choose, make_subject, run_checks
from parallel_backend.errors import RequestError
from parallel_backend.options import COMPILE_BACKEND
from parallel_backend.wire import deadlines
from parallel_backend.wire.checks.findings import Finding

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[3]
CPU = ("cpu:0", "cpu:1")
((_, SYNCS),) = choose(("syncs",))
# The checks that an audit requires in the first minutes on a GPU, in its order.
LIST = (
    *("installation", "device", "attention", "identity", "checkpoint", "steps", "syncs", "same bits"),
    *("fp8", "offload", "sleep", "comfyui", "links", "strategies"),
    *("pipefusion 1 2", "pipefusion 1 6", "pipefusion 0 2", "pipefusion 0 6"),
    *("one process", "cancel", "kill", "out of memory", "profile"),
)


def _run(*checks, subject=None, **wishes):
    return run_checks(subject or make_subject(CPU), [("Ends", check) for check in checks], **wishes)


def start(ranks):
    """A check that starts two ranks and finds their process ids."""
    ranks.group(2).start()
    yield Finding("pids", "ok", str(ranks.group(2).pids))


def raises(ranks):
    raise RuntimeError("out of luck")


# The list.


def test_the_list_is_the_audits_in_its_order():
    assert [check.name for _, check in choose(())] == list(LIST)


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
    assert (gpu.pixels, gpu.attention_tokens) == (1024, 4608)
    assert cpu.pixels == 128 and cpu.is_demo
    for subject in (gpu, cpu):
        assert all(side // 8 % 2 for side in subject.odd_pixels) and Path(subject.model).is_file()


def test_checks_are_chosen_by_name_or_group():
    assert [c.name for _, c in choose(("Faults", "device"))] == ["device", "cancel", "kill", "out of memory"]
    with pytest.raises(RequestError, match="'nonsense' is no check; choose from installation"):
        choose(("nonsense",))


# Checks that end badly.


def test_after_a_check_that_raises_the_next_one_runs_in_new_processes(no_leaks):
    report = _run(*(Check(check.__name__, check) for check in (start, start, raises, start)))
    first, again, ended, after = (result.verdicts[0] for result in report.results)
    assert (first.status, again.status, ended.status, after.status) == ("ok", "ok", "broken", "ok")
    assert (ended.name, ended.finding) == ("raises", "RuntimeError: out of luck")
    assert any(line.endswith(", in raises") for line in ended.details)
    assert first.finding == again.finding != after.finding
    assert report.exit_status == 1 and "3 ok, 1 broken" in report.summary


@pytest.mark.parametrize(("kind", "words"), [("kill", "killed by SIGKILL"), ("raise", "a fault on purpose")])
def test_a_process_that_ends_while_it_is_checked_is_a_finding(kind, words, no_leaks, monkeypatch):
    monkeypatch.setattr(deadlines, "REPORT", 0.5)
    with fault(kind, "an all-to-all"):
        (result,) = _run(SYNCS).results
    (ended,) = result.verdicts
    assert (ended.name, ended.status) == ("syncs", "broken")
    assert "process 1" in ended.finding and words in ended.finding


def test_a_process_that_does_not_answer_within_the_limit_is_a_finding_with_its_stack(no_leaks):
    with fault("sleep", "an all-to-all"):
        _, result = _run(Check("start", start), replace(SYNCS, limit_s=2.0)).results
    (ended,) = result.verdicts
    assert ended.status == "broken" and "process 1 failed: gave no sign of life" in ended.finding
    assert re.search(r"the limit here is (1\.\d+|2) s", ended.finding)
    assert any("faults.py" in line for line in ended.details)


def test_processes_on_the_cpu_compile_without_inductor(monkeypatch):
    monkeypatch.delenv(COMPILE_BACKEND, raising=False)
    seen = []

    def look(ranks):
        seen.append(os.environ[COMPILE_BACKEND])
        return ()

    _run(Check("look", look))
    assert seen == ["aot_eager"] and COMPILE_BACKEND not in os.environ


# The report.


def test_the_report_is_whole_after_each_check_and_names_nobody(tmp_path, no_leaks, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "bigbox")
    model = tmp_path / "janes-secret-finetune.safetensors"
    model.write_bytes(b"")
    seen = []

    def on_report(report):
        report.write(tmp_path)
        seen.append(json.loads((tmp_path / "gpu-check.json").read_text())["complete"])

    def opens(ranks):
        raise OSError(f"cannot open {ranks.subject.model}")

    checks = (Check(check.__name__, check) for check in (start, opens, raises))
    report = _run(*checks, subject=make_subject(CPU, str(model)), on_report=on_report)
    assert seen == [False, False, True]
    markdown, text = (tmp_path / "gpu-check.md").read_text(), (tmp_path / "gpu-check.json").read_text()
    assert json.loads(text)["exit_status"] == report.exit_status == 1
    assert json.loads(text)["checks"][0]["verdicts"][0]["status"] == "ok"
    for shown in (markdown, text):
        assert "cannot open" in shown and "out of luck" in shown
        for private in ("janes", "secret-finetune", str(tmp_path), "bigbox", str(Path.home())):
            assert private not in shown, private
    assert "## Ends" in markdown and "### opens" in markdown and "- **broken** opens:" in markdown


def test_a_report_that_was_cut_off_says_so():
    done = CheckResult("pid", "Ends", 0.1, (Finding("pid", "ok", "7"),))
    assert "1 of 2 checks did not run" in GpuReport((), (done,), planned=2).summary
    assert "did not run" not in GpuReport((), (done, done), planned=2).summary


def test_the_command_leaves_the_report(tmp_path, no_leaks, capsys):
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

"""The report on a ComfyUI that is newer than the proven one, and the job that makes it every night."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import report_on_comfyui
from comfy_harness import require_comfyui
from parallel_backend.errors import RankFailed
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import ROWS, STAY
from parallel_backend.wire.checks.findings import SelfTest

ROOT = Path(__file__).resolve().parents[2]
JOB = ROOT / ".github" / "workflows" / "newer-comfyui.yml"


def test_the_proven_release_holds_and_a_library_of_graphs_is_judged(tmp_path, monkeypatch, capsys):
    model, out = [{"type": "MODEL"}], tmp_path / "out"
    loader = {"type": "UNETLoader", "outputs": model, "widgets_values": ["flux1-dev.safetensors"]}
    graph = {"nodes": [loader, {"type": "KSampler", "inputs": model}]}
    (tmp_path / "one.json").write_text(json.dumps(graph))
    options = ["--out", str(out), "--templates", str(tmp_path), "--without", "parity"]
    monkeypatch.setattr(sys, "argv", ["", str(require_comfyui()), *options])
    assert report_on_comfyui.main() == 0
    said = (out / "report.md").read_text()
    assert said in capsys.readouterr().out
    assert "All holds." in said and "1 of 1 graphs run." in said and "0 of them in sources" in said


def test_what_does_not_hold_is_named(tmp_path, monkeypatch):
    asked = []

    def tests(root, names):
        asked.append((root, names))
        return [SelfTest(name, ROWS if name == "HunyuanVideo" else STAY, 0.1) for name in names]

    monkeypatch.setattr(report_on_comfyui, "run_self_tests", tests)
    sources = [TABLE[name].source for name in ("HunyuanVideo", "LTXVModel")]
    for name in (*sources, "comfy/ldm/modules/attention.py", "comfy/model_base.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# unet_model=comfy.ldm.prism.Prism and unet_model=HunyuanVideo\n")
    part = report_on_comfyui.self_tests(tmp_path)
    assert asked == [(str(tmp_path), ["HunyuanVideo", "LTXVModel"])]
    assert not part.passed and "2 of them in sources that" in part.summary
    assert "Not described: Prism.\n" in part.summary and "| LTXV" not in part.summary
    assert "| HunyuanVideo | rows | this version of ComfyUI computes" in part.summary
    assert "| Flux | rows | its sources are not where the pack knows them |" in part.summary
    ended = RankFailed(0, "the self-test was killed", crashed=True)
    monkeypatch.setattr(report_on_comfyui, "run_self_tests", Mock(side_effect=ended))
    part = report_on_comfyui.self_tests(tmp_path)
    assert not part.passed and "the self-test was killed" in part.summary
    monkeypatch.setattr(report_on_comfyui, "_run", lambda *_, **__: (1, "FAILED tests/a.py::b\n1 failed\n"))
    part = report_on_comfyui.parity(tmp_path, tmp_path)
    assert not part.passed and part.summary == "1 failed\n\n- `FAILED tests/a.py::b`"
    monkeypatch.setattr(report_on_comfyui, "_run", lambda *_, **__: (1, "Traceback: what went wrong"))
    part = report_on_comfyui.templates(tmp_path, tmp_path)
    assert not part.passed and "what went wrong" in part.summary
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.99.0"\n')
    said = report_on_comfyui.report(tmp_path, [part])
    assert said.startswith("# The pack on ComfyUI 0.99.0\n\nThese do not hold: Templates.")


def test_all_tests_of_parity_are_there():
    assert [
        name for name in report_on_comfyui.PARITY if not (ROOT / "tests" / "comfy" / name).is_file()
    ] == []


def _steps():
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load(JOB.read_text())["jobs"].values()
    return job["steps"]


def test_the_shell_of_the_nightly_job_is_sound():
    scripts = [step["run"] for step in _steps() if "run" in step]
    assert len(scripts) >= 5
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        if shellcheck := shutil.which("shellcheck"):
            subprocess.run([shellcheck, "--shell=bash", "-"], input=script, text=True, check=True)
        named = [word for word in script.split() if word.startswith("scripts/")]
        assert all((ROOT / word).is_file() for word in named), named


def test_the_requirements_of_a_newer_comfyui_leave_torch_alone(tmp_path):
    """Runs the job's grep on a list like ComfyUI's."""
    (script,) = (step["run"] for step in _steps() if "requirements.txt" in step.get("run", ""))
    (line,) = (line for line in script.splitlines() if line.startswith("grep"))
    listed = "torch\ntorchsde\ntorchvision\ntorchaudio>=2\ntorch>=2.5\nnumpy>=1.25.0\n"
    (tmp_path / "requirements.txt").write_text(listed)
    (tmp_path / "newer").mkdir()
    command = line.replace("$COMFYUI/requirements.txt", "requirements.txt")
    subprocess.run(["bash", "-ec", command], cwd=tmp_path, check=True)
    assert (tmp_path / "newer" / "requirements.txt").read_text() == "torchsde\nnumpy>=1.25.0\n"


def test_an_issue_is_opened_once_and_then_added_to(tmp_path):
    """Runs the job's last step with a stand-in for GitHub's command, gh."""
    script = _steps()[-1]["run"]
    calls = tmp_path / "calls"
    gh = tmp_path / "gh"
    gh.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$2" = list ] && printf "%s" "$FOUND"\nexit 0\n')
    gh.chmod(0o755)
    for found, wanted in (("", "issue create"), ("12", "issue comment 12")):
        calls.write_text("")
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REPORT": f"{tmp_path}/report", "FOUND": found}
        subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], env=environment, check=True)
        assert wanted in calls.read_text() and f"{tmp_path}/report/report.md" in calls.read_text()

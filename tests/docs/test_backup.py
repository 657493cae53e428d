"""The backup commands of docs/deployment.md save a user's data, and restore all of it after a loss."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from jobs import FP8, flux_job
from pack_nodes import import_node_module
from parallel_backend.machine.local import LocalMachine
from parallel_backend.planner import history as measurement_history
from parallel_backend.planner.history import open_history, record_run
from parallel_backend.planner.plan import plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.requests import RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.cache_folder import FOLDER, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
CPUS = ("cpu:0", "cpu:1")
user_settings = import_node_module("nodes.host.settings")


def _commands(heading: str) -> list[str]:
    """Returns the indented commands of the paragraph that begins with `heading` in bold."""
    text = (ROOT / "docs" / "deployment.md").read_text()
    _, found, after = text.partition(f"**{heading}**")
    assert found, heading
    block = after.partition("\n\n    ")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


@pytest.fixture
def run(tmp_path, monkeypatch):
    if shutil.which("tar") is None:
        pytest.skip("tar is not installed")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(measurement_history, "JOBS", Counter())
    monkeypatch.setenv("COMFYUI", str(tmp_path / "ComfyUI"))
    monkeypatch.setenv("BACKUP", str(tmp_path / "backup.tar.gz"))

    def execute(heading: str) -> None:
        for command in _commands(heading):
            subprocess.run(["bash", "-euc", command], check=True, timeout=60)

    return execute


def test_after_a_loss_settings_measurements_and_workflows_are_as_they_were(run, tmp_path):
    user = tmp_path / "ComfyUI" / "user" / "default"
    cache = tmp_path / "home" / ".cache" / FOLDER
    workflow = user / "workflows" / "mine.json"
    workflow.parent.mkdir(parents=True)
    workflow.write_text('{"nodes": []}')
    (user / "comfy.settings.json").write_text('{"parallel_sampling.default_devices": "cpu:2"}')
    for strategy, seconds in ((ParallelStrategy(), 1.0), (ParallelStrategy(ulysses_degree=2), 2.0)):
        record_run(CPUS, flux_job(FP8), RunInfo("native", strategy, (9.0, seconds)))
    (cache / "compiled").mkdir()
    (cache / "compiled" / "large").write_text("can be made again")

    def behaviour() -> tuple:
        plan = plan_execution(StrategySettings(), flux_job(FP8), LocalMachine(CPUS), open_history(CPUS))
        settings = dict(user_settings.read_settings(user / "comfy.settings.json")[0])
        return (
            (plan.strategy, plan.reason, plan.notes),
            settings,
            workflow.read_text() if workflow.exists() else "",
        )

    before = behaviour()
    assert before[0][0] == ParallelStrategy() and before[1]["default_devices"] == "cpu:2"
    run("To save")
    shutil.rmtree(tmp_path / "ComfyUI")
    shutil.rmtree(tmp_path / "home")
    lost = behaviour()
    assert all(is_now != was for is_now, was in zip(lost, before, strict=True))  # else nothing is restored
    run("To restore")
    assert behaviour() == before
    assert not (cache / "compiled").exists()

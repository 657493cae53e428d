"""Several ranks on one GPU over real NCCL (tests/support/one_card): the checks of the GPU check that two ranks run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ONE_CARD = ROOT / "tests" / "support" / "one_card"
# "out of memory" is left out: a rank that fills the card takes the other rank's memory.
CHECKS = ("device", "several gpus", "cancel", "kill")
# Prints the devices that ComfyUI's process finds, and those on which ranks compute.
NAMES = """
from parallel_backend.devices import resolve_devices
from parallel_backend.rank.work.device import device_of
print(*resolve_devices("all"), device_of("cuda:2"), device_of("cpu:1"))
"""


def _environment(cards):
    search = os.pathsep.join(filter(None, [str(ONE_CARD), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": search, "TORCH_TEST_CARDS": str(cards)}


def test_the_pack_sees_several_gpus_and_computes_on_the_first():
    command = [sys.executable, "-c", NAMES]
    done = subprocess.run(command, cwd=ROOT, env=_environment(3), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cpu"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none")
@pytest.mark.timeout(600)
def test_ranks_that_share_a_card_find_nothing_broken(tmp_path, no_leaks):
    command = [sys.executable, "-m", "parallel_backend", "doctor", "--gpu", "--devices", "0,1"]
    command += ["--report", str(tmp_path), *(word for name in CHECKS for word in ("--only", name))]
    done = subprocess.run(command, cwd=ROOT, env=_environment(2), capture_output=True, text=True)
    assert done.returncode == 0, (tmp_path / "gpu-check.md").read_text()

"""Several ranks on one GPU over real NCCL (tests/support/one_card): every check of the GPU check's that takes two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none"),
]
ROOT = Path(__file__).resolve().parents[2]
ONE_CARD = ROOT / "tests" / "support" / "one_card"
# Not "out of memory": a rank that fills the card takes the other's memory too.
CHECKS = ("device", "several gpus", "cancel", "kill")


@pytest.mark.timeout(600)
def test_ranks_that_share_a_card_find_nothing_broken(tmp_path, no_leaks):
    search = os.pathsep.join(filter(None, [str(ONE_CARD), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search, "TORCH_TEST_CARDS": "2"}
    command = [sys.executable, "-m", "parallel_backend", "doctor", "--gpu", "--devices", "0,1"]
    command += ["--report", str(tmp_path), *(word for name in CHECKS for word in ("--only", name))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (tmp_path / "gpu-check.md").read_text()

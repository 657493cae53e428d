"""`python -m parallel_backend`: what all commands have in common."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLAN = ["plan", "--model", "flux1-dev", "--gpus", "8", "--link", "nvlink", "--card", "h100"]


@pytest.mark.parametrize("rows", ["1", "500"])
def test_a_reader_that_stops_reading_is_no_error(rows):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "parallel_backend", *PLAN, "--rows", rows],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.stderr == "" and done.returncode == 1

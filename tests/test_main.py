"""`python -m parallel_backend`: the behaviour that all commands share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("rows", [1, 2000])
def test_a_reader_that_stops_reading_is_no_error(tmp_path, rows):
    log = tmp_path / "queue.jsonl"
    line = '{{"accepted": "{}", "number": {}, "left_out": [], "request": {{"prompt": {{}}}}}}\n'
    log.write_text("".join(line.format(i, i) for i in range(rows)))
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "parallel_backend", "resend", str(log)],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.stderr == "" and done.returncode == 1

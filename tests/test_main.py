"""`python -m parallel_backend`: the behaviour that all commands share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.observability.logs.queue_log import Entry

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("rows", [1, 2000])
def test_a_reader_that_stops_reading_is_no_error(tmp_path, rows):
    for number in range(rows):
        prompt = Entry(str(number), float(number), {"prompt": {}})
        (tmp_path / f"{number}.json").write_text(json.dumps(vars(prompt)))
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "parallel_backend", "resend", str(tmp_path)],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writer)
    assert done.stderr == "" and done.returncode == 1

"""What was freed goes back to the system when that is asked for, and not before."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from parallel_backend.sidecar.environment import rank_environment
from parallel_backend.sidecar.supervisor import PACK_ROOT

PROGRAM = """
import os
from parallel_backend.engine.heap import release_heap

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
blocks = [b"x" * 2**20 for _ in range(64)]
blocks.clear()
kept = resident() - before
release_heap()
print(kept, resident() - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_a_rank_on_a_cpu_keeps_what_it_freed_until_it_is_to_give_it_back():
    environ = rank_environment({}, PACK_ROOT, ("cpu:0",))
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environ,
        cwd=PACK_ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    kept, left = map(int, told.split())
    assert kept > 48 * 2**20 and left < 16 * 2**20

"""A program whose checks end in every possible way: `python -m tests.support.check_program`. It needs no torch."""

from __future__ import annotations

import os
import signal
import sys
import time

from parallel_backend.wire.checks.findings import Finding
from parallel_backend.wire.checks.gpu_check import serve


def make_checks(subject, rank, rendezvous):
    def pid():
        print("what libraries print")
        return [Finding("pid", "ok", str(os.getpid()))]

    def raises():
        raise RuntimeError("out of luck")

    def crash():
        os.kill(os.getpid(), signal.SIGKILL)

    def leave():
        sys.stderr.write(f"cannot open {subject.model}\n")
        sys.exit(7)

    def hang():
        time.sleep(3600)

    def garbage():
        os.write(answers, b"no answer\n")
        time.sleep(3600)

    def other_rank_dies():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(3600)

    def other_rank_raises():
        if rank == 1:
            raise RuntimeError("no such device")
        time.sleep(3600)

    checks = (pid, raises, crash, leave, hang, garbage, other_rank_dies, other_rank_raises)
    return {check.__name__: check for check in checks}


if __name__ == "__main__":
    answers = os.dup(1)
    serve(make_checks)

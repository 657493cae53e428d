"""A process that prints without end and ignores SIGTERM: the worst that a rank can do to its supervisor."""

import signal
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
deadline = time.monotonic() + 300  # in case the test does not end it
while time.monotonic() < deadline:
    sys.stderr.write("x" * 1000 + "\n")

"""A process that holds the locks of devices, and a rank with the first one's: it prints the rank's process id."""

import signal
import subprocess
import sys

from parallel_backend.sidecar.process.device_lock import lock_devices

devices = sys.argv[1].split(",")
locks = lock_devices(devices)
rank = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, pass_fds=locks.of(devices[0]))
print(rank.pid, flush=True)
signal.pause()

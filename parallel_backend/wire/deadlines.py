"""Every time limit of the control path, with its reason; in seconds unless the name says otherwise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LOAD_BYTES_PER_SECOND = 50e6  # a slow network disk; a local NVMe is 40 times faster
TORCH_BYTES = 6e9  # a CUDA build of torch with its libraries, most of which an import reads
# Without a message from any starting rank, before Hello and again before Done: reading torch from a cold disk is slow.
START = 60.0 + TORCH_BYTES / LOAD_BYTES_PER_SECOND
LOAD_BASE = 60.0  # importing the model library and building the module, whatever the file's size
FIRST_STEP = 300.0  # includes torch.compile and kernel autotuning
USUAL_POSITIONS = 256 * 256  # latent positions of 2048 x 2048 pixels: FIRST_STEP suffices on any GPU
CPU_ATTENTION = 2.5e-8  # for two positions: three times what a core takes for those of the demo model
STEP_FLOOR = 30.0
STEP_FACTOR = 10  # a step this many times slower than the median is stuck
SELF_TEST = 30.0  # tiny modules of one class of ComfyUI's on two forked ranks; they take one or two
CALIBRATION = 2.0  # measuring the links; one step of a large model takes as long
CANCEL = 10.0  # for the ranks to reach a step boundary and report; then they are killed
TERMINATE = 2.0  # between SIGTERM and SIGKILL
REAP = 10.0  # after SIGKILL until a rank has ended; one that a driver holds in the kernel never does
REPORT = 0.4  # for all ranks to report after the first failure; a rank that does not is stuck in a collective
DEATH_NOTICE = 0.5  # for the supervisor to find the cause of a death that a caller saw as end of file
STACK = 0.15  # for a hanging rank to write its stack; a stopped one cannot
POLL = 0.05  # between two checks of `should_cancel` while waiting
PAUSE = 1.0  # between two such checks: after more, this process was held up, and ranks are not to blame
SEND = 10.0  # for a rank to read a request from its link's buffer
BEAT = 0.5  # between two signs of life of a cluster's machine, and of its head
SILENCE = (
    15.0  # without a sign of life, before it is cut off; a process that imports is silent for a few seconds
)
ADMIT = 10.0  # for a machine's TLS handshake, and again for its first frame
MACHINES = 60.0  # for machines whose ranks ended to come back: torchrun's rendezvous and an import of torch
GATHER = 5.0  # without another machine, after which a command starts with those that have joined
REDIAL = 1.0  # between two attempts of a machine to reach its head
BROKEN_WINDOW = 600.0  # within which three failures are too many to start the ranks again
BACK_OFF = 1.0  # before ranks that failed twice in that window start again, doubled with each further failure


def load_budget(file_bytes: int) -> float:
    """Returns the seconds that loading a file of this size may take."""
    return LOAD_BASE + file_bytes / LOAD_BYTES_PER_SECOND


def decode_budget(positions: int, on_cpu: bool) -> float:
    """Returns the seconds that one of a VAE's largest layers may take for an image of `positions` latent positions."""
    # A core takes about 4 ms per position for all layers of the full-size decoder (measured).
    return FIRST_STEP + (0.1 * positions if on_cpu else 0.0)


def size_allowance(positions: int, on_cpu: bool) -> float:
    """Returns the seconds that a first step may take in addition to FIRST_STEP, by its latent positions. No earlier
    step exists to compare it with, and at 8192 x 8192 pixels attention alone takes longer than FIRST_STEP."""
    over = FIRST_STEP * max(0.0, positions / USUAL_POSITIONS - 1)
    return over + (CPU_ATTENTION * positions**2 if on_cpu else 0.0)


def step_budget(earlier: Sequence[float]) -> float:
    """Returns the seconds that the next step may take. `earlier`: the seconds of earlier steps of the same kind."""
    if not earlier:
        return FIRST_STEP
    return max(STEP_FLOOR, STEP_FACTOR * statistics.median(earlier))

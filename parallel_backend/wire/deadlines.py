"""Every time limit of the control path, with its unit and its reason."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

LOAD_BYTES_PER_SECOND = 50e6  # a slow network disk; a local NVMe is 40 times faster
TORCH_BYTES = 6e9  # a CUDA build of torch with its libraries, of which an import reads the most
# s without a word from any rank while they start, before Hello and again before Done: from a cold disk that is long
START = 60.0 + TORCH_BYTES / LOAD_BYTES_PER_SECOND
LOAD_BASE = 60.0  # s, importing the model library and building the module, whatever the file's size
FIRST_STEP = 300.0  # s, torch.compile and kernel autotuning happen here
USUAL_POSITIONS = 256 * 256  # of a latent, 2048 x 2048 pixels: up to there it is enough on any GPU
CPU_ATTENTION = 2.5e-8  # s for two positions: three times what a core takes for those of the demo model
STEP_FLOOR = 30.0  # s
STEP_FACTOR = 10  # a step this many times slower than the median is stuck
SELF_TEST = 30.0  # s for tiny modules of one class of ComfyUI's on two forked ranks; they take one or two
CALIBRATION = 2.0  # s that measuring the links may take; one step of a large model takes as long
CANCEL = 10.0  # s for the ranks to reach a step boundary and report, then they are killed
TERMINATE = 2.0  # s between SIGTERM and SIGKILL
REAP = 10.0  # s after SIGKILL for a rank to be gone; one that a driver holds in the kernel never is
REPORT = 0.4  # s for all ranks to report after the first failure; who does not is stuck in a collective
DEATH_NOTICE = 0.5  # s for the supervisor to name a death that a caller saw as end of file
STACK = 0.15  # s for a rank that hangs to show where; one that is stopped cannot
POLL = 0.05  # s between two looks at `should_cancel` while waiting
PAUSE = 1.0  # s between two such looks, after which this process was held up, and ranks cannot be blamed
IDLE = 1.0  # s without a request, after which a rank gives back what torch keeps of its device's memory
SEND = 10.0  # s for a rank to take a request from its link's buffer
BEAT = 0.5  # s between two signs of life of a machine of a cluster, and of its head
SILENCE = (
    15.0  # s without one, after which it is cut off; a process that is busy importing is silent for a few
)
ADMIT = 10.0  # s for a machine's TLS handshake, and again for its first frame
MACHINES = 60.0  # s for machines whose ranks ended to come back: torchrun's rendezvous and an import of torch
GATHER = 5.0  # s without another machine, after which a command begins with those that have joined
REDIAL = 1.0  # s between two attempts of a machine to reach its head
BROKEN_WINDOW = 600.0  # s within which three failures are too many to start the ranks again
BACK_OFF = (
    1.0  # s before ranks that failed twice within that window start again, doubled with each more failure
)


def load_budget(file_bytes: int) -> float:
    """Seconds that loading a file of this size may take."""
    return LOAD_BASE + file_bytes / LOAD_BYTES_PER_SECOND


def decode_budget(positions: int, on_cpu: bool) -> float:
    """Seconds that one of the largest layers of a VAE may take over an image of `positions` latent positions."""
    # A core takes about 4 ms per position for all layers of the full-size decoder (measured).
    return FIRST_STEP + (0.1 * positions if on_cpu else 0.0)


def size_allowance(positions: int, on_cpu: bool) -> float:
    """Seconds that a first step may take beside FIRST_STEP, by the latent positions that it computes: it has no earlier
    ones to be measured against, and at 8192 x 8192 pixels attention alone takes longer than that."""
    over = FIRST_STEP * max(0.0, positions / USUAL_POSITIONS - 1)
    return over + (CPU_ATTENTION * positions**2 if on_cpu else 0.0)


def step_budget(earlier: Sequence[float]) -> float:
    """Seconds that the next step may take, given how long `earlier` steps of the same kind took."""
    if not earlier:
        return FIRST_STEP
    return max(STEP_FLOOR, STEP_FACTOR * statistics.median(earlier))

"""The whole list: what to look at in the first minutes on a GPU, in this order."""

from __future__ import annotations

from .faults import FAULTS
from .memory import MEMORY
from .one_device import INSTALLATION, ONE_GPU
from .several_devices import SEVERAL_GPUS
from .timing import TIMING

GROUPS = (INSTALLATION, ONE_GPU, MEMORY, SEVERAL_GPUS, FAULTS, TIMING)

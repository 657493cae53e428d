"""The whole list: what to look at in the first minutes on a GPU, in this order."""

from __future__ import annotations

from .checks import Check, Group
from .faults import FAULTS
from .memory import MEMORY
from .one_device import INSTALLATION, ONE_GPU
from .several_devices import SEVERAL_GPUS

TIME = Group("Time", (Check("profile", ranks=2, limit_s=900.0),))
GROUPS = (INSTALLATION, ONE_GPU, MEMORY, SEVERAL_GPUS, FAULTS, TIME)

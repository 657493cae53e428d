"""Several ranks on one GPU over real NCCL. Python imports this module at its start if this folder is on PYTHONPATH.

With TORCH_TEST_CARDS=4 the pack sees four GPUs, cuda:0 to cuda:3, which are all the first one. NCCL refuses two ranks
of one host on one device, so each process gets a different host id, and data goes over the loopback interface. Such
ranks take turns on the card: they show that results are right, never how fast several cards are.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from unittest.mock import patch

VARIABLE = "TORCH_TEST_CARDS"  # ranks get it because of torch's prefix


def _see_all(devices: ModuleType) -> None:
    resolve = devices.resolve_devices

    def resolve_devices(text: str) -> tuple[str, ...]:
        with patch("torch.cuda.device_count", lambda: int(os.environ[VARIABLE])):
            return resolve(text)

    devices.resolve_devices = resolve_devices


def _name_all(probe: ModuleType) -> None:
    read = probe.read_topology

    def read_topology(*args: object, **options: object) -> object:
        found = read(*args, **options)
        if not found.devices:
            return found
        card = found.devices[0]
        # NVML finds the first one by its uuid, and reports nothing about the others.
        others = [
            replace(card, index=index, uuid=f"GPU-{index}-{card.uuid}")
            for index in range(1, int(os.environ[VARIABLE]))
        ]
        devices = (card, *others)
        return replace(found, devices=devices, pairs=probe._all_pairs(devices, None))

    probe.read_topology = read_topology


def _compute_on_the_first(device: ModuleType) -> None:
    import torch

    device.device_of = lambda name: torch.device("cpu" if name.startswith("cpu") else "cuda:0")


def _free_of_the_first(offload: ModuleType) -> None:
    can_free = offload.can_free
    offload.can_free = lambda name: can_free("cuda:0" if name.startswith("cuda") else name)
    offload.memory_in_use.FREEABLE[-1] = offload.can_free


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "parallel_backend.devices": _see_all,
    "parallel_backend.machine.probe": _name_all,
    "nodes.host.offload": _free_of_the_first,
    "parallel_backend.rank.work.device": _compute_on_the_first,
}


class _Changed:
    """Finds the modules of _CHANGES as usual, also under the name that ComfyUI gives the pack, and changes each after
    it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> object:
        change = next((change for end, change in _CHANGES.items() if ("." + name).endswith("." + end)), None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if VARIABLE in os.environ:
    os.environ["NCCL_HOSTID"] = str(os.getpid())
    sys.meta_path.insert(0, _Changed)

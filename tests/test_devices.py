"""Device texts such as `0,1` and `cpu:2`: the devices that they name, and the texts that are refused by name."""

from types import SimpleNamespace

import pytest
import torch

from parallel_backend import devices
from parallel_backend.devices import (
    MAX_CPU_RANKS,
    devices_of_a_run,
    name_devices,
    resolve_devices,
)
from parallel_backend.errors import DeviceError


@pytest.fixture
def gpus(monkeypatch):
    def pretend(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.mark.parametrize(("kind", "text"), [("xpu", "all"), ("npu", " ")])
def test_a_run_is_not_the_cpus_beside_an_accelerator_that_ranks_cannot_use(gpus, monkeypatch, kind, text):
    gpus(0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind))
    with pytest.raises(DeviceError, match=f"ComfyUI computes on {kind.upper()} here.*write cpu:2") as refused:
        devices_of_a_run(text)
    assert [problem.nearest for problem in refused.value.problems] == [(("devices", "cpu:2"),)]
    assert devices_of_a_run("cpu:2") == ("cpu:0", "cpu:1")
    monkeypatch.setattr(devices, "_only_cpu", True)  # ComfyUI runs with --cpu
    assert devices_of_a_run(text) == ("cpu:0",)


def test_a_run_without_any_accelerator_is_the_cpus(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert devices_of_a_run("all") == ("cpu:0",)
    gpus(2)
    assert devices_of_a_run("all") == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("0,1,3", ("cuda:0", "cuda:1", "cuda:3")),
        ("3, 1", ("cuda:3", "cuda:1")),
        ("cuda:2", ("cuda:2",)),
        ("cuda:0,1", ("cuda:0", "cuda:1")),
        ("0-2", ("cuda:0", "cuda:1", "cuda:2")),
        ("cuda:0-1, 3", ("cuda:0", "cuda:1", "cuda:3")),
        ("0 1", ("cuda:0", "cuda:1")),
        ("0;1", ("cuda:0", "cuda:1")),
        ("0 ; 1", ("cuda:0", "cuda:1")),
        ("cpu", ("cpu:0",)),
        ("cpu:2", ("cpu:0", "cpu:1")),
        ("cpu:2,cpu:3", ("cpu:2", "cpu:3")),
        ("CPU:5 cpu:0", ("cpu:5", "cpu:0")),
    ],
)
def test_a_text_names_devices_in_its_order(gpus, text, expected):
    gpus(4)
    assert resolve_devices(text) == expected
    assert resolve_devices(name_devices(expected)) == expected


@pytest.mark.parametrize(
    ("text", "count", "message", "nearest"),
    [
        ("0,0", 2, "twice", "0"),
        ("0,5", 2, "GPU 5 does not exist; this machine has GPUs 0 to 1", "0"),
        ("1", 1, "GPU 0 only", "all"),
        ("0", 0, "cpu:2", "all"),
        ("cpu:0", 0, "1 to 16", "cpu:1"),
        (f"cpu:{MAX_CPU_RANKS + 1}", 0, "1 to 16", "cpu:16"),
        ("cpu:1,cpu:1", 0, "each named once", "cpu:2"),
        (f"cpu:0,cpu:{MAX_CPU_RANKS}", 0, "cpu:0 to cpu:15", "cpu:2"),
        ("cpu:0,cuda:0", 1, "not understood", "all"),
        ("-1", 2, "not understood", "all"),
        ("0;;1", 2, "not understood", "all"),
        ("1-0", 2, "write the smaller GPU first", "all"),
        ("0-99999999999", 2, "GPU 2 does not exist; this machine has GPUs 0 to 1", "0,1"),
        ("0-2,1", 4, "twice", "0,1,2"),
        ("gpu0", 2, "not understood", "all"),
        ("1" * 5000, 2, r"devices '1{20}\.\.\.' has 5000 letters", "all"),
        ("cpu:" + "1" * 5000, 0, "has 5004 letters", "all"),
    ],
)
def test_what_does_not_exist_is_refused_by_name_with_the_nearest_devices_that_are_there(
    gpus, text, count, message, nearest
):
    gpus(count)
    with pytest.raises(DeviceError, match=message) as refused:
        resolve_devices(text)
    (problem,) = refused.value.problems
    assert problem.inputs == ("devices",) and problem.nearest == (("devices", nearest),)
    resolve_devices(nearest)


def test_a_comfyui_without_gpus_uses_none(gpus, monkeypatch):
    gpus(2)
    assert resolve_devices("all") == ("cuda:0", "cuda:1")
    monkeypatch.setattr(devices, "_only_cpu", False)  # so that it is restored after the test
    devices.use_only_cpu()
    assert resolve_devices("all") == ("cpu:0",)
    with pytest.raises(DeviceError, match="ComfyUI runs with --cpu"):
        resolve_devices("0")

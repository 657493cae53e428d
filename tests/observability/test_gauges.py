"""Gauges from NVML, those that NVML lacks, and the machine's memory for ranks on the CPU."""

import sys

import pytest

from fake_nvml import GIB, h100_nvswitch, two_4090
from parallel_backend.host_memory import host_memory
from parallel_backend.machine.probe import read_topology
from parallel_backend.observability import gauges as module
from parallel_backend.observability.gauges import DeviceGauges, available_memory, read_free_bytes


@pytest.fixture
def gauges_of(monkeypatch):
    """Returns a function that gives gauges of a machine with these GPUs. `nvml`: what answers, if not the GPUs'."""

    def made(gpus, nvml=None):
        monkeypatch.setattr(module, "visible_topology", lambda: read_topology(gpus).visible({}))
        monkeypatch.setitem(sys.modules, "pynvml", nvml or gpus)
        return DeviceGauges()

    return made


def test_each_gpu_has_its_own_numbers_and_nvml_stays_open_until_nobody_looks(gauges_of):
    nvml = h100_nvswitch(2)
    gauges = gauges_of(nvml)
    one, other = (gauges.read(("cuda:1", "cuda:0"))[name] for name in ("cuda:0", "cuda:1"))
    assert (one.name, one.total_bytes, one.free_bytes) == ("NVIDIA H100 80GB HBM3", *[int(79.65 * GIB)] * 2)
    assert (one.utilisation, one.temperature, one.power, one.power_limit) == (0.1, 40, 250.5, 700.0)
    assert (other.utilisation, other.temperature, other.shared) == (0.2, 41, False)
    assert nvml.open == 1
    gauges.close()
    gauges.close()
    assert nvml.open == 0
    assert gauges.read(("cuda:0",))["cuda:0"] == one


def test_what_a_card_does_not_measure_is_missing_and_what_nobody_knows_is_left_out(gauges_of):
    found = gauges_of(two_4090()).read(("cuda:0", "cuda:7"))
    assert (found["cuda:0"].power, found["cuda:0"].utilisation) == (None, 0.1)
    assert "cuda:7" not in found


def test_a_driver_that_does_not_answer_leaves_names_and_sizes(gauges_of):
    class Silent:
        def nvmlInit(self):
            raise OSError("libnvidia-ml.so.1 is missing")

    gauge = gauges_of(h100_nvswitch(1), Silent()).read(("cuda:0",))["cuda:0"]
    assert (gauge.total_bytes, gauge.free_bytes, gauge.temperature) == (int(79.65 * GIB), 0, None)


def test_ranks_on_the_cpu_share_the_machines_memory(tmp_path):
    found = DeviceGauges().read(("cpu:0", "cpu:1"))
    assert found["cpu:0"] == found["cpu:1"] and found["cpu:0"].shared
    assert 0 < found["cpu:0"].free_bytes <= found["cpu:0"].total_bytes and found["cpu:0"].name

    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\nHugePages_Total: 0\n")
    assert available_memory(500 * 1024, meminfo=meminfo, cgroup=tmp_path) == 800 * 1024
    (tmp_path / "memory.current").write_text(f"{450 * 1024}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\nfile {200 * 1024}\n")
    assert available_memory(500 * 1024, meminfo=meminfo, cgroup=tmp_path) == 250 * 1024


def test_free_bytes_of_one_device_are_the_systems_and_none_where_nobody_knows_it():
    assert 0 < read_free_bytes("cpu:0") <= host_memory()
    assert read_free_bytes("cuda:99") == 0

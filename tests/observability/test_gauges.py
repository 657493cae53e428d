"""Gauges from NVML, those that NVML lacks, and the machine's memory for ranks on the CPU."""

import sys

import pytest

from fake_nvml import GIB, h100_nvswitch, two_4090
from parallel_backend.host_memory import host_memory
from parallel_backend.machine.probe import open_nvml, read_topology
from parallel_backend.observability import gauges as module
from parallel_backend.observability.gauges import available_memory, read_free_bytes, read_gauges


@pytest.fixture
def gauges_of(monkeypatch):
    """Returns a function that reads gauges on a machine with these GPUs. `nvml`: what answers, if not the GPUs'."""

    def read(devices, gpus, nvml=None):
        monkeypatch.setattr(module, "visible_topology", lambda: read_topology(gpus).visible({}))
        monkeypatch.setitem(sys.modules, "pynvml", nvml or gpus)
        return read_gauges(devices)

    open_nvml.cache_clear()
    yield read
    open_nvml.cache_clear()


def test_each_gpu_has_its_own_numbers_and_nvml_is_opened_once(gauges_of):
    nvml = h100_nvswitch(2)
    found = gauges_of(("cuda:1", "cuda:0"), nvml)
    one, other = found["cuda:0"], found["cuda:1"]
    assert (one.name, one.total_bytes, one.free_bytes) == ("NVIDIA H100 80GB HBM3", *[int(79.65 * GIB)] * 2)
    assert (one.utilisation, one.temperature, one.power, one.power_limit) == (0.1, 40, 250.5, 700.0)
    assert (other.utilisation, other.temperature, other.shared) == (0.2, 41, False)
    assert gauges_of(("cuda:0",), nvml)["cuda:0"] == one and nvml.open == 1


def test_what_a_card_does_not_measure_is_missing_and_what_nobody_knows_is_left_out(gauges_of):
    found = gauges_of(("cuda:0", "cuda:7"), two_4090())
    assert (found["cuda:0"].power, found["cuda:0"].utilisation) == (None, 0.1)
    assert "cuda:7" not in found


def test_a_driver_that_does_not_answer_leaves_names_and_sizes(gauges_of):
    class Silent:
        def nvmlInit(self):
            raise OSError("libnvidia-ml.so.1 is missing")

    gauge = gauges_of(("cuda:0",), h100_nvswitch(1), Silent())["cuda:0"]
    assert (gauge.total_bytes, gauge.free_bytes, gauge.temperature) == (int(79.65 * GIB), 0, None)


def test_ranks_on_the_cpu_share_the_machines_memory(tmp_path):
    found = read_gauges(("cpu:0", "cpu:1"))
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

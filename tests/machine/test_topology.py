"""Topology from NVML's answers for real shapes of boxes, in CUDA's order."""

import dataclasses

import pytest

import fake_nvml
from parallel_backend.errors import DeviceError
from parallel_backend.machine.local import joinable, neighbours_first
from parallel_backend.machine.probe import read_topology
from parallel_backend.machine.topology import Topology

GIB = 1024**3


def _read(nvml, tmp_path):
    return read_topology(nvml, sys_root=tmp_path)


@pytest.fixture
def box(tmp_path):
    return lambda shape: _read(shape(), tmp_path)


def test_eight_h100_behind_nvswitch(box):
    topology = box(fake_nvml.h100_nvswitch)
    assert len(topology.devices) == 8 and len(topology.pairs) == 28
    assert {(p.path, p.peer, p.rate) for _, _, p in topology.pairs} == {("NVSWITCH", True, 450.0)}
    assert [d.numa for d in topology.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology.devices[0].capability == (9, 0) and topology.devices[0].nvlinks == 18
    assert topology.kind == "NVSWITCH" and not topology.mixed and topology.driver == "550.54.15"


def test_two_4090_have_no_peer_access(box):
    topology = box(fake_nvml.two_4090)
    (_, _, pair), *more = topology.pairs
    assert not more and (pair.path, pair.peer, pair.rate) == ("PHB", False, 32.0)
    assert topology.kind == "PHB without peer access"
    assert topology.devices[0].name == "NVIDIA GeForce RTX 4090"  # text, although the library answered bytes
    assert "without peer access" in topology.describe()


def test_four_a6000_joined_in_pairs(box):
    topology = box(fake_nvml.a6000_pairs)
    paths = [pair.path for _, _, pair in topology.pairs]
    assert topology.pairs[0][2].rate == 56.0
    assert paths.count("NVLINK") == 2 and paths.count("SYS") == 4
    # Ranks sit so that bridged cards are neighbours, whatever order the devices are given in.
    ids = [d.uuid for d in topology.devices]
    shuffled = topology.select([ids[0], ids[2], ids[1], ids[3]])
    assert neighbours_first(shuffled) == (ids[0], ids[1], ids[2], ids[3])


def test_eight_l40_over_two_sockets(box):
    topology = box(fake_nvml.l40_two_sockets)
    assert topology.kind == "SYS"
    assert "over 2 NUMA nodes" in topology.describe()


def test_cards_that_differ_are_said(box):
    topology = box(fake_nvml.mixed_4080_4090)
    assert topology.mixed and "differ" in topology.describe()


def test_mig_slices_replace_their_gpu_and_have_no_peer_access(box):
    topology = box(fake_nvml.mig)
    assert [d.is_mig for d in topology.devices] == [True, True]
    assert {d.parent for d in topology.devices} == {"GPU-00000000-aaaa-bbbb-cccc-000000000000"}
    assert [(p.path, p.peer) for _, _, p in topology.pairs] == [("MIG", False)]
    assert any("has no slice" in note for note in topology.notes)
    assert any("2 MIG slices" in note for note in topology.notes)
    assert joinable(topology, 2) == 1


def test_slices_of_two_gpus_join_and_those_of_one_do_not(tmp_path):
    nvml = fake_nvml.mig()
    for board in nvml.boards:
        board.slices = [("3g.40gb", 39.5)]
    topology = _read(nvml, tmp_path)
    assert joinable(topology, 2) == 2 and joinable(topology, 1) == 1


def test_boards_of_one_kind_vary_a_little_in_memory(tmp_path):
    nvml = fake_nvml.h100_nvswitch(2)
    nvml.boards[1].memory_gib -= 0.2
    assert not _read(nvml, tmp_path).mixed
    nvml.boards[1].memory_gib = 47.0
    assert _read(nvml, tmp_path).mixed


def test_numa_comes_from_the_kernel_where_it_knows(tmp_path):
    node = tmp_path / "bus/pci/devices/0000:1b:00.0"
    node.mkdir(parents=True)
    (node / "numa_node").write_text("3\n")
    assert [d.numa for d in _read(fake_nvml.two_4090(), tmp_path).devices] == [3, 0]
    (node / "numa_node").write_text("-1\n")
    assert _read(fake_nvml.two_4090(), tmp_path).devices[0].numa is None


UUIDS = [f"GPU-{i:08x}-aaaa-bbbb-cccc-{i:012x}" for i in range(8)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, UUIDS),
        ("", []),
        ("-1", []),
        ("3,1", [UUIDS[3], UUIDS[1]]),
        (f"{UUIDS[5]},{UUIDS[0]}", [UUIDS[5], UUIDS[0]]),
        ("GPU-00000002,GPU-00000001", [UUIDS[2], UUIDS[1]]),
        ("0,99,1", [UUIDS[0]]),  # CUDA stops at what it does not know
        ("GPU-0000000", []),  # fits all of them
    ],
)
def test_cuda_visible_devices_in_any_spelling(box, visible, expected):
    topology = box(fake_nvml.h100_nvswitch)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    seen = topology.visible(environ)
    assert [d.uuid for d in seen.devices] == expected
    assert len(seen.pairs) == len(expected) * (len(expected) - 1) // 2


def test_the_order_of_mixed_cards_is_a_guess_unless_it_is_by_bus(box):
    topology = box(fake_nvml.mixed_4080_4090)
    by_speed = topology.visible({})
    assert [d.name[-4:] for d in by_speed.devices] == ["4090", "4080"]
    assert "CUDA_DEVICE_ORDER" in by_speed.notes[-1]
    by_bus = topology.visible({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert [d.name[-4:] for d in by_bus.devices] == ["4080", "4090"]
    assert by_bus.notes == ()
    named = topology.visible({"CUDA_VISIBLE_DEVICES": f"{UUIDS[0]},{UUIDS[1]}"})
    assert named.notes == () and [d.uuid for d in named.devices] == UUIDS[:2]


def test_devices_are_found_by_the_uuid_that_torch_prints(box):
    topology = box(fake_nvml.h100_nvswitch)
    chosen = topology.select([UUIDS[6].removeprefix("GPU-"), UUIDS[2].upper()])
    assert [d.uuid for d in chosen.devices] == [UUIDS[6], UUIDS[2]]
    with pytest.raises(DeviceError, match="not among"):
        topology.select(["GPU-ffff"])
    with pytest.raises(DeviceError, match="several"):
        topology.select(["GPU-0000"])


def test_questions_that_a_driver_does_not_know_leave_gaps_not_errors(tmp_path):
    nvml = fake_nvml.l40_two_sockets()

    def unknown(*_):
        raise fake_nvml.NVMLError("Not Supported")

    for name in ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNumaNodeId"):
        setattr(nvml, name, unknown)
    topology = _read(nvml, tmp_path)
    assert {(p.path, p.peer) for _, _, p in topology.pairs} == {("unknown", None)}
    assert topology.devices[0].numa is None


def test_nvml_is_closed_also_when_a_question_fails(tmp_path):
    nvml = fake_nvml.two_4090()
    _read(nvml, tmp_path)
    assert nvml.open == 0

    def fails(handle):
        raise fake_nvml.NVMLError("GPU is lost")

    nvml.nvmlDeviceGetUUID = fails
    with pytest.raises(fake_nvml.NVMLError):
        _read(nvml, tmp_path)
    assert nvml.open == 0


def test_without_a_gpu_ranks_run_on_the_cpu(tmp_path, monkeypatch):
    nvml = fake_nvml.two_4090()

    def no_driver():
        raise fake_nvml.NVMLError("Driver Not Loaded")

    nvml.nvmlInit = no_driver
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    topology = _read(nvml, tmp_path)
    assert topology.devices == () and topology.kind == "gloo on CPU"
    assert "gloo" in topology.describe()


def test_rocm_asks_torch(monkeypatch, tmp_path):
    from types import SimpleNamespace

    nvml = fake_nvml.two_4090()
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(fake_nvml.NVMLError("Library Not Found"))
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", total_memory=192 * 10**9, major=9, minor=4, uuid=None
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: properties)
    monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr("torch.version.hip", "6.2")
    topology = _read(nvml, tmp_path)
    assert topology.source == "torch" and [d.uuid for d in topology.devices] == ["cuda:0", "cuda:1"]
    assert [p.peer for _, _, p in topology.pairs] == [True]


def test_facts_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology(()).devices = ()

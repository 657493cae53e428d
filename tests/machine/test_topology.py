"""The topology read from a fake NVML that answers like real machines, in CUDA's order of devices."""

from types import SimpleNamespace

import pytest

import fake_nvml
from parallel_backend.errors import DeviceError
from parallel_backend.machine.local import largest_joinable_count, neighbours_first
from parallel_backend.machine.probe import read_topology, read_visible

GIB = 1024**3


def _read(nvml, tmp_path):
    return read_topology(nvml, sys_root=tmp_path)


def _fails(nvml, *names, error="Unknown Error"):
    """Returns an NVML that answers these questions with an error."""

    def fail(*_):
        raise nvml.NVMLError(error)

    for name in names:
        setattr(nvml, name, fail)
    return nvml


@pytest.fixture
def box(tmp_path):
    return lambda shape: _read(shape(), tmp_path)


def test_eight_h100_behind_nvswitch(box):
    topology = box(fake_nvml.h100_nvswitch)
    assert len(topology.devices) == 8 and len(topology.pairs) == 28
    assert {(p.path, p.peer, p.rate) for _, _, p in topology.pairs} == {("NVSWITCH", True, 450.0)}
    assert [d.numa for d in topology.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology.devices[0].capability == (9, 0)
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
    # Bridged cards become neighbouring ranks, in whatever order the devices are given.
    ids = [d.uuid for d in topology.devices]
    shuffled = topology.select([ids[0], ids[2], ids[1], ids[3]])
    assert neighbours_first(shuffled) == (ids[0], ids[1], ids[2], ids[3])


def test_sockets_and_cards_that_differ_are_said(box):
    topology = box(fake_nvml.l40_two_sockets)
    assert topology.kind == "SYS" and "over 2 NUMA nodes" in topology.describe()
    mixed = box(fake_nvml.mixed_4080_4090)
    assert mixed.mixed and "differ" in mixed.describe()


def test_mig_slices_replace_their_gpu_and_have_no_peer_access(box):
    topology = box(fake_nvml.mig)
    assert [d.is_mig for d in topology.devices] == [True, True]
    assert {d.parent for d in topology.devices} == {"GPU-00000000-aaaa-bbbb-cccc-000000000000"}
    assert [(p.path, p.peer) for _, _, p in topology.pairs] == [("MIG", False)]
    assert any("has no slice" in note for note in topology.notes)
    assert any("2 MIG slices" in note for note in topology.notes)
    assert largest_joinable_count(topology, 2) == 1


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
        ("0,99,1", [UUIDS[0]]),  # CUDA stops at the first entry that it does not know
        ("GPU-0000000", []),  # matches all of them
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
    questions = ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetNumaNodeId")
    nvml = _fails(fake_nvml.l40_two_sockets(), *questions)
    topology = _read(nvml, tmp_path)
    assert {(p.path, p.peer) for _, _, p in topology.pairs} == {("unknown", None)}
    assert topology.devices[0].numa is None


def test_a_gpu_that_is_lost_hides_no_other(tmp_path):
    nvml = fake_nvml.a6000_pairs()
    nvml.boards[1].is_lost = True
    topology = _read(nvml, tmp_path)
    assert [device.index for device in topology.devices] == [0, 2, 3] and len(topology.pairs) == 3
    assert "GPU 1 does not answer (GPU is lost)" in topology.notes[0]
    assert nvml.open == 0


def test_slices_are_told_where_only_root_may_ask_for_the_memory_of_their_gpu(tmp_path):
    nvml = fake_nvml.mig()
    for board in nvml.boards:
        board.tells_memory = False
    assert [device.memory for device in _read(nvml, tmp_path).devices] == [int(39.5 * GIB)] * 2


def test_nvml_is_closed_also_when_a_question_fails(tmp_path):
    nvml = _fails(fake_nvml.two_4090(), "nvmlDeviceGetCount")
    with pytest.raises(fake_nvml.NVMLError):
        _read(nvml, tmp_path)
    assert nvml.open == 0


def _without_nvml(nvml):
    return _fails(nvml, "nvmlInit", error="Library Not Found")


def test_without_a_gpu_ranks_run_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    topology = _read(_without_nvml(fake_nvml.two_4090()), tmp_path)
    assert topology.devices == () and topology.kind == "gloo on CPU"
    assert "gloo" in topology.describe()


@pytest.fixture
def torch_sees(monkeypatch):
    """Returns a function that makes torch.cuda report these devices: (name, memory in GiB, uuid)."""

    def see(*devices, hip=None):
        known = [
            SimpleNamespace(name=name, total_memory=int(size * GIB), major=8, minor=9, uuid=uuid)
            for name, size, uuid in devices
        ]
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(known))
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: known[i])
        monkeypatch.setattr("torch.cuda.can_device_access_peer", lambda a, b: True)
        monkeypatch.setattr("torch.version.hip", hip)

    return see


def test_rocm_asks_torch(torch_sees, tmp_path):
    torch_sees(("AMD Instinct MI300X", 192, None), ("AMD Instinct MI300X", 192, None), hip="6.2")
    topology = _read(_without_nvml(fake_nvml.two_4090()), tmp_path)
    assert topology.source == "torch" and [d.uuid for d in topology.devices] == ["cuda:0", "cuda:1"]
    assert [p.peer for _, _, p in topology.pairs] == [True]


def test_without_nvml_torch_tells_memory_and_names_of_cuda_devices(torch_sees, tmp_path):
    torch_sees(("RTX 4090", 24, UUIDS[1]), ("RTX 4080", 16, UUIDS[0]))
    topology = _read(_without_nvml(fake_nvml.mixed_4080_4090()), tmp_path)
    assert [(d.name, d.memory, d.uuid) for d in topology.devices] == [
        ("RTX 4090", 24 * GIB, UUIDS[1]),
        ("RTX 4080", 16 * GIB, UUIDS[0]),
    ]
    assert topology.pairs[0][2].peer is None, "to ask for peer access may take a context on each device"


def test_what_torch_numbers_is_not_cut_down_by_the_environment_once_more(torch_sees, tmp_path):
    torch_sees(("RTX 4090", 24, UUIDS[2]), ("RTX 4090", 24, UUIDS[3]))
    topology = _read(_without_nvml(fake_nvml.two_4090()), tmp_path)
    assert topology.visible({"CUDA_VISIBLE_DEVICES": "2,3"}) == topology


def test_devices_are_in_torchs_order_whatever_the_order_of_mixed_cards_was_guessed_to_be(torch_sees):
    nvml = fake_nvml.mixed_4080_4090()
    nvml.boards.append(
        fake_nvml.Board("NVIDIA GeForce RTX 3090", 23.99, (8, 6), "00000000:2B:00.0", uuid=UUIDS[2])
    )
    # CUDA puts the fastest one first, and promises no order of the others.
    torch_sees(*(("", 0, UUIDS[i].removeprefix("GPU-")) for i in (1, 2, 0)))
    seen = read_visible(nvml)
    assert [device.name[-4:] for device in seen.devices] == ["4090", "3090", "4080"]
    assert not seen.notes and len(seen.pairs) == 3
    guessed = read_topology(nvml).visible({})
    assert [device.name[-4:] for device in guessed.devices] == ["4090", "4080", "3090"]


@pytest.mark.parametrize("runs_cuda", [False, True])
def test_a_process_that_uses_no_cuda_is_not_made_to_for_cards_that_are_alike(
    torch_sees, monkeypatch, runs_cuda
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # may have changed if torch already runs CUDA
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: runs_cuda)
    torch_sees(("", 0, UUIDS[3].removeprefix("GPU-")))
    seen = [device.uuid for device in read_visible(fake_nvml.h100_nvswitch(4)).devices]
    assert seen == ([UUIDS[3]] if runs_cuda else UUIDS[:2])


def test_slices_that_cuda_tells_by_their_gpu_are_taken_from_the_environment(torch_sees, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    torch_sees(("H100", 40, UUIDS[0].removeprefix("GPU-")))
    assert [device.is_mig for device in read_visible(fake_nvml.mig()).devices] == [True, True]

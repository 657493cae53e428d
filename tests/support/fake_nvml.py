"""A stand-in for nvidia-ml-py: its function names, and answers as `nvidia-smi topo -m` shows them on real machines."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import SimpleNamespace

PIX, PHB, NODE, SYS = 10, 30, 40, 50  # NVML_TOPOLOGY_*
GPU, SWITCH = 0, 2
GIB = 1024**3


class NVMLError(Exception):
    pass


@dataclass(eq=False)
class Board:
    """One GPU as NVML describes it. `links`: the device at the other end of each of its NVLinks."""

    name: str
    memory_gib: float
    capability: tuple[int, int]
    bus: str
    numa: int = 0
    pcie: tuple[int, int] = (4, 16)
    links: list[tuple[int, str]] = field(default_factory=list)  # (device type, bus id)
    link_version: int = 0
    slices: list[tuple[str, float]] | None = None  # MIG: (profile name, GiB)
    uuid: str = ""
    used_gib: float = 0.0  # by all programs
    is_lost: bool = False  # fell off the bus
    tells_memory: bool = True  # False: in MIG mode, if the caller is not root
    compute_mode: int = 0  # nvmlComputeMode_t
    programs: dict[int, float] = field(default_factory=dict)  # GiB by process id


class FakeNvml:
    """A machine with `boards`, which are also their handles. `paths`: (i, j) -> path level; `peers`: True if peer
    access works; `bytes_text`: True to give text as bytes, as old versions of the library do."""

    NVMLError = NVMLError

    def __init__(self, boards, paths, peers, bytes_text=False):
        self.boards, self.paths, self.peers, self.bytes_text = boards, paths, peers, bytes_text
        self.open = 0
        for i, board in enumerate(boards):
            board.uuid = board.uuid or f"GPU-{i:08x}-aaaa-bbbb-cccc-{i:012x}"

    def _text(self, text):
        return text.encode() if self.bytes_text else text

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return self._text("550.54.15")

    def nvmlDeviceGetCount(self):
        return len(self.boards)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.boards[index].is_lost:
            raise NVMLError("GPU is lost")
        return self.boards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        for board in self.boards:
            if board.uuid == uuid:
                return board
        raise NVMLError("Not Found")

    nvmlDeviceGetCudaComputeCapability = attrgetter("capability")
    nvmlDeviceGetComputeMode = attrgetter("compute_mode")
    nvmlDeviceGetNumaNodeId = attrgetter("numa")

    def nvmlDeviceGetUUID(self, board):
        return self._text(board.uuid)

    def nvmlDeviceGetName(self, board):
        return self._text(board.name)

    def nvmlDeviceGetMemoryInfo(self, board):
        if not board.tells_memory:
            raise NVMLError("Insufficient Permissions")
        total, used = int(board.memory_gib * GIB), int(board.used_gib * GIB)
        return SimpleNamespace(total=total, free=total - used, used=used)

    def nvmlDeviceGetUtilizationRates(self, board):
        return SimpleNamespace(gpu=10 * (self.boards.index(board) + 1), memory=0)

    def nvmlDeviceGetComputeRunningProcesses(self, board):
        return [
            SimpleNamespace(pid=pid, usedGpuMemory=int(size * GIB) or None)
            for pid, size in board.programs.items()
        ]

    def nvmlDeviceGetTemperature(self, board, sensor):
        return 40 + self.boards.index(board)

    def nvmlDeviceGetPowerUsage(self, board):
        if "GeForce" in board.name:
            raise NVMLError("Not Supported")
        return 250_500 + self.boards.index(board)  # mW

    def nvmlDeviceGetEnforcedPowerLimit(self, board):
        return 700_000

    def nvmlDeviceGetPciInfo(self, board):
        return SimpleNamespace(busId=self._text(board.bus))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, board):
        return board.pcie[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, board):
        return board.pcie[1]

    def nvmlDeviceGetNvLinkState(self, board, link):
        if not board.links:
            raise NVMLError("Not Supported")
        return int(link < len(board.links))

    def nvmlDeviceGetNvLinkVersion(self, board, link):
        return board.link_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, board, link):
        return board.links[link][0]

    def nvmlDeviceGetNvLinkRemotePciInfo(self, board, link):
        return SimpleNamespace(busId=self._text(board.links[link][1]))

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return self.paths(self.boards.index(one), self.boards.index(other))

    def nvmlDeviceGetP2PStatus(self, one, other, index):
        return 0 if self.peers else 1  # 1: CHIPSET_NOT_SUPPORTED

    def nvmlDeviceGetMigMode(self, board):
        if board.capability < (8, 0) or "RTX" in board.name:
            raise NVMLError("Not Supported")
        return (int(board.slices is not None),) * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, board):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, board, index):
        if index >= len(board.slices):
            raise NVMLError("Not Found")
        profile, size = board.slices[index]
        uuid = f"MIG-{self.boards.index(board):04x}{index:04x}-1111-2222"
        return replace(
            board, name=f"{board.name} MIG {profile}", memory_gib=size, uuid=uuid, tells_memory=True
        )


def _bus(i):
    return f"00000000:{0x1B + 8 * i:02X}:00.0"


def h100_nvswitch(count=8):
    switches = [(SWITCH, f"00000000:{s:02X}:00.0") for s in (3, 4, 5, 6) for _ in range(5)][:18]
    boards = [
        Board("NVIDIA H100 80GB HBM3", 79.65, (9, 0), _bus(i), i // 4, (5, 16), switches, 6)
        for i in range(count)
    ]
    return FakeNvml(boards, lambda a, b: NODE if a // 4 == b // 4 else SYS, True)


def two_4090():
    boards = [Board("NVIDIA GeForce RTX 4090", 23.99, (8, 9), _bus(i)) for i in range(2)]
    return FakeNvml(boards, lambda a, b: PHB, False, bytes_text=True)


def a6000_pairs():
    boards = [
        Board("NVIDIA RTX A6000", 47.99, (8, 6), _bus(i), i // 2, (4, 16), [(GPU, _bus(i ^ 1))] * 4, 5)
        for i in range(4)
    ]
    return FakeNvml(boards, lambda a, b: NODE if a // 2 == b // 2 else SYS, True)


def l40_two_sockets():
    boards = [Board("NVIDIA L40", 44.99, (8, 9), _bus(i), i // 4) for i in range(8)]

    def path(a, b):
        return PIX if a // 2 == b // 2 else NODE if a // 4 == b // 4 else SYS

    return FakeNvml(boards, path, True)


def mixed_4080_4090():
    boards = [
        Board("NVIDIA GeForce RTX 4080", 15.99, (8, 9), _bus(0)),
        Board("NVIDIA GeForce RTX 4090", 23.99, (8, 9), _bus(1)),
    ]
    return FakeNvml(boards, lambda a, b: PHB, False)


def mig():
    cut = [("3g.40gb", 39.5), ("3g.40gb", 39.5)]
    boards = [
        Board("NVIDIA H100 80GB HBM3", 79.65, (9, 0), _bus(0), 0, (5, 16), slices=cut),
        Board("NVIDIA H100 80GB HBM3", 79.65, (9, 0), _bus(1), 0, (5, 16), slices=[]),
    ]
    return FakeNvml(boards, lambda a, b: NODE, True)

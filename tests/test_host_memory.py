"""Host memory: the computer's, or the smallest limit of the control groups around this process."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mapped_files import resident_bytes
from parallel_backend.host_memory import give_back_pages, host_memory

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")

    def limit(group: str, value: object, mount: str = "mount", name: str = "memory.max") -> int:
        folder = tmp_path / mount / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{value}\n")
        return host_memory(tmp_path / "mount", own)

    return limit, own


def test_a_containers_limit_is_the_computers_memory(cgroups, tmp_path):
    limit, _ = cgroups
    total = limit("", "max")
    assert host_memory() > 2**20
    assert limit("", GIB) == GIB < total == host_memory(tmp_path / "absent", tmp_path / "absent")


def test_the_least_of_nested_groups_counts_wherever_it_stands(cgroups):
    limit, own = cgroups
    own.write_text("0::/user/session\n")
    assert limit("user/session", "max") == limit("", "max")
    assert limit("user", 2 * GIB) == 2 * GIB
    assert limit("user/session", GIB) == GIB
    assert limit("user", GIB // 2) == GIB // 2
    # A container may read a path that exists only on the host.
    own.write_text("0::/of/the/host\n")
    assert limit("", GIB // 4) == GIB // 4


def test_version_one_has_a_controller_of_its_own(cgroups):
    limit, own = cgroups
    own.write_text("9:cpu,memory:/box\n0::/\n")
    name = "memory.limit_in_bytes"
    total = limit("memory/box", 2**63 - 4096, name=name)
    assert limit("memory/box", GIB, name=name) == GIB < total


def test_pages_of_a_file_are_given_back_and_come_again_and_what_was_written_stays(tmp_path):
    path, other = (str(tmp_path / name) for name in ("a.safetensors", "b.safetensors"))
    numbers = torch.arange(1_000_000, dtype=torch.float32)
    opened = []
    for file in (path, other):
        save_file({"numbers": numbers}, file)
        opened.append(safe_open(file, framework="pt", device="cpu"))
    mapped, beside = (file.get_tensor("numbers") for file in opened)
    assert torch.equal(mapped, numbers) and torch.equal(beside, numbers)
    give_back_pages(path)
    assert resident_bytes(path) == 0 < numbers.nbytes <= resident_bytes(other)
    assert torch.equal(mapped, numbers)
    mapped[7] = -1
    give_back_pages(path)
    assert mapped[7] == -1 and mapped[8] == 8
    give_back_pages(other, tmp_path / "absent")  # not on Linux
    assert resident_bytes(other) >= numbers.nbytes

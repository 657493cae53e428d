"""Weights copied by large reads have the mapped file's bytes, whichever part of a tensor is requested."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from parallel_backend.errors import CheckpointError
from parallel_backend.models import staging
from parallel_backend.models.diffusers import load as flux
from parallel_backend.models.staging import StagedReader, staged_reader
from parallel_backend.requests import ModelSpec
from tiny_flux import write_tiny_flux

CPU = torch.device("cpu")


@pytest.fixture
def opened(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(37, 11, generator=generator).to(torch.bfloat16),
        "b": torch.randn(29, 13, generator=generator).to(torch.float8_e4m3fn),
        "c": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
    }
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    with safe_open(path, framework="pt", device="cpu") as file:
        yield path, file


def _same(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    return torch.equal(found.contiguous().view(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


# Neither elements nor tensors need end where a read does.
@pytest.mark.parametrize("piece", [7, 256, 1 << 20])
def test_whole_tensors_and_rows_of_them_are_read_from_the_file(opened, piece):
    path, file = opened
    with StagedReader(path, file, CPU, piece) as reader:
        wanted = 0
        for name in ("a", "b", "c"):
            mapped = file.get_tensor(name)
            for part in (mapped, mapped[5:17] if mapped.ndim else mapped):
                found = reader.to_device(part)
                assert _same(found, part) and found.data_ptr() != part.data_ptr()
                wanted += part.nbytes
        assert reader.bytes_read == wanted
        assert reader.to_device(file.get_tensor("nothing")).shape == (0, 4)


def test_what_is_no_run_of_bytes_of_the_file_is_copied_as_ever(opened):
    path, file = opened
    with StagedReader(path, file, CPU) as reader:
        columns, other = file.get_tensor("a")[:, 2:5], torch.randn(4)
        assert _same(reader.to_device(columns), columns) and _same(reader.to_device(other), other)
        assert reader.bytes_read == 0


def test_a_file_that_became_shorter_is_refused_in_words(opened):
    path, file = opened
    with StagedReader(path, file, CPU) as reader:
        mapped = file.get_tensor("a")
        os.truncate(path, 100)
        with pytest.raises(CheckpointError, match=r"weights\.safetensors became shorter while it was read"):
            reader.to_device(mapped)


def test_on_the_cpu_weights_stay_in_the_mapping(opened):
    path, file = opened
    with staged_reader(path, file, CPU) as reader:
        assert reader is None


def test_flux_loads_the_same_weights_by_large_reads(tmp_path, monkeypatch):
    path = write_tiny_flux(tmp_path / "flux.safetensors")
    expected = flux.load(ModelSpec(path), CPU).chunks[0].state_dict()
    readers: list[StagedReader] = []

    def as_on_a_gpu(path, opened, device):
        readers.append(staging.StagedReader(path, opened, device, piece=1000))
        return readers[0]

    monkeypatch.setattr(flux, "staged_reader", as_on_a_gpu)
    found = flux.load(ModelSpec(path), CPU).chunks[0].state_dict()
    assert found.keys() == expected.keys()
    assert all(_same(found[name], expected[name]) for name in expected)
    assert readers[0].bytes_read == sum(tensor.nbytes for tensor in found.values())


def test_what_was_written_to_is_not_read_from_the_file_again(opened):
    path, file = opened
    with StagedReader(path, file, CPU) as reader:
        changed = file.get_tensor("a")
        changed[5:7] += 1
        assert _same(reader.to_device(changed[4:9]), changed[4:9]) and reader.bytes_read == 0

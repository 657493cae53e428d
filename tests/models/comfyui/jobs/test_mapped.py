"""Other model files of a job: a rank maps their values from the file, and refuses a file that has changed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from comfy_modules import import_comfyui_here
from mapped_files import is_mapped, mapped_ranges
from parallel_backend.errors import CheckpointError, RequestError
from parallel_backend.job.tensors import print_of
from parallel_backend.models.comfyui.jobs.mapped import MappedFiles
from parallel_backend.requests import ModelSpec
from parallel_backend.wire.file_identity import read_identity
from tiny_flux import write_tiny_flux

WEIGHT = "diffusion_model.img_in.weight"


@pytest.fixture
def spec(tmp_path):
    source = import_comfyui_here()
    return ModelSpec(str(write_tiny_flux(tmp_path / "second.safetensors")), "comfyui", "auto", source)


def test_what_a_job_names_lies_in_the_files_pages(spec):
    models, identity = MappedFiles(print_of), read_identity(spec.path)
    weight = models.find(spec, identity, "param", WEIGHT)
    assert is_mapped(spec.path, weight)
    assert torch.equal(weight, load_file(spec.path)["img_in.weight"])
    layer = models.find(spec, identity, "module", "diffusion_model.img_in")
    assert layer.weight is weight
    models.forget_unused()
    assert models.find(spec, identity, "param", WEIGHT) is weight, "the same for the next job"
    models.forget_unused()
    models.forget_unused()
    assert models.find(spec, identity, "param", WEIGHT) is not weight, "a job without it has let it go"


def test_a_tensor_lies_in_the_files_pages_and_writing_leaves_the_file_alone(spec):
    files, identity = MappedFiles(print_of), read_identity(spec.path)
    before = Path(spec.path).read_bytes()
    tensor = files.find_tensor(spec.path, identity, "img_in.weight", 1)
    assert is_mapped(spec.path, tensor)
    files.forget_unused()
    assert files.find_tensor(spec.path, identity, "img_in.weight", 1) is tensor, "the same for the next job"
    tensor.data.zero_()
    assert Path(spec.path).read_bytes() == before
    assert files.find_tensor(spec.path, identity, "img_in.weight", 1) is tensor, "its own, as it left it"
    other = files.find_tensor(spec.path, identity, "img_in.weight", 2)
    assert other.count_nonzero() and not tensor.count_nonzero()
    assert files.find_tensor(spec.path, identity, "img_in.weight", 3) is other, "which nobody has written to"
    del tensor, other
    files.forget_unused()
    files.forget_unused()
    assert mapped_ranges(spec.path) == []


def test_another_file_at_its_place_is_refused(spec):
    identity = read_identity(spec.path)
    write_tiny_flux(spec.path, seed=5)
    with pytest.raises(
        CheckpointError, match=r"second\.safetensors changed while a job with its weights was sent"
    ):
        MappedFiles(print_of).find(spec, identity, "param", WEIGHT)
    with pytest.raises(CheckpointError, match="Run the prompt again"):
        MappedFiles(print_of).find_tensor(spec.path, identity, "img_in.weight", 1)


def test_what_no_model_has_is_refused(spec):
    with pytest.raises(RequestError, match="which no device has"):
        MappedFiles(print_of).find(spec, read_identity(spec.path), "code", "os.system")

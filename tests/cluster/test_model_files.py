"""A weights file is found by its name and content in any folder; a different file with its name is not used."""

from pathlib import Path, PurePosixPath

import pytest

from parallel_backend.cluster.model_files import content_of, find_model
from parallel_backend.errors import CheckpointError
from tiny_flux import write_tiny_flux

HEAD = PurePosixPath("/home/me/ComfyUI/models/diffusion_models/flux/a.safetensors")


@pytest.fixture
def content(tmp_path):
    return content_of(write_tiny_flux(tmp_path / "head" / "a.safetensors"))


def test_it_is_found_by_the_longest_end_of_its_path(content, tmp_path):
    folder, other = tmp_path / "models", tmp_path / "other"
    for place in ("a.safetensors", "flux/a.safetensors"):
        write_tiny_flux(folder / place)
        assert find_model((other, folder), HEAD, content, "b") == folder / place


def test_one_of_another_content_is_passed_over_and_named_where_it_is_the_only_one(content, tmp_path):
    folder = tmp_path / "models"
    tuned = write_tiny_flux(folder / "flux" / "a.safetensors", seed=1)  # same size, same header
    assert content_of(tuned).size == content.size and content_of(tuned) != content
    with pytest.raises(
        CheckpointError,
        match=r"Machine b has another file .*flux/a\.safetensors.*Copy that one to the machine",
    ):
        find_model((folder,), HEAD, content, "b")
    right = write_tiny_flux(folder / "a.safetensors")
    assert find_model((folder,), HEAD, content, "b") == right


def test_what_is_missing_is_named_with_machine_and_remedy(content, tmp_path):
    with pytest.raises(CheckpointError, match=r"Machine b has no a\.safetensors \(searched .*\)"):
        find_model((tmp_path / "models",), HEAD, content, "b")
    with pytest.raises(CheckpointError, match="Machine b was started without --models"):
        find_model((), HEAD, content, "b")
    with pytest.raises(CheckpointError, match="cannot be read"):
        content_of(tmp_path / "nothing")


def test_the_demo_s_model_is_the_packs_own_and_another_one_of_its_name_is_not(content, tmp_path):
    demo = Path(__file__).parents[2] / "demo_model" / "transformer.safetensors"
    assert find_model((), PurePosixPath(demo), content_of(demo), "b") == demo
    with pytest.raises(
        CheckpointError, match=r"Machine b has no transformer\.safetensors \(searched [^,]*models\)"
    ):
        find_model((tmp_path / "models",), PurePosixPath("/head/transformer.safetensors"), content, "b")


def test_a_file_that_is_no_safetensors_has_a_content_too(tmp_path):
    file = tmp_path / "short"
    for data in (b"", b"abc", b"\xff" * 64):
        file.write_bytes(data)
        assert content_of(file).size == len(data)

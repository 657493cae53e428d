"""Tensors of a job are found in the files that its prompt names, as long as neither tensor nor file has changed."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pack_nodes import module_fixture

_WIDE = (64, 512)  # in float16 64 KiB, the smallest size that is searched for


module = module_fixture("nodes.job.file_tensors")


@pytest.fixture
def found_in(module, tmp_path, monkeypatch):
    """Returns a function that searches for a tensor as a job does whose prompt names the given files."""
    import folder_paths

    monkeypatch.setitem(
        folder_paths.folder_names_and_paths, "controlnet", ([str(tmp_path)], {".safetensors"})
    )

    def search(tensor: torch.Tensor, *names: object, model: str = "") -> str | None:
        prompt = {str(place): {"inputs": {"file": name}} for place, name in enumerate(names)}
        place = module.FileTensors(prompt, model).find(tensor)
        return None if place is None else place.name

    return search


@pytest.fixture
def weights(tmp_path) -> dict[str, torch.Tensor]:
    """Writes a file with two tensors of one shape and a small one, and returns them."""
    draw = torch.Generator().manual_seed(1)
    wide = {name: torch.randn(_WIDE, generator=draw).half() for name in ("first", "second")}
    weights = {**wide, "small": torch.randn(8, generator=draw)}
    save_file(weights, tmp_path / "control.safetensors")
    return weights


def test_weights_are_found_by_their_values(found_in, weights):
    for name in ("first", "second"):
        assert found_in(nn.Parameter(weights[name].clone()), "control.safetensors") == name
    with torch.inference_mode():
        assert found_in(weights["first"].clone(), 7, ["1", 0], [1, 2, 3], "control.safetensors") == "first"


def test_what_is_small_or_other_or_of_no_named_file_is_sent(found_in, weights, tmp_path):
    first = weights["first"]
    assert found_in(weights["small"].clone(), "control.safetensors") is None
    assert found_in(first.float(), "control.safetensors") is None, "of another dtype"
    assert found_in(first.t(), "control.safetensors") is None, "not as it lies in the file"
    changed = first.clone()
    changed[3, 5] += 1
    assert found_in(changed, "control.safetensors") is None, "of 32,768 values one is another"
    assert found_in(first.clone()) is None
    assert found_in(first.clone(), "other.safetensors", "control.ckpt") is None
    own = str(tmp_path / "control.safetensors")  # the ranks have the job's own model by its name
    assert found_in(first.clone(), "control.safetensors", model=own) is None


def test_nothing_of_a_file_is_read_for_a_tensor_of_another_form(module, found_in, weights, monkeypatch):
    monkeypatch.setattr(module, "find_identity", lambda path: pytest.fail("a prompt is no weight"))
    assert found_in(torch.randn(1, 64, 512).half(), "control.safetensors") is None
    assert found_in(weights["first"].float(), "control.safetensors") is None


def test_of_two_tensors_of_the_same_values_the_second_is_sent(module, found_in, weights):
    """In the ranks a node may write to one of them, and must not change the other."""
    prompt = {"1": {"inputs": {"file": "control.safetensors"}}}
    search = module.FileTensors(prompt, "")
    mine, copy = weights["first"].clone(), weights["first"].clone()
    assert search.find(mine).name == "first" and search.find(copy) is None
    assert search.find(mine) == module.FileTensors({}, "").find(mine), "for as long as it lives, in any job"
    number = search.find(mine).number
    assert module.FileTensors(prompt, "").find(copy).number != number


def test_what_was_found_is_known_in_prompts_that_do_not_name_the_file(found_in, weights):
    mine = weights["first"].clone()
    assert found_in(mine, "control.safetensors") == "first"
    assert found_in(mine) == "first"
    mine.mul_(2)
    assert found_in(mine) is None, "written into since"


def test_a_file_that_was_replaced_is_no_longer_the_tensors(found_in, weights, tmp_path):
    mine = weights["first"].clone()
    assert found_in(mine, "control.safetensors") == "first"
    save_file({"first": weights["second"]}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").replace(tmp_path / "control.safetensors")
    assert found_in(mine, "control.safetensors") is None
    (tmp_path / "control.safetensors").unlink()
    assert found_in(mine, "control.safetensors") is None


def test_a_file_that_is_none_of_safetensors_holds_nothing(found_in, weights, tmp_path):
    (tmp_path / "control.safetensors").write_bytes(b"{}" * 100)
    assert found_in(weights["first"], "control.safetensors") is None

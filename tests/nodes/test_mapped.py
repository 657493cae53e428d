"""The words by which ranks find mapped weights and layers: for objects that are alive and files that are unchanged."""

import gc

from comfy_modules import import_comfyui_here
from pack_nodes import module_fixture
from parallel_backend.requests import ModelSpec
from tiny_flux import write_tiny_flux

mapped = module_fixture("nodes.model.mapped")


def test_every_weight_and_layer_has_a_word_as_long_as_someone_has_it(mapped, tmp_path):
    file = write_tiny_flux(tmp_path / "second.safetensors")
    base = mapped.map_weights(ModelSpec(str(file), "comfyui", "auto", import_comfyui_here()))
    words = mapped.mapped_words()[0]
    for path, weight in base.named_parameters():
        assert words[id(weight)][0] == "mapped" and words[id(weight)][3:] == ("param", path)
    for path, layer in base.named_modules():
        assert words[id(layer)][3:] == ("module", path)
    kept = base.diffusion_model.img_in.weight
    del base, weight, layer
    gc.collect()
    assert list(mapped.mapped_words()[0]) == [id(kept)], "a merge's patches have this one still"


def test_what_is_mapped_of_a_file_that_was_replaced_is_sent(mapped, tmp_path):
    file = write_tiny_flux(tmp_path / "second.safetensors")
    base = mapped.map_weights(ModelSpec(str(file), "comfyui", "auto", import_comfyui_here()))
    assert id(base.diffusion_model) in mapped.mapped_words()[0]
    write_tiny_flux(tmp_path / "other.safetensors", seed=5).replace(file)
    assert id(base.diffusion_model) not in mapped.mapped_words()[0]
    file.unlink()
    assert id(base.diffusion_model) not in mapped.mapped_words()[0]

"""A pack in the manner of ComfyUI-MultiGPU: it replaces functions that choose devices, move weights, read files and
begin a run, and it cannot be imported in a rank."""

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.sd

import nodes

REPLACED = {
    comfy.model_management: (
        "get_torch_device",
        "text_encoder_device",
        "load_models_gpu",
        "soft_empty_cache",
    ),
    comfy.model_patcher.ModelPatcher: ("partially_load",),
    comfy.sample: ("sample", "sample_custom"),
    comfy.sd: ("load_diffusion_model_state_dict", "load_state_dict_guess_config"),
}
nodes.NODE_CLASS_MAPPINGS["TripleCLIPLoader"]  # ranks have no nodes but those of nodes.py


def _wrapped(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


for owner, names in REPLACED.items():
    for name in names:
        setattr(owner, name, _wrapped(getattr(owner, name)))


class TestPlaces:
    """Tells how many of the functions are this pack's."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("STRING",), "count", "parallel/testing"

    def count(self):
        functions = [getattr(owner, name) for owner, names in REPLACED.items() for name in names]
        return (f"{sum(one.__name__ == 'call' for one in functions)} of {len(functions)}",)


NODE_CLASS_MAPPINGS = {"TestPlaces": TestPlaces}

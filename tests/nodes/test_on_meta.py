"""Models built without memory, including those that compute with values while they are built."""

import pytest
import torch

from pack_nodes import module_fixture

module = module_fixture("nodes.model.header_model")


def test_ace_step_computes_its_codebook_and_has_no_weights(module):
    """ACE-Step reads values of tensors while it is built; tensors on the meta device have none."""
    import comfy.model_base
    import comfy.supported_models

    config = comfy.supported_models.ACEStep15({"audio_model": "ace1.5"})
    with pytest.raises(RuntimeError):
        comfy.model_base.ACEStep15(config, device=torch.device("meta"))
    base = module.build_on_meta(lambda device: comfy.model_base.ACEStep15(config, device=device))
    assert {parameter.device.type for parameter in base.diffusion_model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in base.diffusion_model.parameters()) > 1e9


def test_a_class_that_cannot_be_built_says_why(module):
    def build(device):
        raise RuntimeError("no such attention")

    with pytest.raises(RuntimeError, match="no such attention"):
        module.build_on_meta(build)

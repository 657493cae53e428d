"""What a guider has prepared, as a job for the ranks: samplings of ComfyUI's own are made again from what is sent."""

from __future__ import annotations

import pytest
import torch

from comfy_modules import import_comfyui_here
from loop_jobs import loop_job
from pack_nodes import import_node_module
from parallel_backend.models.comfyui.loop import _sampling
from parallel_backend.wire.loop import loop_request, loop_tensors


@pytest.fixture(scope="module")
def loop():
    import_comfyui_here()
    return import_node_module("nodes.model.loop")


class Config:
    sampling_settings = {"shift": 3.0, "sigma_max": 80.0, "timesteps": 500}  # noqa: RUF012, as ComfyUI has it


def test_every_sampling_of_comfyuis_own_gives_the_same_numbers_on_the_ranks(loop):
    from comfy.model_base import ModelType, model_sampling

    for kind in ModelType:
        sampling = model_sampling(Config(), kind)
        job = loop_request(loop_tensors(loop_job(sampling=loop._described(sampling))))
        made = _sampling(job.sampling)
        assert [c.__name__ for c in type(made).__bases__] == [c.__name__ for c in type(sampling).__bases__], (
            kind
        )
        sigma = torch.tensor([float(sampling.sigma_max) * 0.4])
        x, latent = torch.randn(1, 4, 2, 2), torch.randn(1, 4, 2, 2)
        for name, arguments in {
            "timestep": (sigma,),
            "sigma": (sampling.timestep(sigma),),
            "calculate_input": (sigma, x),
            "calculate_denoised": (sigma, latent, x),
            "noise_scaling": (sigma, x.clone(), latent),
            "inverse_noise_scaling": (sigma, x),
            "percent_to_sigma": (0.3,),
        }.items():
            theirs, ours = (getattr(s, name)(*arguments) for s in (sampling, made))
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), (kind, name)
        for bound in ("sigma_min", "sigma_max"):
            assert float(getattr(made, bound)) == float(getattr(sampling, bound)), kind


def test_a_sampling_with_code_of_its_own_stays_with_comfyui(loop):
    import comfy.model_sampling

    class Changed(comfy.model_sampling.ModelSamplingDiscrete, comfy.model_sampling.EPS):
        def timestep(self, sigma):
            return sigma

    class OtherBase(Changed):
        pass

    for kind in (Changed, OtherBase):
        with pytest.raises(loop.RunsStepwise, match="only ComfyUI knows"):
            loop._described(kind())


def test_a_sampler_of_another_pack_stays_with_comfyui(loop, monkeypatch):
    import comfy.k_diffusion.sampling
    from comfy.samplers import CFGGuider

    def sample_of_theirs(model, x, sigmas):
        return x

    guider = CFGGuider.__new__(CFGGuider)
    for name in ("euler", "of_theirs"):
        monkeypatch.setattr(comfy.k_diffusion.sampling, f"sample_{name}", sample_of_theirs, raising=False)
        with pytest.raises(loop.RunsStepwise, match=f"the sampler {name} is another pack's"):
            loop._check_plain(name, guider, {})

"""The denoise loop over a forward whose maths is known: CFG, masks, partial denoise, callbacks, refusals."""

import pytest
import torch

from parallel_backend.errors import Cancelled, RequestError
from parallel_backend.sampling.denoise import denoise
from point_forward import PointForward, point_prompt, point_request


def test_the_positive_prompt_is_reached():
    result = denoise(PointForward(), point_request(), lambda i, d: None)
    torch.testing.assert_close(result, torch.full((2, 4, 3, 5), 2.0))


def test_cfg_extrapolates_from_uncond_to_cond_in_one_forward():
    forward = PointForward()
    result = denoise(forward, point_request(negative=point_prompt(1.0), cfg=3.0), lambda i, d: None)
    torch.testing.assert_close(
        result, torch.full((2, 4, 3, 5), 1.0 + 3.0 * (2.0 - 1.0)), rtol=1e-5, atol=1e-5
    )
    assert [len(call) for call in forward.calls] == [2] * 4


def test_cfg_of_one_never_evaluates_the_negative_prompt():
    forward = PointForward()
    denoise(forward, point_request(negative=point_prompt(1.0), cfg=1.0), lambda i, d: None)
    assert [len(call) for call in forward.calls] == [1] * 4


def test_outside_the_mask_the_original_is_kept_exactly():
    mask = torch.zeros(2, 1, 3, 5)
    mask[..., :2] = 1
    latent = torch.randn(2, 4, 3, 5)
    result = denoise(PointForward(), point_request(denoise_mask=mask, latent=latent), lambda i, d: None)
    torch.testing.assert_close(result[..., :2], torch.full((2, 4, 3, 2), 2.0))
    torch.testing.assert_close(result[..., 2:], latent[..., 2:], rtol=1e-5, atol=1e-5)


def test_a_partial_denoise_starts_from_the_noised_latent():
    seen = []

    class Spy(PointForward):
        def __call__(self, rows):
            seen.append(rows[0].x.clone())
            return super().__call__(rows)

    request = point_request(sigmas=torch.tensor([0.6, 0.3, 0.0]), latent=torch.full((2, 4, 3, 5), 5.0))
    denoise(Spy(), request, lambda i, d: None)
    torch.testing.assert_close(seen[0], 0.6 * request.noise + 0.4 * request.latent)


def test_sigmas_that_stop_early_return_the_unscaled_latent():
    request = point_request(sigmas=torch.tensor([1.0, 0.5]))
    result = denoise(PointForward(), request, lambda i, d: None)
    torch.testing.assert_close(result * 0.5, 0.5 * request.noise + 0.5 * torch.full_like(request.noise, 2.0))


def test_each_step_reports_its_denoised_latent_once():
    steps = []
    denoise(PointForward(), point_request(sampler="heun"), lambda i, d: steps.append((i, d.mean().item())))
    assert [i for i, _ in steps] == [0, 1, 2, 3]
    assert all(value == pytest.approx(2.0, abs=1e-5) for _, value in steps)


def test_cancelling_from_the_callback_stops_the_loop():
    forward = PointForward()

    def cancel(i, denoised):
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        denoise(forward, point_request(), cancel)
    assert len(forward.calls) == 1


def test_an_unknown_sampler_is_refused_by_name():
    with pytest.raises(RequestError, match="lcm"):
        denoise(PointForward(), point_request(sampler="lcm"), lambda i, d: None)

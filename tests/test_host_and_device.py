"""The tests' stand-in for a device separates its memory from the host's as CUDA does."""

import pytest
import torch
from torch import nn

from host_and_device import DEVICE, HOST, HostAndDevice, on_device


@pytest.fixture
def there():
    with HostAndDevice():
        yield torch.arange(4.0, device=DEVICE)


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (lambda t: t + 1, DEVICE),
        (lambda t: t * torch.tensor(2.0), DEVICE),  # a number
        (lambda t: t.view(2, 2)[0].float(), DEVICE),
        (lambda t: t.double(), DEVICE),
        (lambda t: torch.empty_like(t), DEVICE),
        (lambda t: t.new_zeros(2), DEVICE),
        (lambda t: t[torch.tensor([0, 1])], DEVICE),
        (lambda t: torch.zeros(2).to(t), DEVICE),
        (lambda t: torch.zeros(2).to(t.device, torch.float64), DEVICE),
        (lambda t: on_device([torch.zeros(2)])[0], DEVICE),
        (lambda t: nn.Linear(4, 2).to(DEVICE)(t), DEVICE),
        (lambda t: torch.zeros(4).copy_(t), HOST),
        (lambda t: t.cpu(), HOST),
        (lambda t: t.to("cpu", torch.float64), HOST),
        (lambda t: torch.zeros(2), HOST),
    ],
)
def test_a_tensor_is_where_it_was_made_or_sent(there, make, place):
    assert make(there).device == place


def test_a_copy_leaves_what_was_copied_where_it_is(there):
    host = torch.zeros(2)
    assert (host.to(DEVICE).device, host.device, there.cpu().device, there.device) == (
        DEVICE,
        HOST,
        HOST,
        DEVICE,
    )


@pytest.mark.parametrize(
    "mix",
    [
        lambda t: t + torch.zeros(4),
        lambda t: torch.cat([t, torch.zeros(1)]),
        lambda t: nn.Linear(4, 2)(t),
        lambda t: torch.where(torch.ones(4, dtype=torch.bool), t, t),
    ],
    ids=["add", "cat", "linear", "where"],
)
def test_tensors_of_both_do_not_mix(there, mix):
    with pytest.raises(RuntimeError, match="expected all tensors to be on the same device"):
        mix(there)

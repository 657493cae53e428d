"""Patches of a latent: each has any elements, in any order, or none."""

import torch

from parallel_backend.sampling.image_patches import ElementPatches

SHAPE = torch.Size((2, 3, 2))
OWNERS = torch.tensor([3, 0, 0, 1, 3, 3, 0, 1, 0, 3, 1, 0])  # patch 2 has no elements


def test_what_is_packed_lies_patch_after_patch_and_is_unpacked_as_it_was():
    patches, latent = ElementPatches(OWNERS, SHAPE, 4), torch.randn(2, *SHAPE)
    elements = patches.pack(latent)
    assert len(patches) == 4 and elements.shape == (2, 12)
    assert torch.equal(patches.unpack(elements), latent)
    for number in range(4):
        own = latent.flatten(1)[:, number == OWNERS]
        assert torch.equal(elements[:, patches.span(number)], own)
        assert torch.equal(patches.take(latent, number), own)
    assert patches.span(2) == slice(8, 8)


def test_a_patch_that_is_put_changes_its_own_elements_alone():
    patches, latent = ElementPatches(OWNERS, SHAPE, 4), torch.zeros(2, *SHAPE)
    patches.put(torch.ones(2, 3, dtype=torch.float64), 1, latent)
    assert torch.equal(latent.flatten(1), (OWNERS == 1).float().expand(2, -1))

"""Injected faults that cannot really happen on the machines that run the tests."""

import pytest
import torch

from parallel_backend.wire.checks import fault_injection


def test_a_device_is_filled_no_further_than_it_is_large(monkeypatch):
    """Some drivers, such as WSL2's, continue in host memory, so an allocation never fails."""
    taken = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10 * fault_injection._PIECE + 5))
    monkeypatch.setattr(torch, "empty", lambda size, **_: taken.append(size))
    with pytest.raises(torch.OutOfMemoryError):
        fault_injection.KINDS["fill_device"]()
    assert len(taken) == 10

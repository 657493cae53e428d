"""The error of rounded exchanges in reports is the measured one, and each class whose blocks split tokens has one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comfy_modules import import_comfyui_here
from parallel_backend.models.comfyui.tiny.cases import CASES
from parallel_backend.models.tokens.rounded_drift import DRIFT, drift_in_words
from parallel_backend.models.tokens.table import TABLE
from ranks import run_ranks

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))


def test_every_class_whose_blocks_share_out_tokens_was_measured():
    assert set(DRIFT) == {name for name, entry in TABLE.items() if name in CASES and not entry.bands}


@pytest.mark.parametrize("name", ["Flux", "WanModel", "MMDiT"])
def test_a_class_drifts_as_far_as_is_said(name):
    """The tolerance is 50 %, because torch's random numbers may change with its version."""
    from exchange_drift import STRATEGIES, drift_of_class

    import_comfyui_here()
    measured, _ = run_ranks(drift_of_class, 2, name)
    for way, said in zip(STRATEGIES, DRIFT[name], strict=True):
        assert measured[way] == pytest.approx(said, rel=0.5)


def test_a_class_that_nobody_measured_has_no_words():
    assert drift_in_words("SomeModel", over_a_ring=False) == ""
    words = drift_in_words("Flux", over_a_ring=True)
    assert words == "; a call of a small Flux was off by 0.42 % of its answer (root mean square)"

"""Ranks are looked after as usual where other code of ComfyUI's process collects its ended children, and where all
processes are paused together."""

import pytest

from fault_injection import A_RANK_DIES, CHILDREN_IGNORED, EVERYTHING_PAUSES, REAPING_THREAD
from forked_scripts import run_forked

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.mark.parametrize("elsewhere", [REAPING_THREAD, CHILDREN_IGNORED], ids=["a thread", "the kernel"])
def test_ranks_whose_end_something_else_collects_are_noticed_all_the_same(tmp_path, elsewhere):
    out = run_forked(elsewhere + A_RANK_DIES, tmp_path)
    assert "process 1 failed: " in out
    assert "stopped down" in out


def test_a_pause_of_everything_together_is_no_hang(tmp_path):
    assert "same ranks, paused" in run_forked(EVERYTHING_PAUSES, tmp_path)

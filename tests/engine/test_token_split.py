"""Shares of tokens: complete, and text and image together as even, or as near to their weights, as can be."""

from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.engine.token_split import TokenPlan


@given(text=st.integers(0, 600), image=st.integers(0, 5000), degree=st.integers(1, 16))
def test_text_and_image_together_are_even(text, image, degree):
    plan = TokenPlan.split(text, image, degree)
    assert sum(plan.text) == text and sum(plan.image) == image
    assert max(plan.lengths) - min(plan.lengths) <= 1


@given(
    text=st.integers(0, 600),
    image=st.integers(0, 5000),
    weights=st.lists(st.floats(0.1, 50), min_size=1, max_size=8),
)
def test_weighted_shares_hold_every_token(text, image, weights):
    plan = TokenPlan.split(text, image, len(weights), tuple(weights))
    assert sum(plan.text) == text and sum(plan.image) == image
    assert min(*plan.text, *plan.image) >= 0


def test_weights_share_out_text_and_image_together():
    assert TokenPlan.split(40, 160, 2, (3, 1)).lengths == (150, 50)

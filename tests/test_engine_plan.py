"""Shares of rows and tokens: contiguous, complete, and as even as whole numbers allow."""

from hypothesis import given
from hypothesis import strategies as st

from parallel_backend.engine.plan import TokenPlan, share, span


@given(total=st.integers(0, 5000), parts=st.integers(1, 16))
def test_shares_are_complete_and_differ_by_at_most_one(total, parts):
    sizes = share(total, parts)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1
    covered = [i for part in range(parts) for i in range(*span(sizes, part).indices(total))]
    assert covered == list(range(total))


@given(text=st.integers(0, 600), image=st.integers(0, 5000), degree=st.integers(1, 16))
def test_text_and_image_together_are_even(text, image, degree):
    plan = TokenPlan.split(text, image, degree)
    assert sum(plan.text) == text and sum(plan.image) == image
    assert max(plan.lengths) - min(plan.lengths) <= 1

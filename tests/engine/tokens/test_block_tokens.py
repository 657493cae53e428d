"""Arguments of blocks cut to each rank's tokens: all ranks together hold every token once."""

import pytest
import torch

from parallel_backend.engine.comm.groups import Axis
from parallel_backend.engine.tokens.block_tokens import BlockTokens
from parallel_backend.errors import RequestError
from parallel_backend.models.tokens.regions import Tokens

IMAGE, TEXT = torch.arange(22.0).view(1, 11, 2), -torch.arange(1.0, 11).view(1, 5, 2)


def _ranks(count, weights=()):
    """Returns the BlockTokens of each rank, which know text and image."""
    found = []
    for index in range(count):
        tokens = BlockTokens(Axis(tuple(range(count)), index, None), weights)
        tokens.cut(IMAGE, Tokens("img"))
        tokens.cut(TEXT, Tokens("txt"))
        found.append(tokens)
    return found


@pytest.mark.parametrize("weights", [(), (1.0, 3.0, 2.0)], ids=["equal", "by device"])
def test_shares_are_the_whole(weights):
    ranks = _ranks(3, weights)
    shares = [tokens.cut(IMAGE, Tokens("img")) for tokens in ranks]
    assert torch.equal(torch.cat(shares, 1), IMAGE)
    assert tuple(share.shape[1] for share in shares) == ranks[0].lengths("img")
    assert ranks[0].lengths("img") == ((2, 5, 4) if weights else (4, 4, 3))


def test_one_value_for_all_tokens_and_one_for_each_frame():
    _, middle, _ = _ranks(3)
    for_all = torch.zeros(1, 1, 2)
    assert middle.cut(for_all, Tokens("img", grouped=True)) is for_all
    tokens = BlockTokens(Axis((0, 1), 1, None), ())
    tokens.cut(torch.zeros(1, 6, 2), Tokens("x"))
    frames = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1)
    assert tokens.cut(frames, Tokens("x", grouped=True)).flatten().tolist() == [2.0, 3.0, 3.0]


def test_timesteps_that_do_not_divide_tokens_leave_the_last_one_fewer():
    """With eleven tokens and four timesteps, three timesteps have three tokens and the last has two, as in Wan."""
    shares = [
        tokens.cut(torch.arange(4.0).view(1, 4, 1), Tokens("img", grouped=True)).flatten().tolist()
        for tokens in _ranks(3)
    ]
    assert [time for share in shares for time in share] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    with pytest.raises(RequestError, match="12 tokens where img has 11"):
        _ranks(3)[0].cut(torch.zeros(1, 12, 1), Tokens("img", grouped=True))


def test_other_tokens_than_the_table_says_are_refused():
    tokens = _ranks(3)[0]
    with pytest.raises(RequestError, match="takes 7 tokens where img has 11"):
        tokens.cut(torch.zeros(1, 7, 2), Tokens("img"))
    with pytest.raises(RequestError, match="gave 7 tokens of img where 4 belong"):
        tokens.gather(torch.zeros(1, 7, 2), Tokens("img"))

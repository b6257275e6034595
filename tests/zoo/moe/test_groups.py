"""Groups: which tokens share a decision, what of them the scorer sees, and that padding changes nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zoo.moe.feedforward import FeedForwardExperts
from zoo.moe.gates import SoftmaxGate
from zoo.moe.groups import PerGroup, PerSample, PerSequence, PerWindow
from zoo.moe.layer import MoE
from zoo.moe.losses import balance_loss, z_loss
from zoo.moe.router import Router
from zoo.moe.routing import Context
from zoo.moe.scorers import FeatureScorer, IdentityScorer, LinearScorer
from zoo.moe.selectors import Capacity, TopK

POOLS = ("mean", "last")


def router(groups, experts: int = 5, scorer: nn.Module | None = None) -> Router:
    torch.manual_seed(0)
    made = LinearScorer(4, experts)
    nn.init.normal_(made.out.weight)
    return Router(scorer if scorer is not None else made, TopK(2), groups=groups)


def decisions(groups, shape, context=None):
    return groups(torch.randn(*shape, 4), None, context).members.decision.reshape(shape).tolist()


def test_which_tokens_share_a_decision():
    assert decisions(PerSample(), (2, 3)) == [[0, 0, 0], [1, 1, 1]]
    assert decisions(PerSample(), (2, 2, 2)) == [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]
    assert decisions(PerSequence(), (2, 2, 2)) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    assert decisions(PerSequence(), (3,)) == [0, 0, 0]
    assert decisions(PerWindow(2), (2, 5)) == [[0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]
    assert decisions(PerWindow(9), (2, 3)) == [[0, 0, 0], [1, 1, 1]]
    group = torch.tensor([[1, 0, 1], [2, 2, 0]])
    assert decisions(PerGroup(), (2, 3), Context(group=group)) == group.tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_the_last_window_is_short_where_the_positions_do_not_divide(size):
    x = torch.randn(2, 7, 4)
    windows = [part for row in x for part in row.split(size)]
    for pool, see in (("mean", lambda part: part.mean(0)), ("last", lambda part: part[-1])):
        grouped = PerWindow(size, pool)(x, None, None)
        assert grouped.x.shape == (2, -(-7 // size), 4)
        assert grouped.mask is None
        expected = torch.stack([see(part) for part in windows])
        torch.testing.assert_close(grouped.x.reshape(-1, 4), expected, rtol=0, atol=1e-6)


def test_the_mean_and_the_last_of_the_real_tokens_by_hand():
    x = torch.tensor([[1.0, 2.0, 6.0, 8.0], [3.0, 5.0, 7.0, 9.0]])[..., None]
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    for pool, value in (("mean", 3.5), ("last", 6.0)):
        grouped = PerSequence(pool)(torch.where(mask[..., None], x, 0.0), mask, None)
        assert grouped.x.tolist() == [[value], [0.0]]
        assert grouped.mask.tolist() == [True, False]
        assert torch.equal(grouped.members.mask, mask.flatten())


def test_every_token_follows_the_decision_of_its_group():
    grouped = router(PerWindow(3))(torch.randn(2, 7, 4))
    tokens = grouped.per_token()
    assert grouped.index.shape == (6, 2)
    assert tokens.index.shape == (14, 2)
    for token, decision in enumerate(grouped.members.decision.tolist()):
        for name in ("index", "weight", "valid", "probs", "logits"):
            assert torch.equal(getattr(tokens, name)[token], getattr(grouped, name)[decision])


@pytest.mark.parametrize("pool", POOLS)
def test_a_decision_is_the_one_of_the_pooled_token_by_itself(pool):
    x = torch.randn(3, 6, 4)
    plain = router(None)
    by_group, by_hand = router(PerSequence(pool))(x), plain(x.mean(1) if pool == "mean" else x[:, -1])
    assert torch.equal(by_group.index, by_hand.index)
    torch.testing.assert_close(by_group.weight, by_hand.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("groups", [PerSample, PerSequence, lambda pool: PerWindow(3, pool), PerGroup])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_padded_and_bare_batches_decide_the_same(pool, groups, lengths, seed):
    torch.manual_seed(seed)
    bare = [torch.randn(length, 4) for length in lengths]
    longest = max(lengths) + 2
    x = torch.full((len(bare), longest, 4), torch.nan)
    mask = torch.zeros(len(bare), longest, dtype=torch.bool)
    number = torch.full((len(bare), longest), -7)
    for row, part in enumerate(bare):
        x[row, : len(part)], mask[row, : len(part)], number[row, : len(part)] = part, True, row
    routes = router(groups(pool))
    padded = routes(x, mask, Context(group=number))
    tokens, real = padded.per_token(), mask.flatten()
    assert torch.equal(tokens.valid, real[:, None].expand(-1, 2))
    alone = [(part[None], None, Context(group=torch.zeros(1, len(part), dtype=torch.int64))) for part in bare]
    decided = [routes(*one).per_token() for one in alone]
    assert torch.equal(tokens.index[real], torch.cat([one.index for one in decided]))
    weight = torch.cat([one.weight for one in decided])
    torch.testing.assert_close(tokens.weight[real], weight, rtol=0, atol=1e-6)
    # What the scorer sees is equal to the bit; its products are not, because they depend on the number of rows.
    seen = groups(pool)(torch.where(mask[..., None], x, 0.0), mask, Context(group=number)).x
    pooled = torch.cat([groups(pool)(*one).x.reshape(-1, 4) for one in alone])
    assert torch.equal(seen.reshape(-1, 4)[padded.mask], pooled)


@pytest.mark.parametrize("groups", [PerSequence(), PerWindow(2), PerWindow(2, "last"), PerSample("last")])
def test_a_group_depends_on_no_other_group_of_its_batch(groups):
    routes, x = router(groups), torch.randn(4, 5, 4)
    whole = routes(x).per_token().weight.reshape(4, 5, 2)
    others = torch.randn(4, 5, 4)
    others[2] = x[2]
    assert torch.equal(routes(others).per_token().weight.reshape(4, 5, 2)[2], whole[2])
    assert not routes.depends_on_batch


def test_losses_and_capacity_count_decisions_and_not_tokens():
    x, mask = torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 3:] = False
    grouped = router(PerWindow(3))(x, mask)
    # Window (1, 1) is all padding: three decisions of two choices.
    assert grouped.mask.tolist() == [True, True, True, False]
    assert int(grouped.counts().sum()) == 3 * 2
    bare = router(None)(torch.stack([x[0, :3].mean(0), x[0, 3:].mean(0), x[1, :3].mean(0)]))
    for loss in (balance_loss, z_loss):
        torch.testing.assert_close(loss(grouped), loss(bare), rtol=0, atol=1e-6)
    gate = SoftmaxGate(renormalize=False)
    tight = Router(router(None).scorer, [TopK(1), Capacity(1.0)], gate, groups=PerSequence())
    dropping = tight(torch.ones(4, 3, 4))
    # Four equal decisions for one of five experts, which has room for ceil(4 / 5) = 1.
    assert int(dropping.dropped.sum()) == 3
    assert dropping.per_token().valid.sum() == 3


def test_the_layer_mixes_every_token_by_the_weights_of_its_window():
    bank = FeedForwardExperts(4, 8, 5)
    layer = MoE(router(PerWindow(2)), bank)
    x = torch.randn(3, 5, 4)
    out = layer(x)
    dense = out.routing.dense_weight()[out.routing.members.decision]
    expected = torch.einsum("te,etd->td", dense, bank.every(x.reshape(-1, 4))).reshape(x.shape)
    torch.testing.assert_close(out.y, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pool", POOLS)
def test_the_router_learns_through_the_pooling_and_masked_tokens_have_no_gradient(pool):
    routes = router(PerSequence(pool))
    x = torch.randn(2, 5, 4)
    mask = torch.tensor([[True, True, False, True, False], [False] * 5])
    x[~mask] = torch.nan
    x.requires_grad_()
    routing = routes(x, mask)
    (routing.per_token().weight[:, 0].sum() + routing.logits[routing.mask].square().sum()).backward()
    seen = x.grad.abs().sum(-1) > 0
    assert torch.equal(
        seen, mask if pool == "mean" else torch.tensor([[False] * 3 + [True, False], [False] * 5])
    )
    assert routes.scorer.out.weight.grad.isfinite().all()
    assert routes.scorer.out.weight.grad.abs().max() > 0


def test_features_and_tags_are_one_per_decision():
    features = torch.randn(2, 3, 7)
    scorer = FeatureScorer(LinearScorer(7, 5))
    routing = router(PerWindow(2), scorer=scorer)(torch.randn(2, 5, 4), context=Context(features=features))
    torch.testing.assert_close(routing.logits, scorer.scorer(features).reshape(6, 5))
    tagged = router(PerSequence(), scorer=IdentityScorer(4, 5, 3))
    assert tagged(torch.randn(2, 5, 4), context=Context(ids=torch.tensor([0, 2]))).index.shape == (2, 2)
    with pytest.raises(ValueError, match=r"integers of shape \(2,\)"):
        tagged(torch.randn(2, 5, 4), context=Context(ids=torch.zeros(2, 5, dtype=torch.int64)))


def test_what_stands_in_the_features_and_tags_of_a_masked_decision_is_of_no_account():
    scorer = FeatureScorer(LinearScorer(7, 5))
    routes = router(PerSequence(), scorer=scorer)
    mask = torch.tensor([[True, True], [False, False]])
    features = torch.randn(2, 7)
    features[1] = torch.nan
    routing = routes(torch.randn(2, 2, 4), mask, Context(features=features))
    assert routing.logits.isfinite().all()
    routing.weight[:, 0].sum().backward()
    assert scorer.scorer.out.weight.grad.isfinite().all()
    tagged = router(PerSequence(), scorer=IdentityScorer(4, 5, 3))
    tagged(torch.randn(2, 2, 4), mask, Context(ids=torch.tensor([2, -100])))


def test_a_number_that_no_token_has_makes_a_masked_decision():
    routes = router(PerGroup())
    x = torch.randn(4, 4)
    routing = routes(x, None, Context(group=torch.tensor([3, 0, 0, 3])))
    assert routing.mask.tolist() == [True, False, False, True]
    assert int(routing.counts().sum()) == 2 * 2
    assert routing.per_token().mask.all()


@pytest.mark.parametrize(
    ("groups", "shape", "rows"),
    [
        (PerSample(), (0, 3), 0),
        (PerSequence(), (2, 0), 2),
        (PerWindow(2), (0, 3), 0),
        (PerWindow(2), (3, 0), 0),
        (PerGroup(), (0, 3), 0),
        (PerSequence("last"), (2, 0), 2),
    ],
)
def test_no_tokens_make_no_real_decision(groups, shape, rows):
    x = torch.randn(*shape, 4)
    routing = router(groups)(x, None, Context(group=torch.zeros(shape, dtype=torch.int64)))
    assert routing.index.shape == (rows, 2)
    assert routing.counts().tolist() == [0] * 5
    assert routing.per_token().index.shape == (0, 2)
    assert balance_loss(routing) == 0.0


def test_sums_of_half_precision_neither_overflow_nor_lose_their_tail():
    # 4096 times 100 is beyond fp16, and 257 beyond the whole numbers of bf16.
    grouped = PerSequence()(torch.full((1, 4096, 4), 100.0, dtype=torch.float16), None, None)
    assert grouped.x.dtype == torch.float16
    assert grouped.x.tolist() == [[100.0] * 4]
    ones = torch.ones(2, 257, 4, dtype=torch.bfloat16)
    assert PerSequence()(ones, None, None).x.tolist() == [[1.0] * 4] * 2


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (None, r"must have the tokens' shape \(2, 3\), not None"),
        (torch.zeros(3, dtype=torch.int64), r"not \(3,\)"),
        (torch.tensor([[0, 1, 0], [0, -2, 0]]), "holds -2"),
    ],
)
def test_group_numbers_that_do_not_fit_are_refused(group, words):
    with pytest.raises(ValueError, match=words):
        router(PerGroup())(torch.randn(2, 3, 4), context=Context(group=group))


def test_a_window_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="size=0"):
        PerWindow(0)

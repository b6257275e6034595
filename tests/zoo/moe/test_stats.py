"""Routing statistics: values by hand, and sums that equal the whole."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zoo.moe import Capacity, LinearScorer, PerSample, Router, RouterStats, Routing, SoftmaxGate, TopK


def routing(index: Tensor, experts: int, mask: Tensor | None = None) -> Routing:
    probs = torch.full((len(index), experts), 1 / experts)
    valid = torch.ones(index.shape, dtype=torch.bool)
    valid = valid if mask is None else valid & mask[:, None]
    weight = torch.tensor([0.75, 0.25]).expand(index.shape)
    return Routing(index=index, weight=weight, valid=valid, probs=probs, logits=probs.log(), mask=mask)


INDEX = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 1]])


def test_four_tokens_by_hand():
    stats = RouterStats.of(routing(INDEX, 4))
    assert stats.counts.tolist() == [4, 3, 1, 0]
    assert stats.load() == [0.5, 0.375, 0.125, 0.0]
    assert stats.share() == [0.75, 0.1875, 0.0625, 0.0]
    assert int(stats.tokens) == 4
    assert stats.dead() == [3]
    assert stats.max_load == pytest.approx(2.0)
    assert stats.variation == pytest.approx(0.7905694, abs=1e-6)
    assert stats.load_entropy == pytest.approx(0.9743148, abs=1e-6)
    assert stats.dropped_fraction == 0.0
    summary = stats.summary()
    assert summary["dead"] == [3]
    assert summary["max_violation"] == pytest.approx(1.0)  # largest load 2 means over the mean
    assert summary["entropy"] == pytest.approx(1.0)  # uniform probabilities, in units of ln 4


def test_adding_recomputes_ratios_from_the_sums():
    other = torch.tensor([[1, 2], [2, 3], [2, 3], [3, 3]])
    total = RouterStats.of(routing(INDEX, 4)) + RouterStats.of(routing(other, 4))
    assert total.counts.tolist() == [4, 4, 4, 4]
    assert total.max_load == pytest.approx(1.0)  # a mean of the two ratios would be 2
    assert total.variation == 0.0
    assert total.load_entropy == pytest.approx(math.log(4))
    assert total.summary()["max_violation"] == pytest.approx(0.0)
    assert total.summary()["dead"] == []


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 40), max_size=4), seed=st.integers(0, 9))
def test_parts_add_up_to_the_whole(cuts, seed):
    torch.manual_seed(seed)
    router = Router(LinearScorer(6, 5), TopK(2))
    x, mask = torch.randn(40, 6), torch.rand(40) < 0.8
    whole = RouterStats.of(router(x, mask))
    borders = [0, *sorted(cuts), 40]
    parts = [RouterStats.of(router(x[a:b], mask[a:b])) for a, b in itertools.pairwise(borders)]
    total = sum(parts[1:], parts[0])
    assert torch.equal(total.counts, whole.counts)
    assert torch.equal(total.tokens, whole.tokens)
    torch.testing.assert_close(total.weights, whole.weights, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(total.entropy, whole.entropy, rtol=1e-6, atol=1e-6)


def test_tags_split_the_whole():
    record = routing(INDEX, 4, mask=torch.tensor([True, True, True, False]))
    tag = torch.tensor([True, False, True, True])
    ours, theirs, whole = RouterStats.of(record, tag), RouterStats.of(record, ~tag), RouterStats.of(record)
    assert ours.counts.tolist() == [2, 1, 1, 0]
    assert theirs.counts.tolist() == [1, 1, 0, 0]
    assert torch.equal((ours + theirs).counts, whole.counts)
    assert int(ours.tokens) == 2


def test_entropy_is_in_nats_before_it_is_divided():
    probs = torch.tensor([[0.5, 0.375, 0.125, 0.0]])
    record = routing(INDEX[:1], 4)
    record = Routing(**{**vars(record), "probs": probs})
    stats = RouterStats.of(record)
    assert float(stats.entropy) == pytest.approx(0.9743148, abs=1e-6)
    assert stats.summary()["entropy"] == pytest.approx(0.9743148 / math.log(4), abs=1e-6)


def test_nothing_counted_gives_zeros():
    summary = RouterStats.of(routing(INDEX, 4, mask=torch.zeros(4, dtype=torch.bool))).summary()
    assert summary["load"] == summary["share"] == [0.0] * 4
    assert summary["entropy"] == summary["max_violation"] == 0.0
    assert summary["max_load"] == summary["variation"] == summary["load_entropy"] == summary["dropped"] == 0.0
    assert summary["tokens"] == 0


def test_an_expert_that_is_off_is_not_dead():
    router = Router(LinearScorer(6, 4), TopK(2))
    with torch.no_grad():
        router.scorer.out.weight.copy_(torch.tensor([2.0, 1.0, 3.0, 0.0])[:, None])
    summary = RouterStats.of(
        router(torch.ones(5, 6), enabled=torch.tensor([True, True, False, True]))
    ).summary()
    assert summary["off"] == [2]
    assert summary["dead"] == [3]
    assert summary["load"] == [0.5, 0.5, 0.0, 0.0]
    assert summary["max_violation"] == pytest.approx(0.5)  # an even load over the three on offer is a third
    assert summary["max_load"] == pytest.approx(1.5)
    assert summary["variation"] == pytest.approx(math.sqrt(0.5))  # counts (5, 5, 0) of the three


def test_statistics_carry_no_gradient():
    router = Router(LinearScorer(6, 4), TopK(2))
    stats = RouterStats.of(router(torch.randn(5, 6)))
    assert not any(value.requires_grad for value in vars(stats).values())


def crowd(factor: float | None = 1.0) -> Router:
    """All tokens want the first of two experts, the later ones more."""
    scorer = LinearScorer(1, 2)
    with torch.no_grad():
        scorer.out.weight.copy_(torch.tensor([[1.0], [0.0]]))
    selectors = [TopK(1)] if factor is None else [TopK(1), Capacity(factor)]
    return Router(scorer, selectors, SoftmaxGate(renormalize=False))


def test_choices_that_found_their_expert_full_are_counted_as_dropped():
    x = torch.tensor([0.6, 0.7, 0.8, 0.9]).logit()[:, None]
    stats = RouterStats.of(crowd()(x))
    assert stats.counts.tolist() == [2, 0]
    assert int(stats.dropped) == 2
    assert stats.dropped_fraction == stats.summary()["dropped"] == 0.5
    assert RouterStats.of(crowd()(x), torch.tensor([True, True, False, True])).dropped_fraction == 2 / 3
    roomy = RouterStats.of(crowd(2.0)(x))
    assert roomy.dropped_fraction == 0.0
    assert (stats + roomy).dropped_fraction == 0.25  # of all eight choices
    assert RouterStats.of(crowd(None)(x)).dropped_fraction == 0.0


def test_a_tiny_batch_drops_nothing():
    router = Router(LinearScorer(3, 8), [TopK(1), Capacity(1.0)], SoftmaxGate(renormalize=False))
    stats = RouterStats.of(router(torch.randn(1, 3)))
    assert int(stats.counts.sum()) == 1
    assert stats.dropped_fraction == 0.0


def test_masked_tokens_are_not_dropped():
    x = torch.tensor([0.6, 0.7, 0.8, 0.9]).logit()[:, None]
    stats = RouterStats.of(crowd()(x, torch.tensor([False, True, True, True])))
    assert stats.counts.tolist() == [2, 0]
    assert stats.dropped_fraction == 1 / 3


def test_masked_rows_of_a_record_are_never_read():
    mask = torch.tensor([True, True, True, False])
    record = routing(INDEX, 4, mask)
    rotten = {
        name: torch.where(mask[:, None], getattr(record, name), math.nan)
        for name in ("weight", "probs", "logits")
    }
    one, other = RouterStats.of(record), RouterStats.of(Routing(**{**vars(record), **rotten}))
    assert all(torch.equal(value, getattr(other, name)) for name, value in vars(one).items())


def test_one_expert_is_even():
    router = Router(LinearScorer(3, 1), TopK(1))
    summary = RouterStats.of(router(torch.randn(4, 3))).summary()
    assert summary["load"] == [1.0]
    assert summary["max_load"] == 1.0
    assert (
        summary["variation"]
        == summary["load_entropy"]
        == summary["entropy"]
        == summary["max_violation"]
        == 0.0
    )
    assert summary["dead"] == []


def test_groups_count_decisions():
    router = Router(LinearScorer(3, 4), TopK(2), groups=PerSample())
    x, mask = torch.randn(3, 5, 3), torch.ones(3, 5, dtype=torch.bool)
    mask[2] = False
    stats = RouterStats.of(router(x, mask))
    assert int(stats.tokens) == 2
    assert int(stats.counts.sum()) == 4


def test_a_summary_is_plain_json():
    summary = RouterStats.of(routing(INDEX, 4)).summary()
    assert json.loads(json.dumps(summary)) == summary
    assert list(summary) == [
        *(
            "load",
            "share",
            "entropy",
            "load_entropy",
            "dead",
            "off",
            "max_load",
            "max_violation",
            "variation",
        ),
        *("dropped", "tokens"),
    ]

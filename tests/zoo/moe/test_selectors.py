"""Which experts a token goes to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.moe import Dense, LinearScorer, Router, TopK


def test_ties_go_to_the_lowest_index():
    index, valid = TopK(2)(torch.zeros(5, 6))
    assert index.tolist() == [[0, 1]] * 5
    assert valid.all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(row=st.lists(st.integers(0, 2), min_size=4, max_size=16), k=st.integers(1, 4))
def test_choices_are_the_largest_and_among_equals_the_first(row, k):
    index, _ = TopK(k)(torch.tensor([row], dtype=torch.float32))
    assert index[0].tolist() == sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]


def test_experts_that_are_off_are_no_valid_choice():
    index, valid = TopK(3)(torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]]))
    assert index[0, :2].tolist() == [2, 0]
    assert valid.tolist() == [[True, True, False]]
    _, valid = Dense()(torch.tensor([[0.0, -torch.inf, 1.0]]))
    assert valid.tolist() == [[True, False, True]]


def test_an_expert_that_is_off_gets_no_probability_and_no_weight():
    torch.manual_seed(0)
    router = Router(LinearScorer(4, 3), TopK(3))
    routing = router(torch.randn(7, 4), enabled=torch.tensor([True, False, True]))
    assert torch.equal(routing.probs[:, 1], torch.zeros(7))
    assert torch.equal(routing.dense_weight()[:, 1], torch.zeros(7))
    torch.testing.assert_close(routing.dense_weight().sum(-1), torch.ones(7), rtol=0, atol=1e-6)
    assert routing.counts().tolist() == [7, 0, 7]


def test_no_choice_at_all_is_refused():
    with pytest.raises(ValueError, match="k=0"):
        TopK(0)


def test_neither_selector_looks_at_the_batch():
    logits = torch.randn(9, 5)
    for selector in (TopK(2), Dense()):
        assert not selector.depends_on_batch
        index, _ = selector(logits)
        assert all(torch.equal(selector(logits[row : row + 1])[0][0], index[row]) for row in range(9))

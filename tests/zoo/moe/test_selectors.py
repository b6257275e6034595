"""Selectors: which experts a decision goes to, by hand and against slow references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.moe.gates import SoftmaxGate
from zoo.moe.router import Router
from zoo.moe.selectors import Capacity, Dense, ExpertChoice, Fixed, RelativeThreshold, Selection, TopK

quick = settings(max_examples=25, deadline=None, derandomize=True)


def offer(scores: Tensor, valid: Tensor | None = None) -> Selection:
    return Selection(scores=scores, probs=scores.softmax(-1), valid=valid)


def by_probs(selectors, probs, mask=None, enabled=None, training=True):
    """Route tokens with the given distributions, weighed by them."""

    class Given(nn.Module):
        num_experts = torch.as_tensor(probs).shape[-1]

        def forward(self, x, context=None):
            return x

    router = Router(Given(), selectors, SoftmaxGate(renormalize=False)).train(training)
    mask = None if mask is None else torch.as_tensor(mask)
    return router(torch.as_tensor(probs).log(), mask, enabled=enabled)


def kept(routing, expert: int) -> list[int]:
    """The tokens that an expert got."""
    return torch.nonzero(((routing.index == expert) & routing.valid).any(-1)).flatten().tolist()


def best(row: list[float], k: int) -> list[int]:
    """The reference of top-k: the largest, and among equals the first."""
    return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:k]


def test_ties_go_to_the_lowest_index():
    assert TopK(2)(offer(torch.zeros(5, 6))).index.tolist() == [[0, 1]] * 5


@quick
@given(row=st.lists(st.integers(0, 2), min_size=4, max_size=16), k=st.integers(1, 4))
def test_choices_are_the_largest_and_among_equals_the_first(row, k):
    chosen = TopK(k)(offer(torch.tensor([row], dtype=torch.float32)))
    assert chosen.index.tolist() == [best(row, k)]
    assert chosen.counting().all()


# Sizes on both sides of where the way to find the largest changes.
@pytest.mark.parametrize(("rows", "experts"), [(3, 8), (300, 9), (300, 16), (600, 33), (64, 64)])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_the_rule_for_ties_is_the_same_at_every_size(rows, experts, k):
    torch.manual_seed(rows + experts + k)
    scores = torch.randint(0, 3, (rows, experts)).float()
    # Rows with fewer experts in question than choices, and with none at all.
    scores[torch.rand(rows, experts) < 0.3] = -torch.inf
    scores[1, 2:], scores[2] = -torch.inf, -torch.inf
    before = scores.clone()
    assert TopK(k)(offer(scores)).index.tolist() == [best(row, k) for row in scores.tolist()]
    assert torch.equal(scores, before)


@pytest.mark.parametrize("size", [1, 1024])
def test_what_is_not_in_question_is_chosen_last_and_does_not_count(size):
    scores = torch.tensor([[0.0, 9.0, 1.0, 9.0, *[-1.0] * 12]]).expand(size, 16)
    valid = torch.tensor([[True, False, True, False, *[False] * 12]]).expand(size, 16)
    chosen = TopK(4)(offer(scores, valid))
    assert chosen.index.tolist() == [[2, 0, 1, 3]] * size
    assert chosen.valid.tolist() == [[True, True, False, False]] * size


def test_selectors_narrow_what_the_one_before_left():
    scores = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    chosen = TopK(2)(TopK(3)(offer(scores)))
    assert chosen.index.tolist() == [[1, 3]]
    # The best of those that reach half of the best: expert 3 has e^-1 = 0.37 of it.
    chosen = TopK(2)(RelativeThreshold(0.5)(offer(scores)))
    assert chosen.index[0, 0] == 1
    assert chosen.valid.tolist() == [[True, False]]


def test_the_dense_selector_takes_every_expert_that_is_on():
    routing = by_probs(Dense(), [[0.1, 0.2, 0.7]] * 2, enabled=torch.tensor([True, False, True]))
    assert routing.index.tolist() == [[0, 1, 2]] * 2
    assert routing.valid.tolist() == [[True, False, True]] * 2


def test_a_threshold_keeps_what_reaches_its_share_of_the_best_by_hand():
    probs = [[0.5, 0.34, 0.16], [0.4, 0.4, 0.2], [0.1, 0.1, 0.8]]
    routing = by_probs(RelativeThreshold(0.6), probs)
    assert routing.valid.tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    assert by_probs(RelativeThreshold(1.0), probs).valid.sum(-1).tolist() == [1, 2, 1]


@quick
@given(rows=st.integers(0, 8), experts=st.integers(1, 6), ratio=st.floats(0.05, 1.0), seed=st.integers(0, 99))
def test_a_threshold_leaves_no_real_token_without_an_expert(rows, experts, ratio, seed):
    torch.manual_seed(seed)
    probs, mask = torch.randn(rows, experts).softmax(-1), torch.rand(rows) < 0.7
    routing = by_probs(RelativeThreshold(ratio), probs, mask)
    assert torch.equal(routing.valid.any(-1), mask)
    for row, on in zip(probs.tolist(), (routing.valid & mask[:, None]).tolist(), strict=True):
        if any(on):
            assert row[on.index(True)] >= ratio * max(row) * (1 - 1e-5)
            assert on[row.index(max(row))]


PROBS = [[0.6, 0.4], [0.7, 0.3], [0.8, 0.2], [0.9, 0.1]]


@pytest.mark.parametrize(
    ("drop", "mask", "expected"),
    [
        ("probs", None, [2, 3]),
        ("position", None, [0, 1]),
        # A masked token takes no room: ceil(3 / 2) = 2 places for three tokens.
        ("position", [False, True, True, True], [1, 2]),
        ("probs", [True, True, True, False], [1, 2]),
        ("probs", [False] * 4, []),
    ],
)
def test_four_tokens_for_an_expert_with_room_for_two(drop, mask, expected):
    routing = by_probs([TopK(1), Capacity(1.0, drop)], PROBS, mask)
    assert kept(routing, 0) == expected
    real = 4 if mask is None else sum(mask)
    assert int(routing.dropped.sum()) == real - len(expected)
    # A dropped token has no weight left: its output is zero.
    silent = torch.ones(4, dtype=torch.bool)
    silent[expected] = False
    assert torch.equal(routing.dense_weight()[silent], torch.zeros(int(silent.sum()), 2))


def test_a_tiny_batch_drops_nothing_because_room_is_rounded_up():
    routing = by_probs([TopK(1), Capacity(1.0)], torch.full((1, 8), 1 / 8))
    assert not routing.dropped.any()
    assert routing.valid.all()


@pytest.mark.parametrize(
    ("factor", "tokens", "room"), [(1.2, 25, 15), (1.25, 16, 10), (0.3, 20, 3), (1.25, 17, 11)]
)
def test_room_is_not_rounded_up_from_a_rounding_error(factor, tokens, room):
    # 1.2 · 25 / 2 is 15.000001 in fp32.
    routing = by_probs([TopK(1), Capacity(factor, "position")], [[0.9, 0.1]] * tokens)
    assert kept(routing, 0) == list(range(room))


def test_first_choices_come_before_second_ones_where_position_decides():
    # Token 0 has expert 1 as its second choice, token 1 as its first; there is room for one.
    probs = [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]
    routing = by_probs([TopK(2), Capacity(0.5, "position")], probs)
    assert kept(routing, 1) == [1]
    # So is token 1's second choice, expert 0, by token 0's first.
    assert routing.index.tolist() == [[0, 1], [1, 0]]
    assert routing.dropped.tolist() == [[False, True], [False, True]]


def test_an_expert_that_is_off_leaves_its_room_to_the_others():
    probs = [[0.4, 0.3, 0.3]] * 4
    on = torch.tensor([True, False, True])
    # Four choices over two experts: room for two, where three experts would leave ceil(4 / 3) = 2 as well.
    assert kept(by_probs([TopK(1), Capacity(1.0)], probs, enabled=on), 0) == [0, 1]
    # Six tokens: ceil(6 / 2) = 3 and not ceil(6 / 3) = 2.
    assert kept(by_probs([TopK(1), Capacity(1.0)], probs + probs[:2], enabled=on), 0) == [0, 1, 2]


def test_choices_below_a_threshold_make_no_room():
    # Five choices of three experts count, not nine: room for ceil(5 / 3) = 2.
    probs = [[0.9, 0.05, 0.05], [0.45, 0.45, 0.1], [0.48, 0.42, 0.1]]
    routing = by_probs([RelativeThreshold(0.5), Capacity(1.0)], probs)
    assert kept(routing, 0) == [0, 2]
    assert kept(routing, 1) == [1, 2]
    assert int(routing.dropped.sum()) == 1


def test_the_weights_of_what_is_left_are_renormalised_where_the_gate_renormalises():
    class Given(nn.Module):
        num_experts = 3

        def forward(self, x, context=None):
            return x

    router = Router(Given(), [TopK(2), Capacity(0.5, "position")])
    routing = router(torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]).log())
    assert routing.weight.tolist() == [[1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("eval_factor", [None, 1.0])
def test_evaluation_drops_nothing_unless_asked(eval_factor):
    capacity = Capacity(1.0, eval_factor=eval_factor)
    routing = by_probs([TopK(1), capacity], PROBS, training=False)
    assert capacity.depends_on_batch == (eval_factor is not None)
    assert kept(routing, 0) == ([0, 1, 2, 3] if eval_factor is None else [2, 3])
    assert (routing.dropped is None) == (eval_factor is None)
    capacity.train()
    assert capacity.depends_on_batch


@quick
@given(
    rows=st.integers(0, 12),
    experts=st.integers(1, 5),
    factor=st.sampled_from([0.25, 0.5, 1.0, 1.25, 2.0]),
    drop=st.sampled_from(["probs", "position"]),
    data=st.data(),
)
def test_capacity_conserves_choices_and_overfills_no_expert(rows, experts, factor, drop, data):
    k = data.draw(st.integers(1, experts))
    torch.manual_seed(data.draw(st.integers(0, 99)))
    # Few different values, so that there are ties between tokens.
    probs, mask = torch.randint(1, 4, (rows, experts)).float(), torch.rand(rows) < 0.7
    probs = probs / probs.sum(-1, keepdim=True)
    before = by_probs(TopK(k), probs, mask)
    after = by_probs([TopK(k), Capacity(factor, drop)], probs, mask)
    assert torch.equal(after.index, before.index)
    assert torch.equal(after.valid | after.dropped, before.valid)
    assert not (after.valid & after.dropped).any()
    assert not (after.valid | after.dropped)[~mask].any()
    room = max(1, math.ceil(factor * int(before.valid.sum()) / experts))
    assert all(count <= room for count in after.counts().tolist())
    expected = keep(before, room, by_value=drop == "probs")
    assert {tuple(place) for place in torch.nonzero(after.valid).tolist()} == expected


def keep(routing, room: int, by_value: bool) -> set[tuple[int, int]]:
    """The reference of capacity: fill the experts in the order of precedence, one choice after the other."""
    places = [
        (token, choice) for choice in range(routing.index.shape[1]) for token in range(len(routing.index))
    ]
    if by_value:
        places.sort(key=lambda place: -float(routing.probs[place[0], routing.index[place]]))
    filled, taken = [0] * routing.num_experts, set()
    for place in places:
        expert = int(routing.index[place])
        if routing.valid[place] and filled[expert] < room:
            filled[expert] += 1
            taken.add(place)
    return taken


SCORES = [[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]


@pytest.mark.parametrize(
    ("mask", "chosen", "output"),
    [
        (None, ([0, 1], [1, 2]), [0.9, 2.8, 7.0]),
        ([True, False, True], ([0, 2], [0, 2]), [1.9, 0.0, 7.3]),
        # One real token for two places: the other stays empty.
        ([False, False, True], ([2], [2]), [0.0, 0.0, 7.3]),
        ([False] * 3, ([], []), [0.0, 0.0, 0.0]),
    ],
)
def test_experts_choose_their_tokens_by_hand(mask, chosen, output):
    routing = by_probs(ExpertChoice(capacity=2), SCORES, mask)
    assert (kept(routing, 0), kept(routing, 1)) == chosen
    # Experts x and 10 x on ones.
    mixed = routing.dense_weight() @ torch.tensor([1.0, 10.0])
    torch.testing.assert_close(mixed, torch.tensor(output), rtol=0, atol=1e-6)


@quick
@given(
    rows=st.integers(0, 12),
    experts=st.integers(1, 5),
    factor=st.sampled_from([0.5, 1.0, 2.0]),
    seed=st.integers(0, 99),
)
def test_every_expert_gets_its_best_real_tokens_and_no_others(rows, experts, factor, seed):
    torch.manual_seed(seed)
    probs, mask = torch.randint(1, 4, (rows, experts)).float(), torch.rand(rows) < 0.7
    probs = probs / probs.sum(-1, keepdim=True)
    routing = by_probs(ExpertChoice(factor=factor), probs, mask)
    real = [token for token in range(rows) if mask[token]]
    room = max(1, math.ceil(factor * len(real) / experts))
    for expert in range(experts):
        first = sorted(real, key=lambda token: -float(routing.probs[token, expert]))[:room]
        assert kept(routing, expert) == sorted(first)
    assert routing.counts().tolist() == [min(room, len(real))] * experts


def test_an_expert_that_is_off_chooses_nothing():
    routing = by_probs(ExpertChoice(factor=1.0), SCORES, enabled=torch.tensor([False, True]))
    # Only one expert is left, so it takes all three.
    assert routing.counts().tolist() == [0, 3]


def test_fixed_experts_are_taken_whatever_the_scores():
    routing = by_probs(Fixed([2, 0]), [[0.1, 0.8, 0.1]] * 3, [True, False, True])
    assert routing.index.tolist() == [[2, 0]] * 3
    assert routing.valid.tolist() == [[True, True], [False, False], [True, True]]
    routing = by_probs(Fixed([2, 0]), [[0.1, 0.8, 0.1]], enabled=torch.tensor([True, True, False]))
    assert routing.valid.tolist() == [[False, True]]
    assert Fixed([1]).state_dict() == {}


@pytest.mark.parametrize("selector", [ExpertChoice(capacity=1), Fixed([0])], ids=repr)
def test_what_needs_every_expert_refuses_to_come_after_a_choice(selector):
    with pytest.raises(ValueError, match=r"\(.*\) must come before selectors"):
        by_probs([TopK(2), selector], SCORES)


@pytest.mark.parametrize(
    ("selector", "depends"),
    [
        (TopK(2), False),
        (Dense(), False),
        (RelativeThreshold(0.5), False),
        (Fixed([1, 3]), False),
        (Capacity(0.5), True),
        (ExpertChoice(factor=1.0), True),
    ],
    ids=repr,
)
def test_a_selector_says_whether_it_looks_at_the_batch(selector, depends):
    torch.manual_seed(0)
    selectors = [TopK(2), selector] if isinstance(selector, Capacity) else selector
    probs = torch.randn(12, 4).softmax(-1)
    whole = by_probs(selectors, probs).dense_weight()
    alone = torch.cat([by_probs(selectors, probs[row : row + 1]).dense_weight() for row in range(12)])
    assert selector.depends_on_batch == depends
    assert torch.allclose(whole, alone) != depends


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0), "k=0"),
        (lambda: RelativeThreshold(0.0), "ratio=0.0"),
        (lambda: RelativeThreshold(1.1), "ratio=1.1"),
        (lambda: Capacity(0.0), "factor > 0, not 0.0"),
        (lambda: Capacity(1.0, eval_factor=-1.0), "eval_factor > 0, not -1.0"),
        (lambda: Capacity(1.0, drop="last"), "drop='last'"),
        (lambda: ExpertChoice(), "factor=None or capacity=None"),
        (lambda: ExpertChoice(factor=1.0, capacity=2), "factor=1.0 or capacity=2"),
        (lambda: ExpertChoice(capacity=0), "capacity=0 must be above 0"),
        (lambda: ExpertChoice(factor=-1.0), "factor=-1.0"),
        (lambda: Fixed([]), r"experts=\[\]"),
        (lambda: Fixed([1, 1]), r"experts=\[1, 1\]"),
        (lambda: Fixed([-1]), r"experts=\[-1\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()

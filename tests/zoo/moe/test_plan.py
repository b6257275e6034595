"""The plan of the fused back end: which experts are multiplied together, and which choice goes into which slot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.moe import Routing
from zoo.moe.dispatch.plan import Plan, make_plan


def routing(index: list[list[int]], experts: int, valid: list[list[bool]] | None = None) -> Routing:
    chosen = torch.tensor(index) if index else torch.zeros(0, 1, dtype=torch.int64)
    logits = torch.zeros(len(index), experts)
    return Routing(
        index=chosen,
        weight=torch.ones(chosen.shape),
        valid=torch.ones(chosen.shape, dtype=torch.bool) if valid is None else torch.tensor(valid),
        probs=logits,
        logits=logits,
    )


def with_loads(loads: list[int]) -> Routing:
    """One choice per token, tokens in the order of their experts."""
    return routing([[expert] for expert, load in enumerate(loads) for _ in range(load)], len(loads))


def runs(plan: Plan) -> list[tuple[int, int, int]]:
    return [(run.first, run.last, run.rows) for run in plan.runs]


def test_few_rows_of_similar_number_are_padded_to_the_largest():
    plan = make_plan(routing([[0, 1], [1, 2], [1, 0]], 3), largest=100, ragged=True)
    # Expert 0 has tokens 0 and 2, expert 1 all three, expert 2 token 1: three slots each.
    assert runs(plan) == [(0, 3, 3)]
    assert plan.choice.tolist() == [0, 5, 0, 1, 2, 4, 3, 0, 0]
    assert plan.token.tolist() == [0, 2, 0, 0, 1, 2, 1, 0, 0]
    assert plan.padding.tolist() == [2, 7, 8]
    (run,) = plan.runs
    assert run.filled.tolist() == [0, 1, 3, 4, 5, 6]
    assert (run.slots, run.choices, plan.choices) == (slice(0, 9), slice(0, 6), 6)


def test_packing_forgets_the_padding_and_unpacking_makes_it_zero():
    (run,) = make_plan(routing([[0, 1], [1, 2], [1, 0]], 3), largest=100, ragged=True).runs
    slots = torch.arange(9.0)[:, None] + 1
    assert run.pack(slots).flatten().tolist() == [1, 2, 4, 5, 6, 7]
    assert run.unpack(run.pack(slots)).flatten().tolist() == [1, 2, 0, 4, 5, 6, 7, 0, 0]


@pytest.mark.parametrize(
    ("loads", "ragged", "expected"),
    [
        ([8, 8, 8, 8], True, [(0, 4, 8)]),  # even and small
        ([8, 80, 8, 8], True, [(0, 4, 0)]),  # uneven
        ([8, 80, 8, 8], False, [(0, 1, 8), (1, 2, 80), (2, 3, 8), (3, 4, 8)]),
        ([200, 200], True, [(0, 2, 0)]),  # even but not small
        ([0, 8, 8, 0, 8, 8, 0], True, [(1, 6, 8)]),  # a hole is padded over, the ends are skipped
        ([8, 0, 0, 0, 0, 8], True, [(0, 6, 0)]),  # too many holes
        ([8, 600, 8], True, [(0, 1, 8), (1, 2, 600), (2, 3, 8)]),  # a large one keeps to itself
        ([0, 0], True, []),
    ],
)
def test_runs_follow_the_loads(loads, ragged, expected):
    assert runs(make_plan(with_loads(loads), largest=10_000, ragged=ragged)) == expected


def test_a_run_ends_where_the_cache_does():
    assert runs(make_plan(with_loads([10] * 5), largest=25, ragged=True)) == [
        (0, 2, 10),
        (2, 4, 10),
        (4, 5, 10),
    ]


def test_an_expert_of_many_rows_is_cut_into_even_pieces(monkeypatch):
    monkeypatch.setattr("zoo.moe.dispatch.plan.CUT_ROWS", 10)
    plan = make_plan(with_loads([4, 35, 4]), largest=10, ragged=True)
    assert runs(plan) == [(0, 1, 4), (1, 2, 11), (1, 2, 12), (1, 2, 12), (2, 3, 4)]
    assert [run.further for run in plan.runs] == [False, False, True, True, False]
    assert plan.idle == []


def test_experts_that_no_run_covers_are_idle():
    plan = make_plan(with_loads([0, 3, 0, 0, 600, 0]), largest=10_000, ragged=True)
    assert runs(plan) == [(1, 2, 3), (4, 5, 600)]
    assert plan.idle == [(0, 1), (2, 4), (5, 6)]


def test_a_choice_that_does_not_count_has_no_slot():
    plan = make_plan(routing([[0, 1], [1, 0]], 2, [[True, False], [True, False]]), largest=100, ragged=True)
    assert plan.choice.tolist() == [0, 2]
    assert plan.choices == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 130), min_size=1, max_size=12),
    st.sampled_from([7, 64, 4000]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_every_choice_has_one_slot_with_its_expert(loads, largest, ragged, seed):
    index = torch.repeat_interleave(torch.tensor(loads))
    index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(seed))]
    plan = make_plan(routing(index[:, None].tolist(), len(loads)), largest, ragged)
    empty = set() if plan.padding is None else set(plan.padding.tolist())
    placed = [place for slot, place in enumerate(plan.choice.tolist()) if slot not in empty]
    assert sorted(placed) == list(range(len(index)))
    covered: list[int] = []
    for run in plan.runs:
        experts = index[plan.choice[run.slots]]
        wanted = (
            torch.repeat_interleave(torch.arange(run.first, run.last), torch.tensor(run.loads))
            if run.loads
            else torch.arange(run.first, run.last).repeat_interleave(run.rows)
        )
        real = torch.ones(len(experts), dtype=torch.bool)
        if run.padding is not None:
            real[run.padding] = False
        assert torch.equal(experts[real], wanted[real])
        covered += [] if run.further else range(run.first, run.last)
    idle = [expert for first, last in plan.idle for expert in range(first, last)]
    assert sorted(covered + idle) == list(range(len(loads)))
    assert all(loads[expert] == 0 for expert in idle)

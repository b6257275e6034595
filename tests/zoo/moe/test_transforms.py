"""Transforms of the logits: what they do, and that nothing is random in evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zoo.moe.router import Router
from zoo.moe.scorers import LinearScorer
from zoo.moe.selectors import TopK
from zoo.moe.transforms import GaussianNoise, Jitter, Temperature

RANDOM = [GaussianNoise(0.5), Jitter(0.1)]


def test_a_temperature_divides():
    assert Temperature(0.5)(torch.tensor([[1.0, -2.0]])).tolist() == [[2.0, -4.0]]


def test_a_schedule_moves_the_temperature_of_a_router():
    router = Router(LinearScorer(4, 3), TopK(2), transform=Temperature(1.0))
    x = torch.randn(5, 4)
    plain = router(x).logits
    router.transform.t = 4.0
    torch.testing.assert_close(router(x).logits, plain / 4)


def test_noise_has_the_given_width_and_is_drawn_for_each_decision_and_expert():
    torch.manual_seed(0)
    noise = GaussianNoise(0.5)(torch.zeros(4000, 5))
    assert abs(noise.std().item() - 0.5) < 0.02
    assert abs(noise.mean().item()) < 0.02
    assert noise.T.corrcoef().fill_diagonal_(0.0).abs().max() < 0.1


def test_jitter_is_in_proportion_to_each_logit():
    torch.manual_seed(0)
    logits = torch.tensor([[1.0, -100.0, 0.0]]).expand(4000, 3)
    ratio = Jitter(0.1)(logits) / logits
    for column in (0, 1):
        assert 0.9 <= ratio[:, column].min() < 0.902
        assert 1.098 < ratio[:, column].max() <= 1.1
    assert torch.equal(Jitter(0.1)(logits)[:, 2], torch.zeros(4000))
    assert ratio[:, :2].T.corrcoef()[0, 1].abs() < 0.1


@pytest.mark.parametrize("transform", RANDOM, ids=repr)
def test_what_is_random_acts_in_training_alone_and_follows_the_seed(transform):
    logits = torch.randn(6, 4)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(transform(logits))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    still = nn.Sequential(transform).eval()
    state = torch.get_rng_state()
    assert torch.equal(still(logits), logits)
    assert torch.equal(torch.get_rng_state(), state)
    transform.train()


def test_transforms_chain_in_order():
    logits = torch.randn(6, 4)
    torch.manual_seed(0)
    expected = 2 * (logits + 0.5 * torch.randn(6, 4))
    torch.manual_seed(0)
    chained = nn.Sequential(GaussianNoise(0.5), Temperature(0.5))(logits)
    torch.testing.assert_close(chained, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("transform", [Temperature(0.5), *RANDOM], ids=repr)
def test_an_expert_that_is_off_stays_off_behind_a_transform(transform):
    router = Router(LinearScorer(4, 3), TopK(2), transform=transform)
    routing = router(torch.randn(50, 4), enabled=torch.tensor([True, False, True]))
    assert torch.equal(routing.logits[:, 1], torch.full((50,), -torch.inf))
    assert routing.counts().tolist() == [50, 0, 50]
    assert routing.logits[:, ::2].isfinite().all()


def test_noise_changes_choices_and_the_router_learns_from_the_noisy_weights():
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    router = Router(LinearScorer(4, 8), TopK(2), transform=GaussianNoise(1.0))
    noisy, other = router(x), router(x)
    assert not torch.equal(noisy.index, other.index)
    torch.testing.assert_close(noisy.weight, noisy.logits.gather(1, noisy.index).softmax(-1))
    noisy.weight[:, 0].sum().backward()
    assert router.scorer.out.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Temperature(0.0), "not t=0.0"),
        (lambda: Temperature(float("nan")), "not t=nan"),
        (lambda: GaussianNoise(-1.0), "not std=-1.0"),
        (lambda: Jitter(0.0), "not epsilon=0.0"),
        (lambda: Jitter(1.0), "not epsilon=1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()

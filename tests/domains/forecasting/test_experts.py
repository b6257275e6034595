"""The temporal experts against textbook operations, and the relation between channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from zoo.domains.forecasting.network.experts import (
    KINDS,
    CyclicRelation,
    FluctuationExpert,
    IdentityExpert,
    RelatedExpert,
    SeasonalExpert,
    TrendExpert,
    fourier,
    neighbours,
)
from zoo.moe import Context, ExpertPool

DIM = 6


def tokens(patches: int, seed: int = 0) -> torch.Tensor:
    """Two windows of three channels, (2, 3, P, 6)."""
    return torch.randn(2, 3, patches, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("steps", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("share", ["half", "all"])
def test_fourier_matrices_are_the_orthonormal_real_transform_cut_to_its_first_modes(steps, share):
    modes = max(steps // 2, 1) if share == "half" else steps // 2 + 1
    analysis, synthesis = fourier(steps, modes)
    x = torch.randn(steps, 4)
    spectrum = torch.fft.rfft(x, dim=0, norm="ortho")[:modes]
    torch.testing.assert_close(analysis @ x, torch.cat([spectrum.real, spectrum.imag]), rtol=0, atol=1e-5)
    back = torch.fft.irfft(spectrum, n=steps, dim=0, norm="ortho")
    torch.testing.assert_close(synthesis @ (analysis @ x), back, rtol=0, atol=1e-5)
    if share == "all":
        torch.testing.assert_close(synthesis @ (analysis @ x), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("patches", "kernel"), [(1, 1), (2, 1), (5, 5), (12, 11), (13, 13), (14, 13), (40, 13)]
)
def test_trend_is_a_moving_average_that_repeats_the_border(patches, kernel):
    expert = TrendExpert(DIM, patches, dropout=0.0)
    x = tokens(patches)
    flat = x.flatten(0, 1).transpose(1, 2)
    padded = F.pad(flat, (kernel // 2, kernel // 2), mode="replicate")
    average = F.avg_pool1d(padded, kernel, stride=1).transpose(1, 2).reshape(x.shape)
    torch.testing.assert_close(expert.average @ x, average, rtol=0, atol=1e-5)
    torch.testing.assert_close(expert(x), expert.net(average), rtol=0, atol=1e-5)


@pytest.mark.parametrize("patches", [2, 5, 12])
def test_seasonal_against_an_fft(patches):
    expert = SeasonalExpert(DIM, patches, dropout=0.0)
    x = tokens(patches)
    modes = patches // 2
    spectrum = torch.fft.rfft(x, dim=-2, norm="ortho")[..., :modes, :]
    real, imaginary = expert.mix(torch.cat([spectrum.real, spectrum.imag], dim=-1)).chunk(2, dim=-1)
    kept = torch.complex(real, imaginary)
    wave = expert.wave(torch.fft.irfft(kept, n=patches, dim=-2, norm="ortho"))
    expected = expert.out(expert.join(torch.cat([wave[..., :DIM].sin(), wave[..., DIM:].cos()], dim=-1)))
    torch.testing.assert_close(expert(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("patches", [1, 3, 12])
def test_fluctuation_against_two_convolutions(patches):
    expert = FluctuationExpert(DIM, patches, dropout=0.0)
    first = nn.Conv1d(DIM, 2 * DIM, 3, dilation=2, padding=2)
    second = nn.Conv1d(DIM, 2 * DIM, 3, padding=1)
    for convolution, linear in ((first, expert.first), (second, expert.second)):
        convolution.weight.data = linear.weight.data.reshape(2 * DIM, 3, DIM).transpose(1, 2)
        convolution.bias.data = linear.bias.data
    x = tokens(patches)
    flat = x.flatten(0, 1).transpose(1, 2)
    y = F.glu(second(F.glu(first(flat), dim=1)), dim=1)
    expected = expert.norm((y + flat).transpose(1, 2)).reshape(x.shape)
    torch.testing.assert_close(expert(x), expected, rtol=0, atol=1e-5)


def test_neighbours_are_zeros_outside():
    x = torch.arange(1.0, 5.0)[:, None]
    assert neighbours(x, dilation=1).tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 0]]
    assert neighbours(x, dilation=2).tolist() == [[0, 1, 3], [0, 2, 4], [1, 3, 0], [2, 4, 0]]


def test_identity_is_one_linear_map_of_each_patch():
    expert = IdentityExpert(DIM, 5, dropout=0.0)
    x = tokens(5)
    torch.testing.assert_close(expert(x), x @ expert.map.weight.T + expert.map.bias)


@pytest.mark.parametrize(
    ("kind", "reach"), [("identity", 0), ("fluctuation", 3), ("trend", 11), ("seasonal", 11)]
)
def test_each_kind_reaches_as_far_along_the_sequence_as_it_says(kind, reach):
    expert = KINDS[kind](DIM, 12, 0.0)
    x = tokens(12).requires_grad_()
    (gradient,) = torch.autograd.grad(expert(x)[0, 0, 0].square().sum(), x)
    touched = gradient[0, 0].abs().sum(-1) > 0
    # The trend's pool over 12 patches is 11 wide: its first output sees the first six.
    last = 5 if kind == "trend" else reach
    assert int(touched.nonzero().max()) == last
    assert gradient[0, 1:].abs().max() == 0
    assert gradient[1].abs().max() == 0


def relation(channels: int = 3, cycle: int = 24) -> CyclicRelation:
    torch.manual_seed(0)
    return CyclicRelation(channels, cycle, DIM, dropout=0.0)


def phases(patches: int, start: tuple[int, int] = (0, 7)) -> Context:
    return Context(phase=(torch.tensor(start)[:, None] + 8 * torch.arange(patches)) % 24)


def test_relation_against_its_equation_patch_by_patch():
    mixer, x, context = relation(), tokens(5), phases(5)
    y = mixer(x, context)
    for window in range(2):
        for patch in range(5):
            token = x[window, :, patch]
            learned = mixer.table[context.phase[window, patch]]
            present = F.cosine_similarity(token[:, None], token[None], dim=-1)
            expected = mixer.norm((learned + mixer.correct(present - learned)) @ token) + token
            torch.testing.assert_close(y[window, :, patch], expected, rtol=0, atol=1e-5)


def test_relation_reads_the_true_phase_modulo_the_cycle():
    mixer, x = relation(), tokens(5)
    y = mixer(x, phases(5))
    assert torch.equal(mixer(x, phases(5, start=(24, 31))), y)
    assert (mixer(x, phases(5, start=(1, 7))) - y)[0].abs().max() > 1e-3
    assert torch.equal(mixer(x, phases(5, start=(1, 7)))[1], y[1])


def test_every_phase_has_a_relation_of_its_own_to_learn():
    mixer = relation()
    mixer(tokens(3), Context(phase=torch.tensor([[0, 8, 16], [5, 13, 21]]))).square().sum().backward()
    touched = mixer.table.grad.abs().sum((1, 2)).nonzero().flatten().tolist()
    assert touched == [0, 5, 8, 13, 16, 21]


def test_relation_carries_gradients_between_channels_of_a_window_at_the_same_patch():
    mixer = relation()
    x = tokens(5).requires_grad_()
    (gradient,) = torch.autograd.grad(mixer(x, phases(5))[0, 0, 2].square().sum(), x)
    assert (gradient[0, :, 2].abs().sum(-1) > 0).all()
    assert gradient[0, :, [0, 1, 3, 4]].abs().max() == 0
    assert gradient[1].abs().max() == 0


def test_relation_without_phase_is_refused():
    with pytest.raises(ValueError, match=r"context\.phase"):
        relation()(tokens(5), Context())


def test_related_expert_passes_the_answer_through_the_relation():
    expert, mixer = IdentityExpert(DIM, 5, 0.0), relation()
    x = tokens(5)
    assert torch.equal(RelatedExpert(expert, mixer)(x, phases(5)), mixer(expert(x), phases(5)))


@pytest.mark.parametrize("kind", [*KINDS, "related"])
def test_a_slot_of_any_kind_starts_afresh_in_every_parameter(kind):
    def build() -> nn.Module:
        if kind == "related":
            return RelatedExpert(TrendExpert(DIM, 5, 0.0), relation())
        return KINDS[kind](DIM, 5, 0.0)

    pools = [ExpertPool([IdentityExpert(DIM, 5, 0.0), build()], base=1) for _ in range(2)]
    with torch.no_grad():
        for parameter in pools[1].experts[1].parameters():
            parameter.fill_(123.0)
    for pool in pools:
        pool.enable(1, seed=3)
    for (name, first), second in zip(
        pools[0].experts[1].named_parameters(), pools[1].experts[1].parameters(), strict=True
    ):
        assert torch.equal(first, second), name

"""The dense twin of a field bank."""

from __future__ import annotations

import torch
from torch import nn

from zoo.moe import DenseMixture, ExpertPool


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x, context=None):
        return self.map(x)


def test_all_experts_run_under_one_constant_mixture():
    torch.manual_seed(0)
    bank = ExpertPool([Mapped() for _ in range(3)], base=2)
    twin = DenseMixture(bank)
    x = torch.randn(2, 5, 6)
    outputs = torch.stack([expert(x) for expert in bank.experts])
    torch.testing.assert_close(twin(x), outputs.mean(0), rtol=0, atol=1e-6)
    with torch.no_grad():
        twin.mixing.copy_(torch.tensor([1.0, 2.0, 5.0]).log())
    weight = torch.tensor([0.125, 0.25, 0.625])
    torch.testing.assert_close(twin(x), torch.einsum("e,ebpd->bpd", weight, outputs), rtol=0, atol=1e-6)


def test_the_twin_has_the_experts_and_one_number_each_and_no_router():
    bank = ExpertPool([Mapped() for _ in range(3)], base=2)
    twin = DenseMixture(bank)
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in bank.parameters()) + 3
    twin(torch.randn(4, 6)).square().sum().backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad.abs().max() > 0, name

"""What a forward pass costs: parameters and floating-point operations (FLOPs), in total and of the experts chosen.

A multiply-add counts as two FLOPs; only matrix products, convolutions and attention count, as in
:mod:`torch.utils.flop_counter`. Shapes: T tokens, E experts, D width.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from zoo.moe.experts import ExpertBank, TokenExperts
from zoo.moe.field import FieldExperts
from zoo.moe.router import Router
from zoo.moe.routing import Context, Routing

Part = Literal["router", "experts", "other"]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Parameters and FLOPs of one forward pass; FLOPs are those of the whole batch.

    Attributes:
        parameters_total: all parameters, those that two modules share once.
        parameters_active: what a token uses on average: everything outside banks, and of each bank
            Σ_e counts_e · parameters_e / tokens over the valid tokens of all its calls. Of a field bank, the experts
            that ran count in full.
        flops: executed. Token banks are executed expert by expert for the count, whatever back end they are set to:
            what others spend on padding or on experts that were not chosen says nothing about the network.
        flops_total: as if every expert had run on every valid token.
        flops_by_part: ``flops`` of routers, of banks, and of all else, shared experts among it.
    """

    parameters_total: int
    parameters_active: float
    flops: int
    flops_total: int
    flops_by_part: Mapping[Part, int]


def cost(network: nn.Module, *inputs: Any, **kwargs: Any) -> Cost:
    """Count what ``network(*inputs, **kwargs)`` costs, in evaluation mode and without gradients.

    Layers are found by their routers and banks; a layer within an expert counts as a part of that expert. A bank that
    is run by other means than a routing, such as a :class:`~zoo.moe.twin.DenseMixture`, is active in full.

    Args:
        network: any module; its modes and back ends are as before afterwards.
        *inputs: for the network, of the batch to count.
        **kwargs: for the network.
    """
    with _prepared(network), FlopCounterMode(display=False, custom_mapping=dict(_FORMULAS)) as counter:
        meter = _Meter(counter)
        with meter.attached(network):
            network(*map(_detached, inputs), **{name: _detached(value) for name, value in kwargs.items()})
    other = meter.executed() - meter.router - meter.experts
    return Cost(
        parameters_total=sum(parameter.numel() for parameter in network.parameters()),
        parameters_active=_active(network, meter.use()),
        flops=meter.executed(),
        flops_total=meter.executed() + meter.spared,
        flops_by_part={"router": meter.router, "experts": meter.experts, "other": other},
    )


def _detached(value: Any) -> Any:
    # The counter hooks tensors that require gradients, of which there are none here.
    return value.detach() if isinstance(value, Tensor) else value


class _Meter:
    """Reads a FLOP counter around routers and banks.

    Attributes:
        router: FLOPs within routers.
        experts: FLOPs within banks.
        spared: FLOPs that the experts would have taken for the valid tokens that did not choose them.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        self.router = self.experts = self.spared = 0
        self._counter = counter
        self._starts: list[int] = []
        self._visits: dict[ExpertBank, Tensor] = {}
        self._tokens: dict[ExpertBank, int] = defaultdict(int)

    def executed(self) -> int:
        """FLOPs of the network so far, without what this meter ran itself."""
        return self._counter.get_total_flops() - self.spared

    def use(self) -> dict[ExpertBank, list[float]]:
        """By bank, for each expert the share of tokens that used it."""
        return {bank: (v / max(self._tokens[bank], 1)).tolist() for bank, v in self._visits.items()}

    @contextmanager
    def attached(self, network: nn.Module) -> Iterator[None]:
        """Watch the routers and banks of a network."""
        with ExitStack() as stack:
            for module in network.modules():
                if isinstance(module, Router | ExpertBank):
                    leave = self._leave_router if isinstance(module, Router) else self._leave_bank
                    stack.callback(module.register_forward_pre_hook(self._enter).remove)
                    stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._starts.append(self.executed())

    def _leave_router(self, router: Router, args: Any, kwargs: Any, routing: Routing) -> None:
        start = self._starts.pop()
        if not self._starts:
            self.router += self.executed() - start

    def _leave_bank(self, bank: ExpertBank, args: Any, kwargs: Any, y: Tensor) -> None:
        start = self._starts.pop()
        if not self._starts:
            self.experts += self.executed() - start
            before = self._counter.get_total_flops()
            # Layers within experts must not take the runs below for their own.
            self._starts.append(start)
            self._visit(bank, *_arguments(*args, **kwargs))
            self._starts.pop()
            self.spared += self._counter.get_total_flops() - before

    def _visit(self, bank: ExpertBank, x: Tensor, routing: Routing, context: Context | None) -> None:
        """Note who used which expert, and run the experts on the tokens that did not."""
        counts = routing.counts().cpu()
        tokens = routing.index.shape[0] if routing.mask is None else int(routing.mask.sum())
        if isinstance(bank, FieldExperts):
            ran = counts > 0 if bank.skip_idle else torch.ones_like(counts, dtype=torch.bool)
            self._add(bank, ran, 1)
            for expert in torch.nonzero(~ran).flatten().tolist():
                bank.experts[expert](x, context)
        elif isinstance(bank, TokenExperts):
            self._add(bank, counts, tokens)
            rows = x.reshape(-1, x.shape[-1])
            for expert, count in enumerate(counts.tolist()):
                if count < tokens:
                    bank.expert(expert, rows[: tokens - count])
        else:
            raise TypeError(
                f"no rule to count a {type(bank).__name__}: it is neither a token nor a field bank"
            )

    def _add(self, bank: ExpertBank, visits: Tensor, tokens: int) -> None:
        self._visits[bank] = self._visits.get(bank, 0) + visits.double()
        self._tokens[bank] += tokens


def _arguments(
    x: Tensor, routing: Routing, context: Context | None = None
) -> tuple[Tensor, Routing, Context | None]:
    return x, routing, context


def _active(network: nn.Module, use: Mapping[ExpertBank, Sequence[float]]) -> float:
    """Parameters that a token uses, each weighted by the share of tokens that use it."""
    inside = {module for bank in use for module in bank.modules()}
    share: dict[nn.Parameter, float] = defaultdict(float)
    for module in network.modules():
        if module not in inside:
            share.update((parameter, 1.0) for parameter in module.parameters(recurse=False))
    for bank, experts in use.items():
        for parameter, part in _shares(bank, experts):
            share[parameter] = min(share[parameter] + part, 1.0)
    return sum(parameter.numel() * part for parameter, part in share.items())


def _shares(bank: ExpertBank, use: Sequence[float]) -> Iterator[tuple[nn.Parameter, float]]:
    """The parameters of a bank with the share of tokens that use them.

    A bank holds its experts stacked, as parameters of its own of shape (E, ...), or as modules in ``experts``. What
    else it holds, every token uses.
    """
    for parameter in bank.parameters(recurse=False):
        yield parameter, sum(use) / len(use) if parameter.shape[:1] == (len(use),) else 1.0
    for name, child in bank.named_children():
        if name == "experts" and isinstance(child, nn.ModuleList):
            for expert, part in zip(child, use, strict=True):
                yield from ((parameter, part) for parameter in expert.parameters())
        else:
            yield from ((parameter, 1.0) for parameter in child.parameters())


@contextmanager
def _prepared(network: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, and nothing executed in a way that hides its matrix products."""
    modes = {module: module.training for module in network.modules()}
    banks = {m: (m.backend, m.ran) for m in network.modules() if isinstance(m, TokenExperts)}
    # The fast paths of attention are single operators without a formula.
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        network.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        for bank in banks:
            bank.backend = "sorted" if "sorted" in bank.backends else "reference"
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for bank, (backend, ran) in banks.items():
            bank.backend, bank.ran = backend, ran
        for module, training in modes.items():
            module.training = training


def _product(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """A product of (stacks of) matrices of shapes a and b, or of one matrix cut into groups with a stack."""
    return 2 * math.prod(a if len(a) <= len(b) else a[1:]) * b[-1]


def _sum(out: Sequence[int], a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """A product added to a tensor in place."""
    return _product(a, b)


def _recurrent(x: Sequence[int], inward: Sequence[int], hidden: Sequence[int], *_: Any, **__: Any) -> int:
    """One recurrent layer: every step of x meets both matrices."""
    return 2 * math.prod(x[:-1]) * (math.prod(inward) + math.prod(hidden))


def _recurrent_stack(x: Sequence[int], weights: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """All layers and directions at once."""
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


# Of shapes to FLOPs, for operators that the counter does not know.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten._grouped_mm: _product,
    torch.ops.aten.addmm_: _sum,
    torch.ops.aten.baddbmm_: _sum,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten._cudnn_rnn: _recurrent_stack,
}

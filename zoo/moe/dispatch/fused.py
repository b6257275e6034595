"""Feed-forward experts as one node of the autograd graph.

The answers of the experts and the activations are never kept: the node saves the pre-activations (2·N·H numbers for
SwiGLU, N·H for GELU) and computes the rest again. Rows are gathered run by run, so that the working set stays in the
cache and no large buffer is allocated; the router weight's gradient is <dA, A>, which needs no answers either.

Shapes: T tokens, D width in and out, H hidden, W = H or 2H (SwiGLU), N choices, E experts.

    P = X up^T + b_up,  A = act(P),  y = w (A down^T + b_down)
    dA = dY down,  dw = <dA, A> + <dY, b_down>,  d_down = (w dY)^T A,  dP = act'(P) (w dA),  d_up = dP^T X,  dX = dP up
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zoo.moe.activation import Activation, activate
from zoo.moe.dispatch.grouped import obstacle
from zoo.moe.dispatch.plan import Plan, Run, make_plan
from zoo.moe.precision import autocast_dtype
from zoo.moe.routing import Routing

if TYPE_CHECKING:
    from zoo.moe.feedforward import FeedForwardExperts

LARGEST = 2 << 20
"""Most bytes of hidden numbers per thread in a run of several experts: its working set stays in the cache."""


def by_one_node(bank: FeedForwardExperts, x: Tensor, routing: Routing) -> Tensor:
    """Run a feed-forward bank in one autograd node; x (T, D) → (T, D).

    Not differentiable twice: for second derivatives take the back end "sorted".
    """
    inputs = (x, routing.weight, bank.up, bank.down, bank.up_bias, bank.down_bias)
    dtype, lowered = x.dtype, autocast_dtype(x)
    if lowered is not None:
        dtype = lowered
        inputs = tuple(None if value is None else value.to(dtype) for value in inputs)  # type: ignore[assignment]
    largest = LARGEST * torch.get_num_threads() // (bank.up.shape[1] * dtype.itemsize)
    # Sums over pieces of an expert would be rounded at every piece in half precision.
    plan = make_plan(routing, largest, ragged=obstacle(bank, x) is None, cut=dtype.itemsize >= 4)
    # The node cannot see this itself: inside it, gradients are always off.
    keep = torch.is_grad_enabled() and any(value.requires_grad for value in inputs if value is not None)
    with torch.autocast(x.device.type, enabled=False):
        return cast(Tensor, _FeedForward.apply(*inputs, plan, bank.activation, keep))


class _FeedForward(torch.autograd.Function):
    """See the module's equations."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        up: Tensor,
        down: Tensor,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        plan: Plan,
        activation: Activation,
        keep: bool,
    ) -> Tensor:
        """Σ_k weight_k · expert_k(x) for x (T, D); ``keep`` what a backward pass will need."""
        w = weight.flatten().index_select(0, plan.choice)[:, None]
        if plan.padding is not None:
            w.index_fill_(0, plan.padding, 0.0)
        kept = x.new_empty(plan.choices, up.shape[1]) if keep else None
        y = x.new_zeros(x.shape[0], down.shape[1])
        for run in plan.runs:
            token = plan.token[run.slots]
            place = None if kept is None else kept[run.choices]
            p = _products(
                _rows(x, token, run),
                up[run.experts].mT,
                run,
                _part(up_bias, run),
                place if run.full else None,
            )
            if place is not None and not run.full:
                place.copy_(run.pack(p))
            answer = _products(activate(p, activation), down[run.experts].mT, run, _part(down_bias, run))
            y.index_add_(0, token, _blank(answer.mul_(w[run.slots]), run))
        if keep:
            ctx.save_for_backward(x, w, up, down, up_bias, down_bias, kept)
            ctx.plan, ctx.activation, ctx.shape = plan, activation, weight.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight, up, down and the biases."""
        x, w, up, down, up_bias, down_bias, kept = ctx.saved_tensors
        plan: Plan = ctx.plan
        d_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        d_w = torch.empty_like(w)
        d_up, d_down, d_up_bias, d_down_bias = (
            _gradient(value, needed, plan)
            for value, needed in zip((up, down, up_bias, down_bias), ctx.needs_input_grad[2:6], strict=True)
        )
        for run in plan.runs:
            token, p, scale = plan.token[run.slots], run.unpack(kept[run.choices]), w[run.slots]
            d_y = _rows(grad, token, run)
            d_a = _products(d_y, down[run.experts], run)
            a, silu = _activate_again(p, ctx.activation)
            d_w[run.slots] = torch.linalg.vecdot(d_a, a)[:, None]
            if down_bias is not None:
                run.split(d_w[run.slots]).baddbmm_(run.split(d_y), down_bias[run.experts, :, None])
            d_y.mul_(scale)
            _outer(d_y, a, run, d_down, d_down_bias)
            d_p = _through(d_a.mul_(scale), p, silu)
            if d_up is not None or d_up_bias is not None:
                _outer(d_p, _rows(x, token, run), run, d_up, d_up_bias)
            if d_x is not None:
                d_x.index_add_(0, token, _blank(_products(d_p, up[run.experts], run), run))
        d_weight = d_w.new_zeros(ctx.shape).flatten().index_add_(0, plan.choice, d_w.squeeze(1))
        return d_x, d_weight.view(ctx.shape), d_up, d_down, d_up_bias, d_down_bias, None, None, None


def _rows(x: Tensor, token: Tensor, run: Run) -> Tensor:
    """The rows of a run, zeros in its padding."""
    return _blank(x.index_select(0, token), run)


def _blank(rows: Tensor, run: Run) -> Tensor:
    """Zeros in the padding, whatever stood there: an expert of NaN reaches no token that did not choose it."""
    return rows if run.padding is None else rows.index_fill_(0, run.padding, 0.0)


def _part(bias: Tensor | None, run: Run) -> Tensor | None:
    return None if bias is None else bias[run.experts, None]


def _products(
    rows: Tensor, weights: Tensor, run: Run, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Every expert's rows (n, in) times its matrix (in, out), plus its bias (1, out)."""
    if run.ragged:
        # Banks with biases have no ragged runs.
        ends = torch.tensor(run.loads, device=rows.device).cumsum(0).int()
        answer = F.grouped_mm(rows, weights, offs=ends)
        return answer if out is None else out.copy_(answer)
    if run.last - run.first == 1:
        if bias is None:
            return torch.mm(rows, weights[0], out=out)
        return torch.addmm(bias[0], rows, weights[0], out=out)
    stacked = None if out is None else run.split(out)
    if bias is None:
        return torch.bmm(run.split(rows), weights, out=stacked).flatten(0, 1)
    return torch.baddbmm(bias, run.split(rows), weights, out=stacked).flatten(0, 1)


def _outer(left: Tensor, right: Tensor, run: Run, weight: Tensor | None, bias: Tensor | None) -> None:
    """Every expert's left^T right into its place of a weight gradient, and the sums of left into that of a bias."""
    if bias is not None:
        sums = run.split(left).sum(1)
        bias[run.experts] = bias[run.experts] + sums if run.further else sums
    if weight is None:
        return
    if run.ragged:
        parts = zip(
            weight[run.experts].unbind(),
            torch.split(left, list(run.loads)),
            torch.split(right, list(run.loads)),
            strict=True,
        )
        for place, mine, other in parts:
            torch.mm(mine.t(), other, out=place)
    elif run.further:
        weight[run.first].addmm_(left.t(), right)
    elif run.last - run.first == 1:
        torch.mm(left.t(), right, out=weight[run.first])
    else:
        torch.bmm(run.split(left).mT, run.split(right), out=weight[run.experts])


def _gradient(value: Tensor | None, needed: bool, plan: Plan) -> Tensor | None:
    """An empty gradient, zero where no run will write."""
    if value is None or not needed:
        return None
    grad = torch.empty_like(value)
    for first, last in plan.idle:
        grad[first:last].zero_()
    return grad


def _activate_again(p: Tensor, activation: Activation) -> tuple[Tensor, Tensor | None]:
    """The activation, and silu(gate) alone, which its derivative needs (None for GELU)."""
    if activation == "gelu":
        return F.gelu(p), None
    gate, up = p.chunk(2, dim=-1)
    silu = F.silu(gate)
    return silu * up, silu


def _through(d_a: Tensor, p: Tensor, silu: Tensor | None) -> Tensor:
    """The gradient of the pre-activation from that of the activation, which is used up."""
    if silu is None:
        return cast(Tensor, torch.ops.aten.gelu_backward(d_a, p))
    gate, up = p.chunk(2, dim=-1)
    d_p = torch.empty_like(p)
    d_gate, d_up = d_p.chunk(2, dim=-1)
    torch.mul(d_a, silu, out=d_up)
    torch.ops.aten.silu_backward.grad_input(d_a.mul_(up), gate, grad_input=d_gate)
    return d_p

"""A layer in the slot of somebody else's block, and where its output goes."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from zoo.moe import FeedForwardExperts, LinearScorer, MoE, MoEOutput, Router, RouterStats, TopK, balance_loss
from zoo.moe.collector import Slot, collect, push
from zoo.nn import checkpoint

D, E = 16, 4


def layer(experts=E):
    return MoE(Router(LinearScorer(D, experts), TopK(2)), FeedForwardExperts(D, 8, experts))


def output():
    return layer()(torch.randn(3, D))


def transformer(depth=3):
    """A transformer of timm; block number i has a layer of i + 2 experts in its mlp slot."""
    torch.manual_seed(0)
    network = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=D, depth=depth, num_heads=2, num_classes=3, mlp_ratio=1
    )
    for number, block in enumerate(network.blocks):
        block.mlp = Slot(layer(number + 2))
    return network


def test_a_block_of_timm_takes_a_layer_in_its_slot():
    torch.manual_seed(0)
    block = Block(D, num_heads=2)
    block.mlp = Slot(layer())
    x = torch.randn(2, 5, D, requires_grad=True)
    with collect() as outputs:
        y = block(x)
    (found,) = outputs
    middle = x + block.attn(block.norm1(x))
    expected = block.mlp.layer(block.norm2(middle))
    torch.testing.assert_close(y, middle + expected.y, rtol=0, atol=1e-6)
    assert isinstance(found, MoEOutput)
    assert torch.equal(found.routing.index, expected.routing.index)
    (y.square().sum() + balance_loss(found.routing)).backward()
    for name, parameter in [("x", x), *block.named_parameters()]:
        assert parameter.grad.isfinite().all(), name
    assert block.mlp.layer.router.scorer.out.weight.grad.abs().max() > 0


def test_a_constructor_of_timm_builds_blocks_with_layers():
    def mlp(in_features, hidden_features, **_):
        bank = FeedForwardExperts(in_features, hidden_features, E)
        return Slot(MoE(Router(LinearScorer(in_features, E), TopK(2)), bank))

    network = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=D, depth=2, num_heads=2, num_classes=3, mlp_layer=mlp
    )
    with collect() as outputs:
        y = network(torch.randn(2, 3, 16, 16))
    assert (y.shape, len(outputs)) == ((2, 3), 2)


def test_outputs_come_in_the_order_of_the_layers():
    with collect() as outputs:
        transformer()(torch.randn(2, 3, 16, 16))
    assert [out.routing.num_experts for out in outputs] == [2, 3, 4]
    # Two images of four patches and one class token.
    assert [int(RouterStats.of(out.routing).tokens) for out in outputs] == [10, 10, 10]


def test_a_push_without_a_collector_does_nothing():
    with collect() as outputs:
        pass
    push(output())
    Slot(layer())(torch.randn(3, D))
    assert outputs == []


def test_the_innermost_collector_takes_all():
    first, second, third = output(), output(), output()
    with collect() as outer:
        push(first)
        with collect() as inner:
            push(second)
        push(third)
    assert outer == [first, third]
    assert inner == [second]


def test_an_error_closes_the_collector():
    with pytest.raises(RuntimeError, match="stop"), collect() as outputs:
        raise RuntimeError("stop")
    push(output())
    assert outputs == []


def test_a_thread_does_not_push_to_the_collector_of_another():
    mine, theirs = output(), []

    def work():
        push(output())
        with collect() as outputs:
            push(mine)
        theirs.extend(outputs)

    with collect() as outputs:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert outputs == []
    assert theirs == [mine]


def test_tasks_that_take_turns_keep_their_outputs_apart():
    async def work(pushed):
        with collect() as outputs:
            for out in pushed:
                push(out)
                await asyncio.sleep(0)
        return outputs

    async def both(one, two):
        return await asyncio.gather(work(one), work(two))

    one, two = [output(), output()], [output(), output(), output()]
    assert asyncio.run(both(one, two)) == [one, two]


class Checkpointed(nn.Module):
    """Blocks that keep no activations."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = blocks

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x)
        return x


def gradients(network, images):
    with collect() as outputs:
        y = network(images)
    number = len(outputs)
    (y.square().sum() + sum(balance_loss(out.routing) for out in outputs)).backward()
    assert len(outputs) == number == 3
    counts = [out.routing.counts().tolist() for out in outputs]
    return counts, {name: parameter.grad for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("by", ["zoo", "timm"])
def test_checkpointed_blocks_push_once_and_have_equal_gradients(by):
    images = torch.randn(2, 3, 16, 16)
    counts, expected = gradients(transformer(), images)
    network = transformer()
    if by == "timm":
        network.set_grad_checkpointing()
    else:
        network.blocks = Checkpointed(network.blocks)
    calls = []
    for module in network.modules():
        if isinstance(module, MoE):
            module.register_forward_pre_hook(lambda module, _: calls.append(module))
    recounts, found = gradients(network, images)
    assert len(calls) == 6
    assert recounts == counts
    found = {name.replace("blocks.blocks", "blocks"): gradient for name, gradient in found.items()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )

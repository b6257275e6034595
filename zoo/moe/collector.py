"""An adapter for blocks that know nothing of Mixture-of-Experts layers and expect x → y in a slot of theirs.

>>> block.mlp = Slot(layer)
>>> with collect() as outputs:
...     y = vision_transformer(images)
>>> loss = task_loss(y) + sum(balance_loss(output.routing) for output in outputs)
>>> loss.backward()

Such a block hands over x alone: a layer in a slot sees neither a mask nor a context. A network of one's own returns the
outputs of its layers instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from zoo.moe.routing import MoEOutput

_collector: ContextVar[list[MoEOutput] | None] = ContextVar("collector", default=None)


@contextmanager
def collect() -> Iterator[list[MoEOutput]]:
    """Gather what the slots push while the block is open, in the order in which the layers ran.

    Slots push to the innermost open collector of their own thread or task. Close it before the backward pass: layers
    that activation checkpointing runs a second time then push nothing.

    Yields:
        The list to which the slots append.
    """
    outputs: list[MoEOutput] = []
    token = _collector.set(outputs)
    try:
        yield outputs
    finally:
        _collector.reset(token)


def push(output: MoEOutput) -> None:
    """Hand an output to the innermost open collector; without one nothing happens."""
    outputs = _collector.get()
    if outputs is not None:
        outputs.append(output)


class Slot(nn.Module):
    """A layer as a module x → y, such as the ``mlp`` of a block of timm; its output goes to the open collector.

    Args:
        layer: module x → :class:`~zoo.moe.routing.MoEOutput`.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The layer's y for x (..., D)."""
        output: MoEOutput = self.layer(x)
        push(output)
        return output.y

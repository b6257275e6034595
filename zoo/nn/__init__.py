"""Blocks that two or more domains use."""

from zoo.nn.checkpoint import checkpoint
from zoo.nn.dropout import ByteDropout

__all__ = ["ByteDropout", "checkpoint"]

"""Blocks that two or more domains use."""

from zoo.nn.dropout import ByteDropout

__all__ = ["ByteDropout"]

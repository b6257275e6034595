"""Precision: raising it, reading autocast's, and buffers that keep theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


def raised(x: Tensor) -> Tensor:
    """Raise half precision to fp32; fp32 and fp64 stay, without a copy."""
    return x.float() if x.itemsize < 4 else x


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The precision that autocast computes in on the device of x; None where it is off."""
    device = x.device.type
    # Autocast knows no meta device.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


class Fp32Buffers(nn.Module):
    """A module whose own floating-point buffers stay in fp32 under every change of precision."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.dtype != torch.float32:
                # The values from before the cast, which has rounded them; without memory there are none.
                setattr(self, name, buffer.float() if buffer.is_meta else before[name].to(buffer.device))
        return self

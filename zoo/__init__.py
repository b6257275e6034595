"""MoE Zoo: mixture-of-experts models for six domains, and the layer they share.

The folders ``domains/``, ``data/`` and ``configs/`` of the repository are imported as ``zoo.domains``, ``zoo.data``
and ``zoo.configs``, from a checkout as from an installed package. Importing ``zoo`` does not import torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "create_model", "get_entry", "list_models"]

# An installed package has its domains inside; in a checkout they stand beside the folder of this file.
_here = Path(__file__).resolve().parent
if not (_here / "domains").is_dir() and (_here.parent / "domains" / "__init__.py").is_file():
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from zoo.registry import create_model, get_entry, list_models


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zoo import registry

    return getattr(registry, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

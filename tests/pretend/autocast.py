"""Mixed precision on the pretend device: matrix products in the lower precision, what needs digits in float32, as on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.pretend.tensor import NAME, mapped

KEY = "AutocastPrivateUse1"
LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "scaled_dot_product_attention")
FLOAT32 = ("layer_norm", "softmax.int", "log_softmax.int", "cross_entropy_loss", "nll_loss", "rsqrt", "exp", "log", "pow.Tensor_Scalar")
"""Of torch's lists for CUDA, what the models of the tests use."""


def register() -> list[Any]:
    make: Any = torch.library.Library
    rest = make("_", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, KEY)
    library = make("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these operations are composed of others
        for names, dtype in ((LOWER, None), (FLOAT32, torch.float32)):
            for name in names:
                library.impl(name, _casting(name, dtype), KEY)
    return [rest, library]


def _casting(name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    key = getattr(torch._C.DispatchKey, KEY)

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or torch.get_autocast_dtype(NAME)

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(wanted) if tensor.is_floating_point() and tensor.device.type == NAME else tensor

        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            args, kwargs = mapped((args, kwargs), cast)
            return operation(*args, **kwargs)

    return run

"""Which matrix kernels are there, and which one carries a model on this machine?

A kernel packs a weight once and then multiplies any number of rows by it. Which row counts give the same bits is not
known here: `row_tiles.py` finds out by measuring. See docs/adr/0001-batch-invariant-kernels.md for what was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Apply = Callable[[Tensor], Tensor]
"""[rows, in] in the kernel's activation dtype -> [rows, out]."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One way to multiply rows by a weight."""

    name: str
    """Part of the numeric recipe: two kernels never share a name."""
    activation: torch.dtype
    """What `apply` takes."""
    pack: Callable[[Tensor, Tensor | None], Apply]
    """(weight [out, in], bias [out] or None) -> apply. The weight may be freed afterwards."""
    candidates: tuple[int, ...]
    """Row counts worth proving, ascending."""
    exact: bool = False
    """True when fp32 weights are kept as they are; otherwise they count as rounded to bf16 first."""
    pack_swiglu: Callable[[Tensor, Tensor], Apply] | None = None
    """(gate [ffn, in], up [ffn, in]) -> rows -> silu(gate) * up [rows, ffn], where the kernel can fuse it."""


class Linear:
    """A packed weight: [rows, in_features] -> [rows, out_features]."""

    __slots__ = ("apply", "in_features", "out_features")

    def __init__(self, kernel: Kernel, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.apply = kernel.pack(weight, bias)

    @classmethod
    def swiglu(cls, kernel: Kernel, gate: Tensor, up: Tensor) -> Linear:
        """The fused feed-forward entry of kernels that have one: [rows, in] -> silu(gate) * up [rows, ffn]."""
        if kernel.pack_swiglu is None:
            raise ValueError(f"kernel {kernel.name} has no fused SwiGLU")
        linear = cls.__new__(cls)
        linear.out_features, linear.in_features = gate.shape
        linear.apply = kernel.pack_swiglu(gate, up)
        return linear


def choose(dtype: str, device: torch.device) -> Kernel:
    """The fastest kernel for a dtype setting ("bf16", "fp32", "int8") that this machine has, by capability alone.

    Two processes on equal machines choose alike. ValueError for an unknown setting, or one the device cannot do.
    """
    if dtype not in {"bf16", "fp32", "int8"}:
        raise ValueError(f"dtype {dtype!r} is none of bf16, fp32, int8")
    if device.type != "cpu":
        if dtype == "int8":
            raise ValueError(f"dtype int8 runs on the CPU only, not on {device.type}; use bf16")
        return GEMM_BF16 if dtype == "bf16" else GEMM_FP32
    if dtype == "int8":
        return INT8
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call] # torch's stub
    if dtype == "fp32":
        return ONEDNN_FP32 if has_onednn else GEMM_FP32
    if has_onednn and _has_amx():
        return ONEDNN_BF16
    if "fbgemm" in torch.backends.quantized.supported_engines:
        return FP16_WEIGHT
    return GEMM_BF16


def plain(kernel: Kernel) -> Kernel:
    """The unpacked kernel of the same precision: what is left when a packed one cannot be proven."""
    return GEMM_BF16 if kernel.activation == torch.bfloat16 else GEMM_FP32


def _has_amx() -> bool:
    probe: Any = getattr(torch.cpu, "_is_amx_tile_supported", None)  # private, and absent from some builds
    return bool(probe and probe())


def _pack_gemm(dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Apply]:
    def pack(weight: Tensor, bias: Tensor | None) -> Apply:
        packed = weight.to(dtype).contiguous()
        if bias is None:
            turned = packed.t()
            return lambda rows: torch.mm(rows, turned)  # what `linear` comes to, without the way there
        offset = bias.to(dtype)
        return lambda rows: torch.nn.functional.linear(rows, packed, offset)

    return pack


def _pack_onednn(dtype: torch.dtype) -> Callable[[Tensor, Tensor | None], Apply]:
    """The weight is laid out for oneDNN once; plain `linear` reorders it at every call."""

    def pack(weight: Tensor, bias: Tensor | None) -> Apply:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), _ONEDNN_ROWS)  # noqa: SLF001 - no public name
        offset = None if bias is None else bias.to(dtype)
        linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - no public name
        apply: Apply = lambda rows: linear(rows, packed, offset, "none", [], "")  # noqa: E731 - one expression
        return apply

    return pack


def _pack_onednn_swiglu(dtype: torch.dtype) -> Callable[[Tensor, Tensor], Apply]:
    """The activation and the product with `up` run on the tile while it is still in registers."""

    def pack(gate: Tensor, up: Tensor) -> Apply:
        reorder = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - no public name
        linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - no public name
        packed_gate = reorder(gate.to(dtype).contiguous(), _ONEDNN_ROWS)
        packed_up = reorder(up.to(dtype).contiguous(), _ONEDNN_ROWS)

        def apply(rows: Tensor) -> Tensor:
            activated = linear(rows, packed_gate, None, "swish", [], "")
            product: Tensor = linear.binary(rows, activated, packed_up, None, "mul")
            return product

        return apply

    return pack


def _pack_fp16_weight(weight: Tensor, bias: Tensor | None) -> Apply:
    """Weights rounded to bf16, kept as fp16, multiplied and summed in fp32 (FBGEMM).

    A bf16 value has 8 significant bits and fp16 holds 11, so a weight between 2**-17 and 65504 in size is kept exactly.
    A matrix that has larger or smaller ones is scaled by a power of two first, which is exact, and its output back.
    """
    rounded = weight.to(torch.bfloat16).float()
    exponent = _exponent(rounded)
    packed = torch.ops.quantized.linear_prepack_fp16((rounded * 2.0**exponent).contiguous(), None)
    linear = torch.ops.quantized.linear_dynamic_fp16
    offset = None if bias is None else bias.to(torch.bfloat16).float()

    def apply(rows: Tensor) -> Tensor:
        product: Tensor = linear(rows, packed)
        if exponent:
            product.mul_(2.0**-exponent)
        return product if offset is None else product.add_(offset)

    return apply


def _exponent(weight: Tensor) -> int:
    """The power of two that brings the largest weight just below fp16's limit; 0 where every weight fits as it is."""
    if torch.equal(weight.half().float(), weight):
        return 0
    largest = float(weight.abs().max())
    return 0 if largest == 0.0 else int(torch.frexp(torch.tensor(32768.0 / largest)).exponent) - 1


def _pack_int8(weight: Tensor, bias: Tensor | None) -> Apply:
    """Symmetric int8 weights, one bf16 scale per output; activations stay bf16 (weight-only)."""
    values = weight.float()
    scale = (values.abs().amax(dim=1) / 127.0).clamp_min(2.0**-100).to(torch.bfloat16)
    packed = torch.round(values / scale.float()[:, None]).clamp_(-127, 127).to(torch.int8)
    offset = None if bias is None else bias.to(torch.bfloat16)

    def apply(rows: Tensor) -> Tensor:
        product: Tensor = torch._weight_int8pack_mm(rows, packed, scale)  # noqa: SLF001 - no public name
        return product if offset is None else product.add_(offset)

    return apply


_ONEDNN_ROWS = 64  # a hint for the layout, not a limit
_EIGHTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)
# FBGEMM's inner kernels take 1 to 6 rows (1 to 14 with AVX-512), and those of 1 and 2 rows sum in another order:
# multiples of 6 and 12 split into full ones.
_SIXES = (1, 2, 3, 4, 5, 6, 8, 12, 18, 24, 36, 48, 60, 72, 96, 120, 144, 180, 240, 300, 360, 420, 480, 516)

GEMM_FP32 = Kernel("gemm-fp32", torch.float32, _pack_gemm(torch.float32), _EIGHTS, exact=True)
GEMM_BF16 = Kernel("gemm-bf16", torch.bfloat16, _pack_gemm(torch.bfloat16), _EIGHTS)
ONEDNN_FP32 = Kernel(
    "onednn-fp32",
    torch.float32,
    _pack_onednn(torch.float32),
    _EIGHTS,
    exact=True,
    pack_swiglu=_pack_onednn_swiglu(torch.float32),
)
ONEDNN_BF16 = Kernel(
    "onednn-bf16",
    torch.bfloat16,
    _pack_onednn(torch.bfloat16),
    _EIGHTS,
    pack_swiglu=_pack_onednn_swiglu(torch.bfloat16),
)
FP16_WEIGHT = Kernel("fbgemm-fp16w", torch.float32, _pack_fp16_weight, _SIXES)
INT8 = Kernel("int8pack", torch.bfloat16, _pack_int8, _EIGHTS)

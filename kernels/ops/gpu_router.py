"""Which experts does each token go to, found in two launches neither of which waits for long?

The router's product has many columns and few outputs: programs each sum a share of the columns, enough of them for
every multiprocessor, and whoever chooses adds the shares up in their order: a token's bits do not depend on how many
there are. The choice is made on whole numbers, which one instruction compares across a warp; it begins while the
product ends.
"""
# mypy: disable-error-code="import-untyped, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ops.gpu_formats import IN_PYTHON
from kernels.ops.gpu_launch import check, power_of_two, runs_kernels, tiles
from kernels.ops.gpu_linear import library_linear, linear_parts
from kernels.ops.gpu_overlap import overlaps, wait_alone
from kernels.ops.router import Routes
from kernels.ops.router import route as route_twin

OVERLAPS = True
"""Whether programs that choose start before the product is complete, where the GPU can."""
_MOST_SHARES, _TURN, _FEW_TOKENS = 10, 128, 256
"""Of a product: shares at most, columns of a turn of any tile of `gpu_linear`, and up to how many tokens the library
has too few programs."""
_WIDTH = 128
"""Experts that a warp compares at a time, four a lane."""
_MANY_TOKENS, _TOKENS_AT_ONCE = 1024, 4
"""From so many tokens on a program chooses for several, a warp each: there are more than run at once."""
_MOST_REGISTERS, _MOST_REGISTERS_OF_MANY = 160, 128
"""Of a thread, for one token and for several. A compiler that is not told saves them, and waits for each few loads."""
SHARES_AT_ONCE = tl.constexpr(10)
"""That a warp asks for: three registers of four logits each, of 384 experts."""
MODERATE = tl.constexpr(0x42700000)
"""The bits of 60: logits up to there are far from where a quotient or a root takes more than its plain steps."""
LEAST = tl.constexpr(-0x80000000)
"""What is below every affinity's number: experts that are taken, or none."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Which of the experts here each one is, and which tokens are padding."""

    rows: Tensor | None
    """[experts] int32, -1 for those elsewhere; None = all are here, in order."""
    lines: Tensor
    """[tokens] int32; below 0 for padding, which goes to no expert (-1)."""


def route_rows(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    is_image: Tensor | None,
    placed: Placed,
    *,
    top_k: int,
    scaling: float,
    is_invariant: bool = True,
) -> Routes:
    """Each row's experts: the product of rows and router, and a choice.

    x: [tokens, size] bf16.  router: [experts, size] bf16.  The others are `choose`'s.  is_invariant: a row's logits do
    not depend on how many there are.
    """
    logits = logits_of(x, router, is_invariant=is_invariant)
    biases = bias, image_bias, is_image
    return choose(logits, *biases, placed, top_k=top_k, scaling=scaling, follows_product=len(logits) > 1)


def logits_of(x: Tensor, router: Tensor, *, is_invariant: bool) -> Tensor:
    """X @ router.T in shares of the columns, or of many rows by the library in one: [shares, tokens, experts] fp32."""
    if not is_invariant and len(x) > _FEW_TOKENS:
        return library_linear(x, router, wide=True)[None]
    return linear_parts(x, router, parts=shares_of(x.shape[1]))


def shares_of(size: int) -> int:
    """Into how many the columns are cut, whatever the rows: each is of whole turns of every tile that sums it."""
    return next((each for each in range(_MOST_SHARES, 1, -1) if size % (each * _TURN) == 0), 1)


def choose(
    shares: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    is_image: Tensor | None,
    placed: Placed,
    *,
    top_k: int,
    scaling: float,
    follows_product: bool = False,
) -> Routes:
    """Choose by biased affinity, weigh by the affinity itself; of equal ones the lower expert first.

    shares: [shares, tokens, experts] fp32, contiguous: of logits, which are added in their order.  bias, image_bias:
    [experts] fp32.  is_image: [tokens] bool; None = none.  Experts come as int32, as what they are here: -1 for those
    elsewhere.  follows_product: `linear_parts` has just launched them on this stream, and nothing else was since; it
    came after all that the choice reads beside them.
    """
    count, tokens, experts = shares.shape
    check(shares.dtype == torch.float32 and shares.is_contiguous(), "logits are fp32, end to end")
    if not runs_kernels(shares):
        logits = shares[0]
        for each in shares[1:]:
            logits = logits + each
        return _twin(logits, bias, image_bias, is_image, placed, top_k=top_k, scaling=scaling)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=shares.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=shares.device)
    has_images = is_image is not None and image_bias is not None
    width, at_once = min(power_of_two(experts), _WIDTH), _TOKENS_AT_ONCE if tokens >= _MANY_TOKENS else 1
    overlap = follows_product and OVERLAPS and overlaps(shares)
    if tokens:
        _choose_kernel[(tiles(tokens, at_once),)](
            shares,
            bias,
            image_bias if has_images else bias,
            is_image if has_images else bias,
            placed.rows,
            placed.lines,
            chosen,
            weights,
            tokens,
            scaling,
            SHARES=count,
            EXPERTS=experts,
            WIDTH=width,
            PARTS=tiles(experts, width),
            TOP=top_k,
            SLOTS=power_of_two(top_k),
            TOKENS=at_once,
            IMAGES=has_images,
            MAPPED=placed.rows is not None,
            OVERLAP=overlap,
            launch_pdl=overlap,
            num_warps=at_once,
            maxnreg=_MOST_REGISTERS if at_once == 1 else _MOST_REGISTERS_OF_MANY,
        )
    return Routes(chosen, weights)


def _twin(
    logits: Tensor,
    bias: Tensor,
    image_bias: Tensor | None,
    is_image: Tensor | None,
    placed: Placed,
    *,
    top_k: int,
    scaling: float,
) -> Routes:
    biases = bias
    if is_image is not None and image_bias is not None:
        biases = torch.where(is_image.unsqueeze(1), image_bias, bias)
    routes = route_twin(logits, biases, top_k=top_k, scaling=scaling)
    here = routes.experts.int() if placed.rows is None else placed.rows[routes.experts.long()]
    return Routes(torch.where(placed.lines[:, None] >= 0, here, -1), routes.weights)


@triton.jit
def softplus_of(x: tl.tensor, z: tl.tensor) -> tl.tensor:
    """Softplus as its twin computes it: log(1 + u) = 2 atanh(z), z being u / (u + 2), a series of nine terms; fp32."""
    square = z * z
    series = square * (1.0 / 17) + 1.0 / 15
    series = series * square + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    series = series * square + 1.0
    return series * z * 2.0 + tl.maximum(x, 0.0)


@triton.jit
def affinity_of(x: tl.tensor) -> tl.tensor:
    """The root of a logit's softplus, fp32."""
    small = tl.exp(-tl.abs(x))
    return tl.sqrt_rn(softplus_of(x, tl.div_rn(small, small + 2.0)))


@triton.jit
def _quotient(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """A / b rounded to nearest, as `div_rn`, of values of which no step leaves fp32's normal range.

    Its own steps, without the look at the range that keeps one value's steps from being under way with another's.
    """
    if IN_PYTHON:
        return tl.div_rn(a, b)
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], dtype=tl.float32, is_pure=True, pack=1
    )
    inverse = tl.fma(inverse, tl.fma(-b, inverse, 1.0), inverse)
    first = a * inverse
    return tl.fma(inverse, tl.fma(-b, first, a), first)


@triton.jit
def _root(a: tl.tensor) -> tl.tensor:
    """The root rounded to nearest, as `sqrt_rn`, of such values."""
    if IN_PYTHON:
        return tl.sqrt_rn(a)
    inverse = tl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1
    )
    first = a * inverse
    return tl.fma(tl.fma(-first, first, a), inverse * 0.5, first)


@triton.jit
def _affinities(logits: tl.tuple, IS_MODERATE: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    made = ()
    for part in tl.static_range(PARTS):
        x = logits[part]
        if IS_MODERATE:
            small = tl.exp(-tl.abs(x))
            value = _root(softplus_of(x, _quotient(small, small + 2.0)))
        else:
            value = affinity_of(x)
        made = made + (value,)  # noqa: RUF005 - a tuple of Triton's
    return made


@triton.jit
def _add(
    sums: tl.tuple,
    logits: tl.tensor,
    token: tl.tensor,
    tokens: tl.tensor,
    FIRST: tl.constexpr,
    SHARES: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """Sums and the next shares, all of which are asked for before one is added."""
    LAST: tl.constexpr = min(FIRST + SHARES_AT_ONCE, SHARES)
    column = tl.arange(0, WIDTH)[None, :]
    asked, added = (), ()
    for share in tl.static_range(FIRST, LAST):
        at = logits + (share * tokens + token)[:, None] * EXPERTS
        for part in tl.static_range(PARTS):
            known = part * WIDTH + column < EXPERTS
            asked = asked + (tl.load(at + part * WIDTH + column, mask=known, other=0.0),)  # noqa: RUF005 - a tuple of Triton's
    for part in tl.static_range(PARTS):
        total = asked[part]
        if FIRST > 0:
            total += sums[part]
        for share in tl.static_range(1, LAST - FIRST):
            total += asked[share * PARTS + part]
        added = added + (total,)  # noqa: RUF005 - as above
    return added


@triton.jit
def _take(keys: tl.tuple, affinities: tl.tuple, WIDTH: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    """The best of each token's experts, [tokens, 1], its affinity, [tokens], and keys without it.

    keys, affinities: PARTS of [tokens, WIDTH] int32.
    """
    column = tl.arange(0, WIDTH)[None, :]
    most = keys[0]
    for part in tl.static_range(1, PARTS):
        most = tl.maximum(most, keys[part])
    most = tl.max(most, axis=1)[:, None]
    # Of equal ones the lower expert.
    place = tl.where(keys[0] == most, column, PARTS * WIDTH)
    for part in tl.static_range(1, PARTS):
        place = tl.minimum(place, tl.where(keys[part] == most, part * WIDTH + column, PARTS * WIDTH))
    best = tl.min(place, axis=1)[:, None]
    found, others = tl.zeros(keys[0].shape, tl.int32), ()
    for part in tl.static_range(PARTS):
        is_best = part * WIDTH + column == best
        found = tl.where(is_best, affinities[part], found)
        others = others + (tl.where(is_best, LEAST, keys[part]),)  # noqa: RUF005 - a tuple of Triton's
    return best, tl.max(found, axis=1).to(tl.float32, bitcast=True), others


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    image_bias: tl.tensor,
    is_image: tl.tensor,
    rows: tl.tensor,
    lines: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    scaling: tl.tensor,
    SHARES: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IMAGES: tl.constexpr,
    MAPPED: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """A warp has all of a token's experts, WIDTH at a time: nothing is exchanged but by a warp's own instructions."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_real = (token < tokens)[:, None]
    token = tl.minimum(token, tokens - 1).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :] + tl.zeros((TOKENS, 1), tl.int32)
    # What the product does not make is asked for before its end.
    line = tl.load(lines + token)
    added = ()
    for part in tl.static_range(PARTS):
        known = part * WIDTH + column < EXPERTS
        own = tl.load(bias + part * WIDTH + column, mask=known, other=0.0)
        if IMAGES:
            other = tl.load(image_bias + part * WIDTH + column, mask=known, other=0.0)
            own = tl.where((tl.load(is_image + token) != 0)[:, None], other, own)
        added = added + (own,)  # noqa: RUF005 - a tuple of Triton's
    wait_alone(OVERLAP)
    sums = added
    for first in tl.static_range(0, SHARES, SHARES_AT_ONCE):
        sums = _add(sums, logits, token, tokens, first, SHARES, EXPERTS, WIDTH, PARTS)
    # A token's logits are hardly ever far from zero. If one is, slower steps make the same of all that a program has.
    farthest = tl.zeros((TOKENS, WIDTH), tl.int32)
    for part in tl.static_range(PARTS):
        farthest = tl.maximum(farthest, sums[part].to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    is_moderate = tl.max(tl.max(farthest, axis=1), axis=0) <= MODERATE
    if is_moderate:  # noqa: SIM108 - an expression that is chosen while it runs has no tuples
        values = _affinities(sums, True, PARTS)
    else:
        values = _affinities(sums, False, PARTS)
    keys, affinities = (), ()
    for part in tl.static_range(PARTS):
        # Whole numbers in the order of fp32 values; an affinity is not below zero, so its bits are one already.
        bits = (values[part] + added[part]).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        keys = keys + (tl.where(part * WIDTH + column < EXPERTS, key, LEAST),)  # noqa: RUF005 - as above
        affinities = affinities + (values[part].to(tl.int32, bitcast=True),)  # noqa: RUF005 - as above
    # Where a program has one token, all lanes know what it takes; else each token stays where it is.
    slot = tl.arange(0, SLOTS)[None, :] if TOKENS == 1 else column
    experts, own = tl.zeros(slot.shape, tl.int32), tl.zeros(slot.shape, tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for turn in tl.static_range(TOP):
        best, taken, keys = _take(keys, affinities, WIDTH, PARTS)
        experts = tl.where(slot == turn, best, experts)
        own = tl.where(slot == turn, taken[:, None], own)
        total += taken
    is_slot = is_real & (slot < TOP)
    if MAPPED:
        experts = tl.load(rows + experts, mask=is_slot, other=-1)
    experts = tl.where((line >= 0)[:, None], experts, -1)
    whole = tl.zeros(slot.shape, tl.float32) + (total + 1e-20)[:, None]
    if is_moderate:  # noqa: SIM108 - as above
        shares = _quotient(own, whole)
    else:
        shares = tl.div_rn(own, whole)
    place = token[:, None] * TOP + slot
    tl.store(chosen + place, experts, mask=is_slot)
    tl.store(weights + place, shares * scaling, mask=is_slot)

"""What V4.1 shares with V4 is computed as transformers computes it: streams, windows, heads, experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.models.v41 import attention, head, mixing, moe
from kernels.ops.rope import RopeTable, plain_frequencies, rotate_last
from kernels.ops.router import Routes
from kernels.tests import v4_bridge
from kernels.tests.v4_bridge import HyperHead, NormedQueries, OurV4, their_v4, write_bridge_folder

pytestmark = pytest.mark.slow  # transformers takes seconds to import

TOLERANCE = 5e-5
"""Logits deviate by 2.5; 6e-6 is what we see."""
BROKEN = 1e-2
"""The least that a broken part moves some logit."""
IDS = [(index * 37 + 11 + index * index % 7) % 320 for index in range(70)]
WINDOW = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[OurV4, Any]:
    pytest.importorskip("transformers")
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bridge")
    write_bridge_folder(folder, seed=5)
    last = HyperHead.random(128, seed=1)
    ours = OurV4(folder, last)
    return ours, their_v4(folder, ours.config, last)


@pytest.fixture(scope="module")
def ours(pair: tuple[OurV4, Any]) -> OurV4:
    assert WINDOW == pair[0].config.window_tokens
    return pair[0]


@pytest.fixture(scope="module")
def expected(pair) -> Callable[[int], Tensor]:
    """Logits of every token of a prompt of that many, computed whole, once."""

    @cache
    @torch.inference_mode()
    def compute(count: int) -> Tensor:
        logits: Tensor = pair[1](torch.tensor([IDS[:count]]), use_cache=False).logits[0]
        return logits

    return compute


@pytest.mark.parametrize("count", [1, 2, 7, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 70])
def test_logits_equal_transformers(count, ours, expected) -> None:
    """Every token's, at lengths below, at and beyond the window."""
    torch.testing.assert_close(expected(count), ours.logits(IDS[:count]), atol=TOLERANCE, rtol=0)


def test_a_prompt_in_pieces_equals_transformers(ours, expected) -> None:
    """Windows that were stored by earlier steps, a wrapped ring among them, are those of the whole prompt."""
    cuts = [5, 6, 7, 21, 22, 23, 24, 40, 63]
    torch.testing.assert_close(expected(70), ours.logits(IDS, cuts=cuts), atol=TOLERANCE, rtol=0)


Break = Callable[[pytest.MonkeyPatch, OurV4], None]


def patched(module: Any, name: str, wrap: Callable[..., Callable[..., Any]]) -> Break:
    """Put wrap(original) in the place of what a module imported."""
    return lambda patch, _: patch.setattr(module, name, wrap(getattr(module, name)))


def on_layers(change: Callable[[pytest.MonkeyPatch, Any], None]) -> Break:
    def break_(patch: pytest.MonkeyPatch, ours: OurV4) -> None:
        for layer in ours.layers:
            change(patch, layer)

    return break_


def on_mixings(**changes: float) -> Break:
    def change(patch: pytest.MonkeyPatch, layer: Any) -> None:
        for each in (layer._attention_mixing, layer._ffn_mixing):
            patch.setattr(each, "_config", replace(each._config, **changes))

    return on_layers(change)


def without_eps(normed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, weight, _, numerics: normed(x, weight, 0.0, numerics)


def on_moes(**changes: float) -> Break:
    return on_layers(lambda patch, layer: patch.setattr(layer._moe, "_config", replace(layer._moe._config, **changes)))


def on_sinks(change: Callable[[Tensor], Tensor]) -> Break:
    return on_layers(lambda patch, layer: patch.setattr(layer._attention, "sinks", change(layer._attention.sinks)))


def on_outputs(change: Callable[[Any], Any]) -> Break:
    return on_layers(
        lambda patch, layer: patch.setattr(layer._attention.output, "_down", change(layer._attention.output._down))
    )


def on_clamps(change: Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Tensor | None]) -> Break:
    """Replace some calls of Tensor.clamp; None leaves a call as it is."""

    def break_(patch: pytest.MonkeyPatch, _: OurV4) -> None:
        clamp = torch.Tensor.clamp

        def changed(x: Tensor, *bounds: Any, **named: Any) -> Tensor:
            value = change(x, bounds, named)
            return clamp(x, *bounds, **named) if value is None else value

        patch.setattr(torch.Tensor, "clamp", changed)

    return break_


def on_routes(change: Callable[[Tensor, Tensor, Routes, dict[str, Any]], Routes]) -> Break:
    """Replace what the router answers: change(logits, bias, its answer, its keywords)."""

    def wrap(route: Callable[..., Routes]) -> Callable[..., Routes]:
        return lambda logits, bias, **named: change(logits, bias, route(logits, bias, **named), named)

    return patched(moe, "route", wrap)


def on_turns(change: Callable[..., Tensor]) -> Break:
    """Replace how keys, queries and attended values are turned: change(rotate_last, x, cos, sin, inverse)."""

    def break_(patch: pytest.MonkeyPatch, _: OurV4) -> None:
        for module in (attention, v4_bridge):
            patch.setattr(
                module,
                "rotate_last",
                lambda x, cos, sin, *, inverse=False: change(rotate_last, x, cos, sin, inverse),
            )

    return break_


def halves(turn: Callable[..., Tensor], x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Dim i of those that turn is paired with dim i + half of them, not with its neighbour."""
    pairs, still = cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]
    order = torch.cat([torch.arange(still), still + torch.arange(2 * pairs).view(2, -1).T.flatten()])
    return turn(x[..., order], cos, sin, inverse=inverse)[..., order.argsort()]


def on_windows(tokens: int) -> Break:
    """Plan other windows in rings of the same size."""

    def break_(patch: pytest.MonkeyPatch, ours: OurV4) -> None:
        config, planner = ours.config, ours.model._planner
        drafter = replace(config.drafter, draft_tokens=config.drafter.draft_tokens + WINDOW - tokens)
        patch.setattr(planner, "_config", replace(config, window_tokens=tokens, drafter=drafter))

    return break_


def on_turn_table(frequencies: Callable[[OurV4], Any]) -> Break:
    def break_(patch: pytest.MonkeyPatch, ours: OurV4) -> None:
        table = RopeTable(frequencies(ours), torch.device("cpu"))
        patch.setattr(ours.model.weights, "ropes", replace(ours.model.weights.ropes, plain=table))

    return break_


def unnormalised(logits: Tensor, _: Tensor, routes: Routes, named: dict[str, Any]) -> Routes:
    affinity = torch.nn.functional.softplus(logits).sqrt().gather(1, routes.experts)
    return replace(routes, weights=affinity * named["scaling"])


def biased(logits: Tensor, bias: Tensor, routes: Routes, named: dict[str, Any]) -> Routes:
    """The bias enters the weights, not the choice alone."""
    weights = (torch.nn.functional.softplus(logits).sqrt() + bias).gather(1, routes.experts)
    return replace(routes, weights=weights / weights.sum(1, keepdim=True) * named["scaling"])


def rootless(logits: Tensor, bias: Tensor, routes: Routes, named: dict[str, Any]) -> Routes:
    weights = torch.nn.functional.softplus(logits).gather(1, routes.experts)
    return replace(routes, weights=weights / weights.sum(1, keepdim=True) * named["scaling"])


def strided_heads(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Group g gets heads g, g + groups, ... instead of consecutive ones."""

    def changed(output: Any, attended: Tensor, turn: Any) -> Tensor:
        heads = torch.arange(attended.shape[1]).view(-1, output._groups).T.flatten()
        return run(output, attended[:, heads], turn)

    return changed


def whole_token(_: Any) -> Callable[..., Tensor]:
    return lambda _, queries: queries / queries.square().mean(dim=(1, 2), keepdim=True).sqrt()


BREAKS: dict[str, Break] = {
    "mix of the sublayer before": lambda patch, ours: patch.setattr(ours.watch, "is_on", False),
    "mix towards the wrong stream": patched(
        mixing, "update", lambda update: lambda x, y, made: update(x, y, replace(made, mix=made.mix.mT))
    ),
    "output not doubled": patched(
        mixing, "update", lambda update: lambda x, y, made: update(x, y, replace(made, post=made.post / 2))
    ),
    "one Sinkhorn iteration": on_mixings(sinkhorn_iters=1),
    "no epsilon in the mixing": on_mixings(hc_eps=0.0),
    "no epsilon in the norm of the streams": on_mixings(norm_eps=0.0),
    "no epsilon in the norms of latents and keys": patched(attention, "normed", without_eps),
    "no epsilon in the last norm": patched(head, "normed", without_eps),
    "final mix not learned": lambda patch, ours: patch.setattr(
        ours.watch, "final", lambda streams: streams.new_full(streams.shape[:2], 0.25)
    ),
    "no sink": on_sinks(lambda sinks: torch.full_like(sinks, float("-inf"))),
    "sinks of other heads": on_sinks(lambda sinks: sinks.roll(1)),
    "sinks of zero": on_sinks(torch.zeros_like),
    "scores not scaled": on_layers(lambda patch, layer: patch.setattr(layer._attention, "_scale", 1.0)),
    "window one shorter": on_windows(WINDOW - 1),
    "window one longer": on_windows(WINDOW + 1),
    "values not turned back": on_turns(lambda turn, x, cos, sin, inverse: x if inverse else turn(x, cos, sin)),
    "values turned on": on_turns(lambda turn, x, cos, sin, _: turn(x, cos, sin)),
    "turned back only": on_turns(lambda turn, x, cos, sin, inverse: turn(x, cos, sin, inverse=True) if inverse else x),
    "first dims turned": on_turns(
        lambda turn, x, cos, sin, inverse: turn(x.flip(-1), cos, sin, inverse=inverse).flip(-1)
    ),
    "halves are pairs": on_turns(halves),
    "whole heads turned": on_turn_table(lambda ours: plain_frequencies(ours.config.head_dim, ours.config.rope_theta)),
    "other angles": on_turn_table(
        lambda ours: plain_frequencies(ours.config.rope_dims, ours.config.compress_rope.theta)
    ),
    "heads not normed": lambda patch, _: patch.setattr(NormedQueries, "normed", lambda _, queries: queries),
    "heads normed together": patched(NormedQueries, "normed", whole_token),
    "groups in another order": on_outputs(lambda groups: groups[1:] + groups[:1]),
    "every group the first": on_outputs(lambda groups: groups[:1] * len(groups)),
    "heads dealt to groups": patched(attention.Output, "run", strided_heads),
    "nothing clamped": on_moes(swiglu_limit=float("inf")),
    "gate not clamped": on_clamps(lambda x, _, named: x.clone() if "max" in named else None),
    "gate clamped below too": on_clamps(
        lambda x, _, named: torch.clamp(x, -named["max"], named["max"]) if "max" in named else None
    ),
    "up not clamped": on_clamps(lambda x, bounds, _: x.clone() if len(bounds) == 2 else None),
    "up not clamped below": on_clamps(lambda x, bounds, _: torch.clamp(x, max=bounds[1]) if len(bounds) == 2 else None),
    "router's bias ignored": on_layers(
        lambda patch, layer: patch.setattr(layer._moe, "_bias", torch.zeros_like(layer._moe._bias))
    ),
    "router's bias for images": on_layers(
        lambda patch, layer: patch.setattr(layer._moe, "_bias", layer._moe._image_bias)
    ),
    "router's bias in the weights": on_routes(biased),
    "router's weights not normalised": on_routes(unnormalised),
    "router's weights without the root": on_routes(rootless),
    "router's weights not scaled": on_moes(scaling=1.0),
    "an expert less": on_moes(top_k=3),
    "another shared expert": on_layers(
        lambda patch, layer: patch.setattr(layer._moe, "_shared", layer._moe._experts[0])
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_part_shows(name, ours, expected, monkeypatch) -> None:
    """The comparison sees each part it is said to cover: without it, or with another, logits are far away."""
    whole = expected(40)  # before anything breaks: some breaks reach into torch, which the reference uses too
    BREAKS[name](monkeypatch, ours)

    assert BROKEN < (whole - ours.logits(IDS[:40])).abs().max()


def test_mended_parts_agree_again(ours, expected) -> None:
    """None of the breaks stays behind for another test."""
    torch.testing.assert_close(expected(40), ours.logits(IDS[:40]), atol=TOLERANCE, rtol=0)

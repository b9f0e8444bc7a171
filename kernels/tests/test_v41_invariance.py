"""A V4.1 token's logits, blocks and window do not depend on how the work was cut, nor on its batch mates."""

from __future__ import annotations

import pytest
import torch

from kernels.batch import Image
from kernels.tests.v41_rig import IDS, caches, model_of, prefill, row_of, run, start, threads_of

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 34, 35, 47, 48, 49, 63, 64, 65, 66, 127, 128, 129, 143, 145)
"""Around 1, the window and block of 16, top-k at ratio 1 (16) and 2 (32), 64 candidate entries, units of 128."""
MODES = ("shallow kvq", "shallow quant")
# Rounding is a function of single values, wherever they stand: the second mode needs fewer lengths.
# The lengths left out here go through services with all others in e2e/test_same_tokens_v41.py.
OFTEN = {(n, MODES[0]) for n in (1, 16, 17, 33, 35, 49, 66, 129, 145)} | {(n, MODES[1]) for n in (17, 66)}
CASES = [
    pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.long])
    for case in ((tokens, mode) for tokens in LENGTHS for mode in MODES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "numerics"), CASES)
def test_a_prompt_is_the_same_in_odd_pieces_and_beside_mates(numerics, tokens) -> None:
    """Whole, in odd chunks, and in chunks with other sequences before it: logits and every cache byte agree."""
    ids = IDS[:tokens]
    expected = prefill(numerics, ids)
    kept = caches(numerics, tokens)
    odd = sorted({cut for cut in (1, 8, 13, 33, 50, 111, 122) if cut < tokens})
    mates = (row_of(IDS[5:], 0, 9, sequence=2), row_of(IDS[9:], 0, 1, sequence=3))

    assert torch.equal(expected, prefill(numerics, ids, odd))
    assert kept == caches(numerics, tokens)
    assert torch.equal(expected, prefill(numerics, ids, odd[1::2], sequence=4, mates=mates))
    assert kept == caches(numerics, tokens, sequence=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numerics", "total"),
    [(MODES[0], 50), (MODES[1], 18), *(pytest.param(mode, 130, marks=pytest.mark.long) for mode in MODES)],
)
def test_decode_one_by_one_equals_the_same_tokens_in_prefills(numerics, total) -> None:
    """Three sequences decoded side by side from their first token: each step has the bits of a prompt that long.

    They are compared in turn, and all at the end.
    """
    orders = [IDS[:total], IDS[20 : total + 20], IDS[50 : total + 50]]
    lengths = [length for length in LENGTHS if length <= total]
    for sequence in (1, 2, 3):
        start(numerics, sequence)
    for at in range(total):
        rows = [row_of(ids, at, at + 1, sequence=index) for index, ids in enumerate(orders, 1)]
        logits = run(numerics, *rows)
        if at + 1 in lengths:
            for index in range(3) if at + 1 == lengths[-1] else [lengths.index(at + 1) % 3]:
                assert torch.equal(prefill(numerics, orders[index][: at + 1], sequence=4), logits[index]), (at, index)
                assert caches(numerics, at + 1, index + 1) == caches(numerics, at + 1, 4)


def test_decode_equals_prefill_for_a_few_tokens() -> None:
    """The quick version: the tokens 33 to 37 of a prompt alone get the bits they have in a whole one."""
    prefill(MODES[0], IDS[:32], sequence=2)
    for at in range(32, 37):
        decoded = run(MODES[0], row_of(IDS, at, at + 1, sequence=2))[0]
    assert torch.equal(prefill(MODES[0], IDS[:37]), decoded)
    assert caches(MODES[0], 37, 1) == caches(MODES[0], 37, 2)


@pytest.mark.slow
def test_an_image_is_the_same_in_any_chunks_and_changes_what_follows() -> None:
    """Rows at images take the given embeddings; a cut inside an image, before or behind it changes no bit."""
    ids, image = with_image(IDS[:50], at=20, tokens=11)
    expected = prefill(MODES[0], ids, images=(image,))
    kept = caches(MODES[0], 50)

    for cuts in ((20,), (31,), (25,), (7, 21, 30, 32)):
        assert torch.equal(expected, prefill(MODES[0], ids, cuts, sequence=2, images=(image,))), cuts
        assert kept == caches(MODES[0], 50, 2)
    other = Image(image.position, image.num_tokens, bytes(len(image.embeddings)))
    assert not torch.equal(expected, prefill(MODES[0], ids, images=(other,)))


@pytest.mark.slow
@pytest.mark.parametrize("numerics", MODES)
def test_more_threads_give_the_same_bits(numerics) -> None:
    """A library that shares a product among threads may not sum it in another order."""
    expected = prefill(numerics, IDS[:140])
    with threads_of(2):
        got = prefill(numerics, IDS[:140], (77,))
    assert torch.equal(expected, got)


def with_image(ids: list[int], *, at: int, tokens: int) -> tuple[list[int], Image]:
    """A prompt in which an image stands at `at`, as prompts name it: vocab + 2, then vocab + 1."""
    model = model_of(MODES[0])
    first, others = model.info.image_token_ids
    generator = torch.Generator().manual_seed(7)
    embeddings = torch.randn(tokens, model.info.hidden_size, generator=generator)
    named = [*ids[:at], first, *[others] * (tokens - 1), *ids[at + tokens :]]
    return named, Image(at, tokens, embeddings.numpy().tobytes())

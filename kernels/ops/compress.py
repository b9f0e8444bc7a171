"""How do two tokens become one compressed entry? A softmax over the pair, channel by channel."""

from __future__ import annotations

from torch import Tensor


def pool_pairs(scores: Tensor, latents: Tensor) -> Tensor:
    """Weigh two tokens' latents by the softmax of their scores: w0 * l0 + w1 * l1 in every channel.

    scores, latents: [entries, 2, channels] fp32.  Returns [entries, channels] fp32.
    """
    first, second = scores.unbind(1)
    largest = first.maximum(second)
    first, second = (first - largest).exp_(), (second - largest).exp_()
    total = first + second
    return (first / total) * latents[:, 0] + (second / total) * latents[:, 1]

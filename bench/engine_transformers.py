"""The same figures from transformers, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TransformersLoop:
    """AutoModelForCausalLM with its default cache and attention."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self._model = model.to(device).eval()

    @torch.inference_mode()
    def prefill(self, token_ids: Tensor) -> None:
        """The last token's logits of a [1, n] prompt."""
        self._model(token_ids, use_cache=True, logits_to_keep=1)

    def decode(self, prompt: Tensor, batch: int) -> Callable[[], None]:
        """A function that takes one step after `prompt` [1, n], each call one token further."""
        with torch.inference_mode():
            state = self._model(prompt.expand(batch, -1), use_cache=True, logits_to_keep=1)
        cache = state.past_key_values
        token = state.logits[:, -1:].argmax(-1)

        @torch.inference_mode()
        def step() -> None:
            nonlocal token
            token = self._model(token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            cache.crop(prompt.shape[1])

        return step

"""Where does KV live on the device, and how do rows of it get in and out?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.kv.block_bytes import BlockBytes
from kernels.kv.layout import KvLayout
from kernels.ops.attention import UNIT_TOKENS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class KvCache(BlockBytes):
    """The blocks of one device: [num_blocks, layers, K and V, block_tokens, kv_heads * head_dim] of one dtype.

    Two views of the same memory serve the two ways it is used: a *token row* (one layer's K or V of one token) is
    written, a *section* (one layer's K or V of a block) is gathered. Block 0 is the null block and stays zero.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """ValueError when the block length does not divide attention's unit of 128 keys, or streams leave gaps."""
        first = layout.streams[0]
        if UNIT_TOKENS % layout.block_tokens:
            raise ValueError(f"block_tokens {layout.block_tokens} does not divide {UNIT_TOKENS}")
        if first.num_bytes * len(layout.streams) != layout.block_bytes or first.dtype not in DTYPES:
            raise ValueError("K and V of one block and layer must fill whole alignment units and be fp32 or bf16")
        super().__init__(layout, num_blocks, device)
        self.device = device
        self.sections_per_block = len(layout.streams)
        self.kv_heads, self.head_dim = first.shape[1:]
        self.dtype = DTYPES[first.dtype]
        typed = self._blocks.view(self.dtype)
        width = self.kv_heads * self.head_dim
        self._sections = typed.view(num_blocks * self.sections_per_block, layout.block_tokens * width)
        self._token_rows = typed.view(-1, width)

    def begin(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that get their first token: attention multiplies unwritten slots by 0, and 0 * NaN is NaN."""
        for block_id in block_ids:
            self._blocks[block_id].zero_()  # index_fill_ of bytes takes 60 times longer

    def layer(self, index: int) -> Tensor:
        """One layer of every block: [num_blocks, 2, block_tokens, kv_heads * head_dim], K at [:, 0], V at [:, 1]."""
        shape = (self.num_blocks, self.sections_per_block // 2, 2, self.layout.block_tokens, -1)
        return self._blocks.view(self.dtype).view(shape)[:, index]

    def token_rows_of_layers(self, token_rows: Tensor) -> tuple[Tensor, ...]:
        """Per layer, where K and V of tokens go.

        token_rows: [tokens, 2] int64, rows of K and V in layer 0.  Each result: [2 * tokens].
        """
        return self._of_layers(token_rows.view(-1), 2 * self.layout.block_tokens)

    def write(self, token_rows: Tensor, keys_values: Tensor) -> None:
        """Store K and V of one layer.  keys_values: [2 * tokens, kv_heads * head_dim] in the cache's dtype."""
        self._token_rows.index_copy_(0, token_rows, keys_values)

    def sections_of_layers(self, sections: Tensor) -> tuple[Tensor, ...]:
        """Per layer, what to gather.  sections: [n] int64, sections of layer 0.  Each result: [n]."""
        return self._of_layers(sections, 2)

    def gather(self, sections: Tensor, out: Tensor) -> None:
        """Copy sections of one layer.  out: [n, block_tokens * kv_heads * head_dim] in the cache's dtype."""
        torch.index_select(self._sections, 0, sections, out=out)

    def _of_layers(self, index: Tensor, stride: int) -> tuple[Tensor, ...]:
        steps = torch.arange(0, stride * (self.sections_per_block // 2), stride, device=self.device)
        return tuple((steps[:, None] + index).unbind(0))

"""Do the parts of a V4.1 config fit each other?"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.models.v41.config import V41Config

SCALE_BLOCK = 32
"""Weights share one power-of-two scale per 32 x 32 (fp8) or 1 x 32 (fp4) values."""


def contradictions(config: V41Config) -> list[str]:
    """What the parts of a well-formed config ask of each other. The lists are short; each rule is one line."""
    layers, ratios, encoder = range(config.num_layers), config.compress_ratios, config.num_encoder_layers
    engram, drafter = config.engram, config.drafter
    sources, first_source = config.kv_sources, min(config.kv_sources, default=config.num_layers)
    widths = {
        "hidden_size": config.hidden_size, "head_dim": config.head_dim, "index_head_dim": config.index_dim,
        "q_lora_rank": config.q_lora, "o_lora_rank * o_groups": config.o_lora * config.o_groups,
        "moe_intermediate_size": config.moe.width, "engram_head_dim": engram.head_dim,
    }  # fmt: skip
    rules = {
        "compress_ratios are not all 0, 1 or 2": set(ratios) <= {0, 1, 2},
        "a layer of ratio 0 or 2 follows one of ratio 1": all(ratio == 1 for ratio in ratios[encoder:]),
        "kv_source_layer_ids or index_source_layer_ids are not increasing layers of ratio 1 or 2": all(
            list(ids) == sorted(set(ids)) and all(layer in layers and ratios[layer] for layer in ids)
            for ids in (sources, config.index_sources)
        ),
        "a layer of ratio 1 or 2 comes before the first KV source": not any(ratios[:first_source]),
        "a KV source does not select entries": set(sources) <= set(config.index_sources),
        "the first layer of ratio 1 is not the last KV source and candidate source": encoder == config.num_layers
        or (encoder == max(sources, default=-1) == config.candidate_source),
        "qk_rope_head_dim is odd, or larger than a head or an index head": config.rope_dims % 2 == 0
        and config.rope_dims <= min(config.head_dim, config.index_dim),
        "num_attention_heads is not a multiple of o_groups": config.num_heads % config.o_groups == 0,
        "sliding_window is odd: a compressed entry would lie in two blocks": config.window_tokens % 2 == 0,
        "num_experts_per_tok is larger than the number of experts": config.moe.top_k <= config.moe.num_experts
        and drafter.moe.top_k <= drafter.moe.num_experts,
        "engram_layer_ids are not layers of the encoder, each with its number of rows": len(engram.layers)
        == len(engram.num_rows)
        and all(layer in layers[:encoder] for layer in engram.layers)
        and all(rows > 0 for rows in engram.num_rows),
        "dspark_target_layer_ids are not layers of one half of the model": bool(drafter.target_layers)
        and (
            all(layer in layers[encoder:] for layer in drafter.target_layers)
            or all(layer in layers[:encoder] for layer in drafter.target_layers)
        ),
        "engram_num_embeddings are fewer rows than tables of engram_vocab_size have": all(
            rows >= engram.rows_per_token * engram.table_vocab for rows in engram.num_rows
        ),
        "dspark_target_layer_ids names a layer twice": len(set(drafter.target_layers)) == len(drafter.target_layers),
        "dspark_block_size is not smaller than sliding_window": drafter.draft_tokens < config.window_tokens,
        "dspark_noise_token_id lies outside the vocabulary": drafter.noise_token_id < config.vocab_size,
        "engram_pad_token_id lies outside the vocabulary": engram.pad_token_id < config.vocab_size,
        "eos_token_id lies outside the vocabulary": all(0 <= each < config.vocab_size for each in config.eos_token_ids),
        "candidate_block_size * candidate_topk_blocks is smaller than index_topk": config.candidate_blocks
        * config.candidate_block_size
        >= config.index_topk,
    }
    unscaled = [
        f"{name} {width} is not a multiple of {SCALE_BLOCK}" for name, width in widths.items() if width % SCALE_BLOCK
    ]
    return unscaled + [problem for problem, holds in rules.items() if not holds]

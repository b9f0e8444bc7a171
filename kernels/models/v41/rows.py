"""Is a batch one that this model can compute?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels.batch import PENDING, Batch, Row
from kernels.models.model import BadBatch
from kernels.models.v41.config import V41Config
from kernels.models.v41.slots import WindowSlots

Ids = NDArray[np.int64]


def check_batch(batch: Batch, config: V41Config, slots: WindowSlots, *, num_blocks: int) -> list[Ids]:
    """Every row's block table, as long as the row needs it.  Raises BadBatch naming the broken rule."""
    if not batch.rows:
        raise BadBatch("a batch has at least one row")
    tables = []
    windows: set[int] = set()
    for row in batch.rows:
        tables.append(_checked_table(row, config, num_blocks))
        slots.check(row)
        if row.window in windows:
            raise BadBatch(f"sequence {row.sequence}: window {row.window} belongs to another row of this batch")
        windows.add(row.window)
        check_row(row, config)
    return tables


def check_row(row: Row, config: V41Config, *, may_wait: bool = False) -> None:
    """What does not depend on the caches' size.  may_wait: its newest token may be PENDING.  Raises BadBatch."""
    _check_replay(row, config)
    _check_tokens(row, config, may_wait=may_wait)


def preceding_needed(row: Row, config: V41Config) -> int:
    """Tokens before the row that its n-grams reach."""
    return min(config.engram.max_ngram - 1, row.position)


def _checked_table(row: Row, config: V41Config, num_blocks: int) -> Ids:
    where, end = f"sequence {row.sequence}", row.position + len(row.token_ids)
    if not row.token_ids or row.position < 0:
        raise BadBatch(f"{where}: a row has at least one token at a position of at least 0")
    if end > config.max_position_tokens:
        raise BadBatch(f"{where} reaches {end} tokens; the model takes {config.max_position_tokens}")
    needed = -(-end // config.block_tokens)
    table = np.asarray(row.block_table[:needed], np.int64)
    if len(table) < needed:
        raise BadBatch(f"{where} needs {needed} blocks for {end} tokens; its table has {len(table)}")
    if table.min() < 1 or table.max() >= num_blocks:
        raise BadBatch(f"{where}: block ids lie in 1..{num_blocks - 1}")
    return table


def _check_replay(row: Row, config: V41Config) -> None:
    replay = row.replay
    if row.targets and replay.keep_from:
        raise BadBatch(f"sequence {row.sequence}: tokens are scored only where windows are exact")
    if replay.window_from > row.position or min(replay.window_from, replay.keep_from, replay.write_from) < 0:
        raise BadBatch(f"sequence {row.sequence}: window_from {replay.window_from} lies beyond its row, or before 0")
    if replay.write_from % config.block_tokens:
        raise BadBatch(f"sequence {row.sequence}: write_from {replay.write_from} is not the start of a block")


def _check_tokens(row: Row, config: V41Config, *, may_wait: bool) -> None:
    where = f"sequence {row.sequence}"
    if len(row.preceding) < preceding_needed(row, config):
        raise BadBatch(
            f"{where} at {row.position} needs the {preceding_needed(row, config)} tokens before it;"
            f" {len(row.preceding)} were given"
        )
    if may_wait and len(row.token_ids) == 1 and not row.images and PENDING <= row.token_ids[0] < config.vocab_size:
        return  # nearly all rows of a decode step: no arrays for them
    known = config.image_token_ids
    ids = np.asarray(row.token_ids, np.int64)
    if may_wait and ids[0] == PENDING and len(ids) == 1 + row.num_drafts and not row.images:
        ids = np.where(ids == PENDING, 0, ids)
    if ids.min() < 0 or not set(ids[ids >= config.vocab_size].tolist()) <= set(known):
        raise BadBatch(f"{where}: token ids lie in 0..{config.vocab_size - 1}, or are of {known} where an image stands")
    covered = np.zeros(len(ids), bool)
    for image in row.images:
        _check_image(image.num_tokens, len(image.embeddings), config, where)
        first = image.position - row.position
        covered[max(first, 0) : max(first + image.num_tokens, 0)] = True
    if not np.array_equal(covered, ids >= config.vocab_size):
        raise BadBatch(f"{where}: ids of {config.vocab_size} and more stand where its images do, and nowhere else")


def _check_image(num_tokens: int, num_bytes: int, config: V41Config, where: str) -> None:
    if num_bytes != num_tokens * config.hidden_size * 4:
        raise BadBatch(f"{where}: an image of {num_tokens} tokens has {num_tokens * config.hidden_size * 4} bytes")


def image_rows(rows: Sequence[Row], starts: Sequence[int], config: V41Config) -> tuple[Ids, NDArray[np.float32]] | None:
    """Flat token indices of the images' tokens in a batch, and their embeddings [n, hidden]; None without images."""
    indices, embeddings = [], []
    for row, start in zip(rows, starts, strict=True):
        for image in row.images:
            first = image.position - row.position
            low, high = max(first, 0), min(first + image.num_tokens, len(row.token_ids))
            if low >= high:
                continue
            values = np.frombuffer(image.embeddings, np.float32).reshape(image.num_tokens, config.hidden_size)
            indices.append(np.arange(start + low, start + high))
            embeddings.append(values[low - first : high - first])
    return (np.concatenate(indices), np.concatenate(embeddings)) if indices else None

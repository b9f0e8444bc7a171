"""How is what an operator names removed for good, bytes included?

Whole segments are unlinked. In segments that also hold others' blocks the records are erased in place, former copies
that nothing finds any more included, and the footer is written anew without them.
"""

import math

from services.kvstore.catalog import Catalog
from services.kvstore.encryption import Keyring
from services.kvstore.format import record_bytes
from services.kvstore.index import BlockLocation
from services.kvstore.log import SegmentLog, SegmentSize
from services.kvstore.meters import StoreCounts
from services.kvstore.tiers import Removed, Selection
from services.kvstore.writing import WriteLine


async def remove(
    selection: Selection,
    line: WriteLine,
    log: SegmentLog,
    catalog: Catalog,
    keyring: Keyring | None,
    *,
    counts: StoreCounts,
    before_unix_seconds: float = math.inf,
) -> Removed:
    """Remove what matches and was first written before; return once it is gone. A job of the write line."""
    line.drop(selection, before_unix_seconds)
    sealed = (await line.seal_quietly(log.close)).sealed
    num_blocks = 0
    partly: dict[int, list[BlockLocation]] = {}
    for number in list(catalog.segments):
        records = catalog.index.records_of(number)
        if not records and selection.retention not in {None, catalog.segments[number].file.retention}:
            continue
        able = [one for one in records if selection.matches(one)]
        matching = [one for one in able if one.first_created_seconds < before_unix_seconds]
        if len(matching) == len(records):  # without any: nobody could read whose they are, and the next start may
            num_blocks += catalog.doom(number)
        elif matching:
            num_blocks += sum(catalog.index.remove(one) for one in set(matching))
            partly[number] = matching
    counts.evictions["tenant"] += num_blocks
    num_bytes = await line.unlink_doomed(is_forced=True)
    for number, matching in partly.items():
        segment = catalog.segments[number]
        size: SegmentSize = await line.in_thread(log.erase, segment.file, matching, _ranges(matching))
        num_bytes += max(0, segment.physical_bytes - size.physical_bytes)
        catalog.note_sizes([size])
        # Not before: a deletion that the disk refused must find them again when it is repeated.
        catalog.index.drop_records(number, matching)
    for file, locations in sealed:
        gone = set(partly.get(file.number, ()))
        line.announce(file, [one for one in locations if one not in gone])
    is_whole_tenant = selection == Selection(tenant=selection.tenant) and math.isinf(before_unix_seconds)
    if keyring is not None and is_whole_tenant and selection.tenant is not None:
        await line.in_thread(keyring.delete, selection.tenant)
    catalog.pins.forget([name for name in catalog.pins.names if catalog.index.find(*name) is None])
    return Removed(num_blocks, num_bytes)


def _ranges(records: list[BlockLocation]) -> list[tuple[int, int]]:
    """Return the records' places, neighbours as one."""
    ranges: list[tuple[int, int]] = []
    for record in sorted(records, key=lambda one: one.offset_bytes):
        start, end = record.offset_bytes, record.offset_bytes + record_bytes(record.stored_bytes)
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges

"""What does the store say of itself to operators?"""

import math
from typing import cast

from proto.common_pb2 import RetentionClass
from proto.kvstore_pb2 import FingerprintUse, KvstoreStats, RetentionUse, TenantUse
from services.kvstore.directory import CLASSES
from services.kvstore.index import Use
from services.kvstore.store import Store

MAX_TENANTS = 1000
MAX_FINGERPRINTS = 1000


def stats_of(store: Store) -> KvstoreStats:
    """Return the state of the store at this moment."""
    catalog, counts, remote = store.catalog, store.counts, store.reader.remote
    index, policy = catalog.index, catalog.policy
    largest = sorted(index.tenants.items(), key=lambda one: (-one[1].num_bytes, one[0]))[:MAX_TENANTS]
    models = sorted(index.fingerprints.items(), key=lambda one: (-one[1].num_bytes, one[0]))[:MAX_FINGERPRINTS]
    return KvstoreStats(
        num_blocks=store.num_blocks,
        num_segments=store.num_segments,
        disk_bytes=store.disk_bytes,
        max_bytes=store.max_bytes,
        num_damaged=counts.damaged_blocks,
        num_evicted=counts.evicted_blocks,
        physical_bytes=catalog.physical_bytes,
        num_expired=counts.evictions["ttl"],
        num_pinned=len(catalog.pins),
        num_leases=len(catalog.leases),
        tenants=[
            TenantUse(
                tenant=name, num_blocks=use.num_blocks, num_bytes=use.num_bytes, quota_bytes=policy.quota_of(name)
            )
            for name, use in largest
        ],
        retentions=[
            RetentionUse(
                retention=cast("RetentionClass.ValueType", number),
                seconds=0.0 if math.isinf(policy.life_seconds(number)) else policy.life_seconds(number),
                num_blocks=index.retentions.get(number, Use()).num_blocks,
            )
            for number in range(len(CLASSES))
        ],
        breaker="off" if remote is None else remote.breaker,
        num_remote_blocks=0 if remote is None else remote.num_blocks,
        fingerprints=[
            FingerprintUse(fingerprint=name, num_blocks=use.num_blocks, num_bytes=use.num_bytes) for name, use in models
        ],
    )

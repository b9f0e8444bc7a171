"""What does the KV store tell Prometheus of the object store behind it?"""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.kvstore.remote import RemoteTier

_PREFIX = "fathom_kvstore_remote"


class RemoteCollector(Collector):
    """Reads the tier's own counts when scraped."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier = tier

    def collect(self) -> Iterable[Metric]:
        for name, meaning, value in self._counters():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)
        for name, meaning, value in self._gauges():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)
        drops = CounterMetricFamily(f"{_PREFIX}_upload_drops", "Blocks that were not uploaded.", labels=["reason"])
        for reason, number in self._tier.uploads.counts.drops.items():
            drops.add_metric([reason], number)
        yield drops

    def _counters(self) -> Iterator[tuple[str, str, float]]:
        reads, uploads, catalog = self._tier.counts, self._tier.uploads.counts, self._tier.catalog.counts
        yield "reads", "Ranges asked of the object store.", reads.reads
        yield "read_blocks", "Blocks read from the object store and verified.", reads.read_blocks
        yield "read_bytes", "Bytes of those.", reads.read_bytes
        yield "failed_reads", "Blocks whose range failed or was late.", reads.failed_reads
        yield "damaged_blocks", "Blocks whose bytes in the object store were wrong.", reads.damaged_blocks
        yield "missing_blocks", "Blocks whose object was gone.", reads.missing_blocks
        yield "evicted_in_doubt", "Blocks dropped for a deletion may have been missed.", reads.evicted_in_doubt
        yield "uploaded_objects", "Objects published.", uploads.objects
        yield "uploaded_pieces", "Of those, parts of segments that were still open.", uploads.pieces
        yield "uploaded_blocks", "Blocks in them.", uploads.blocks
        yield "uploaded_bytes", "Bytes of those.", uploads.num_bytes
        yield "upload_retries", "Uploads that failed and were tried again.", uploads.retries
        yield "upload_known_blocks", "Blocks not uploaded because the object store has them.", uploads.known_blocks
        yield "refreshes", "Looks at what other replicas published.", catalog.refreshes
        yield "failed_refreshes", "Those that failed.", catalog.failed_refreshes
        yield "damaged_manifests", "Manifests and tombstones that could not be read.", catalog.damaged_manifests
        yield "expired_objects", "Objects deleted because their time was over.", catalog.expired_objects
        yield "purged_objects", "Objects rewritten or deleted for deleted blocks in them.", catalog.purged_objects
        yield "swept_objects", "Objects deleted because nothing published them.", catalog.swept_objects
        yield "heard_manifests", "Manifests of others that were found within seconds.", catalog.heard_manifests
        keys = self._tier.keys.counts
        yield "published_keys", "Tenants' wrapped keys that this replica made.", keys.published
        yield "fetched_keys", "Those that others made.", keys.fetched
        yield "destroyed_keys", "Those destroyed because their tenants were deleted.", keys.destroyed
        blobs = self._tier.blobs
        yield "breaker_opened", "Times that reads were refused after failures.", blobs.reads.num_opened
        yield "write_breaker_opened", "Times that writes were refused after failures.", blobs.writes.num_opened

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        tier = self._tier
        yield "blocks", "Blocks that can be found in the object store.", tier.num_blocks
        yield "breaker_open", "1 while nothing is read from the object store.", tier.breaker == "open"
        yield "write_breaker_open", "1 while nothing is written to it.", tier.blobs.is_read_only
        yield "heard_after_seconds", "Age of the last block that was heard of.", tier.catalog.heard_after_seconds
        yield "keys_refused", "1 while the keys over there are of another master key.", tier.keys.is_refused
        ahead = tier.blobs.time.ahead_seconds
        yield "clock_ahead_seconds", "How much later it is by the clock here than by the object store's.", ahead
        yield "upload_queue_bytes", "Sealed segments that wait for their upload.", tier.uploads.queued_bytes
        yield "upload_lag_seconds", "How long the first of them has waited.", tier.uploads.oldest_seconds
        yield "refresh_age_seconds", "Time since the last good look at what others published.", tier.refresh_age_seconds


def register(tier: RemoteTier, registry: CollectorRegistry) -> None:
    """Show the tier's counts on /metrics."""
    registry.register(RemoteCollector(tier))

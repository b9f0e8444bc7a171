"""Does the cache keep what was used last, within its bytes?"""

from services.vision.embeddings import EmbeddingCache, Embeddings


def image(name: int, num_bytes: int = 10) -> Embeddings:
    return Embeddings(content_hash=bytes([name]) * 32, num_tokens=1, data=bytes(num_bytes))


def test_the_least_recently_used_goes_first() -> None:
    """Getting an image keeps it longer than one that was only put."""
    cache = EmbeddingCache(max_bytes=30)
    for name in (1, 2, 3):
        cache.put(image(name))
    assert cache.get(image(1).content_hash) is not None
    cache.put(image(4))

    assert [True, False, True, True] == [cache.get(image(n).content_hash) is not None for n in (1, 2, 3, 4)]
    assert (30, 3) == (cache.num_bytes, len(cache))


def test_bytes_are_counted_once() -> None:
    """The same image put twice takes its room once."""
    cache = EmbeddingCache(max_bytes=30)
    cache.put(image(1))
    cache.put(image(1, num_bytes=20))
    assert (20, 1) == (cache.num_bytes, len(cache))


def test_one_image_never_exceeds_the_whole() -> None:
    """An image larger than the cache is not kept, and empties nothing."""
    cache = EmbeddingCache(max_bytes=30)
    cache.put(image(1))
    cache.put(image(2, num_bytes=31))
    assert (10, 1) == (cache.num_bytes, len(cache))

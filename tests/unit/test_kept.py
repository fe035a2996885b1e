"""What a worker keeps of outputs is small, recent, and exactly what was stored."""

from __future__ import annotations

from leasehold.storage.content import digest_of_bytes
from leasehold.worker.attempts.output_cache import OutputCache


def keep(kept: OutputCache, key: str, data: bytes) -> str:
    sha256 = digest_of_bytes(data)
    kept.add(key, sha256, data)
    return sha256


def test_what_was_kept_is_found_by_key_and_digest() -> None:
    kept = OutputCache()
    sha256 = keep(kept, "a", b"one")
    assert kept.find("a", sha256) == b"one"
    assert kept.find("b", sha256) is None


def test_other_bytes_under_the_same_key_are_not_taken_for_those_asked_for() -> None:
    kept = OutputCache()
    keep(kept, "a", b"zombie's")
    assert kept.find("a", digest_of_bytes(b"committed")) is None
    assert kept.find("a", None) is None


def test_the_oldest_makes_room() -> None:
    kept = OutputCache(max_bytes=10)
    first, second, third = (keep(kept, name, name.encode() * 4) for name in "abc")
    assert kept.find("a", first) is None
    assert kept.find("b", second) == b"bbbb"
    assert kept.find("c", third) == b"cccc"


def test_what_is_kept_twice_takes_its_room_once() -> None:
    kept = OutputCache(max_bytes=10)
    first = keep(kept, "a", b"aaaa")
    for _ in range(9):
        second = keep(kept, "b", b"bbbbbb")
    assert kept.find("a", first) == b"aaaa"
    assert kept.find("b", second) == b"bbbbbb"

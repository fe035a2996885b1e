from __future__ import annotations

import pytest

from leasehold.domain.errors import Permanent
from leasehold.domain.ids import new_id
from leasehold.domain.object_keys import media_prefix, original_key, output_key


def test_the_same_step_of_the_same_job_always_writes_the_same_key() -> None:
    media_id = new_id()
    assert original_key(media_id, "jpg") == f"media/{media_id}/original.jpg"
    assert output_key(media_prefix(media_id), "variants/thumb.webp") == f"media/{media_id}/variants/thumb.webp"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../b", "a//b", ".", "a b", "a\x00", "é", "x" * 600])
def test_an_output_cannot_leave_its_prefix(name: str) -> None:
    with pytest.raises(Permanent) as refused:
        output_key("jobs/1/output", name)
    assert refused.value.code == "bad_output"


def test_ids_are_sortable_by_when_they_were_made() -> None:
    made = [new_id() for _ in range(1000)]
    assert made == sorted(made)

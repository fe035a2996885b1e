"""The tag with a run's Celery id is the platform's, and means one run."""

from __future__ import annotations

import pytest

from leasehold.api.conversion.upload import _tags_of
from leasehold.domain.celery_ids import TAG, without_celery_id
from leasehold.domain.errors import Invalid
from leasehold.domain.tags import check_tags


def test_a_conversion_cannot_have_the_tag_of_a_celery_id() -> None:
    assert _tags_of({"tags": '{"customer": "7"}'}) == {"customer": "7"}
    with pytest.raises(Invalid, match=TAG) as refused:
        _tags_of({"tags": f'{{"{TAG}": "x"}}'})
    assert refused.value.code == "invalid_tags"
    assert check_tags({TAG: "x"}) == {TAG: "x"}  # the platform gives it


@pytest.mark.parametrize(
    ("params", "tags", "left"),
    [
        ({"args": [1], "task_id": "x"}, {TAG: "x", "a": "b"}, ({"args": [1]}, {"a": "b"})),
        ({"task_id": "an argument"}, {"a": "b"}, ({"task_id": "an argument"}, {"a": "b"})),
        ({"task_id": "an argument"}, {TAG: "x"}, ({"task_id": "an argument"}, {})),
    ],
)
def test_of_a_second_run_with_the_same_payload_only_the_celery_id_is_left_out(
    params: dict[str, object], tags: dict[str, str], left: object
) -> None:
    assert without_celery_id(params, tags) == left

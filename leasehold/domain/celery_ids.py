"""The ids (`task_id`) that programs written for Celery give to runs. Any text may be such a Celery id.

The id of a new run must be a recent UUIDv7 (ids.py). If a Celery id is a recent UUIDv7, it becomes the run's id.
Otherwise the platform makes the run's id, as for any run, and the run gets the Celery id as a tag (`TAG`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import UUID

from leasehold.domain.errors import Invalid
from leasehold.domain.ids import id_of, is_recent
from leasehold.domain.storable import storable_text
from leasehold.domain.tags import MAX_TAG_CHARACTERS, RESERVED

#: The name of the tag that has the Celery id of a run. Only the platform gives a run this tag.
TAG = RESERVED
#: The member of a run's parameters in which its task finds the Celery id.
_PARAMETER = "task_id"


def celery_id_of(value: object) -> str:
    """The Celery id as a text; for a UUID, the UUID's usual form. Raises Invalid `invalid_id` for any other value than
    a UUID or a text that a tag can have.
    """
    if (own_id := uuid_of(value)) is not None:  # the Celery id is itself a UUID
        return str(own_id)
    if isinstance(value, str) and 1 <= len(value) <= MAX_TAG_CHARACTERS and storable_text(value) == value:
        return value
    limit = MAX_TAG_CHARACTERS
    raise Invalid("invalid_id", f"A task_id is a text of 1 to {limit} characters, not {repr(value)[:100]}.")


def uuid_of(value: object) -> UUID | None:
    """The value as a UUID; None: it is no UUID."""
    try:
        return id_of(value)
    except Invalid:
        return None


def run_id_in(celery_id: str) -> UUID | None:
    """The Celery id as the id of a new run. None: the Celery id cannot be a run's id, so the platform makes one."""
    own_id = uuid_of(celery_id)
    return own_id if own_id is not None and is_recent(own_id) else None


def without_celery_id(params: Mapping[str, Any], tags: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The parameters and the tags of a run, but without its Celery id. A repetition of the run (`rerun`) is made with
    them, so that the Celery id still leads to the first run only. The parameter `task_id` is left out only if it is the
    Celery id, because a task may have a parameter of its own with this name.
    """
    celery_id = tags.get(TAG)
    has_it = celery_id is not None and params.get(_PARAMETER) == celery_id
    return (
        {name: value for name, value in params.items() if not (has_it and name == _PARAMETER)},
        {name: value for name, value in tags.items() if name != TAG},
    )

"""Tags: a client's own words about a job, by which clients find the job (`tag.customer:7`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from leasehold.domain.errors import Invalid
from leasehold.domain.storable import storable_text

#: A job has at most this many tags. The name of a tag, and its value, have at most this many characters.
MAX_TAGS, MAX_TAG_CHARACTERS = 8, 64
#: The form of the name of a tag.
NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,63}$"
NAME = re.compile(NAME_PATTERN, re.ASCII)
#: The name of the tag that has a run's Celery id (celery_ids.py). Only the platform gives a run this tag.
RESERVED = "celery_task_id"


def check_given_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    """Check the tags that a client gives to a job, as `check_tags` does. Also raises Invalid `invalid_tags` for
    RESERVED.
    """
    if RESERVED in check_tags(tags):
        raise Invalid("invalid_tags", f"The tag {RESERVED} has the task_id of apply_async; give a tag of another name.")
    return tags


def check_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the tags unchanged. Raises Invalid `invalid_tags` if they break a rule."""
    given: Any = tags  # a program may pass other types at run time
    if not isinstance(given, Mapping):
        raise Invalid("invalid_tags", f'Tags are names with values, such as {{"customer": "7"}}, not {given!r}.')
    if len(tags) > MAX_TAGS:
        raise Invalid("invalid_tags", f"A job has at most {MAX_TAGS} tags.")
    for name, value in given.items():
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise Invalid("invalid_tags", f"The name of a tag must match {NAME_PATTERN}.")
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_TAG_CHARACTERS:
            raise Invalid("invalid_tags", f"The value of a tag is a text of 1 to {MAX_TAG_CHARACTERS} characters.")
        if storable_text(value) != value:
            raise Invalid("invalid_tags", "The value of a tag has no NUL character and no half of a surrogate pair.")
    return tags

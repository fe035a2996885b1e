"""docs/reference is what scripts/reference writes of the code as it stands."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module

import pytest

from docs.generate.pages import FOLDER, NAMES, pages
from leasehold.api.app import make_app
from leasehold.api.http.openapi import document
from leasehold.settings import Settings

#: When a test needs them, and not when pytest imports this module: each of its processes would write them.
written = cache(pages)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_of_the_reference_is_what_the_code_says(name: str) -> None:
    path = FOLDER / name
    assert path.exists(), f"run scripts/reference: it writes docs/reference/{name}"
    assert path.read_text() == written()[name], f"run scripts/reference: docs/reference/{name} differs from the code"


def test_no_other_page_stands_in_the_reference() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(written())


def test_every_setting_has_a_type_and_a_meaning() -> None:
    rows = [row.split(" | ") for row in written()["settings.md"].splitlines() if row.startswith("| `LEASEHOLD_")]
    assert [row[0] for row in rows] == [f"| `LEASEHOLD_{name.upper()}`" for name in Settings.model_fields]
    assert [row for row in rows if not row[1] or len(row[-1].strip(" |")) < 10] == []


def test_every_operation_names_its_scope() -> None:
    contract = document(make_app(Settings(_env_file=None)))
    operations = [one for item in contract["paths"].values() for one in item.values()]
    assert re.findall(r"^### (\w+)$", written()["http.md"], re.MULTILINE) != []
    assert {one["operationId"] for one in operations} == set(
        re.findall(r"^### (\w+)$", written()["http.md"], re.MULTILINE)
    )
    assert [one["operationId"] for one in operations if not all(one["security"][0].values())] == []
    assert "no key" not in written()["http.md"]


def test_every_metric_has_a_meaning() -> None:
    rows = [row.split(" | ") for row in written()["metrics.md"].splitlines() if row.startswith("| `leasehold_")]
    assert len(rows) > 60
    assert [row for row in rows if len(row[-1].strip(" |")) < 5] == []


def test_a_code_that_no_exception_names_is_in_it() -> None:
    rows = {
        ("worker_lost", "yes", "the worker was lost while it ran this step"),
        ("file_limit", "no", "a file grew past the step's size limit"),
        ("run_deleted", "no", "the run is deleted, and its result with it"),
        ("not_started_in_time", "no", "the job waited at its limits for longer than its start_within"),
    }
    text = written()["errors.md"]
    assert "| `method_not_allowed` | 405 | This address does not support the method. |" in text
    assert rows <= set(re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", text, re.MULTILINE))


def test_every_exception_of_the_tree_is_in_it() -> None:
    errors = import_module("leasehold.domain.errors")
    classes = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert {name for name in classes if not re.search(rf"\b{name}\b", written()["errors.md"])} == set()

"""What the recipes of CONTRIBUTING.md may forget, where no other test says it."""

from __future__ import annotations

import asyncio
import os
import re
import sys

import pytest

from leasehold.pipelines import with_demonstrations
from leasehold.pipelines.generation.providers import BUILT_IN, open_providers
from leasehold.settings import Settings
from tests.packaging.test_docs import ROOT
from tests.support.databases import Databases

RECIPES = (
    "A step",
    "A kind of work",
    "A provider in code",
    "An endpoint",
    "A metric",
    "A setting",
    "A migration",
    "A chaos fault",
)


@pytest.mark.parametrize("name", [pipeline.name for pipeline in with_demonstrations()])
def test_every_step_that_ships_has_a_handler(name: str) -> None:
    assert with_demonstrations().load_handlers(name).steps


async def test_every_provider_in_code_is_opened_tried_and_described() -> None:
    async with open_providers(Settings(_env_file=None)) as providers:
        for name in BUILT_IN:
            assert providers[name].name == name
    tried = (ROOT / "tests/generation/test_providers.py").read_text()
    assert [name for name in BUILT_IN if f'("{name}", ' not in tried] == []
    guide = (ROOT / "docs/guides/generation.md").read_text()
    assert [name for name in BUILT_IN if f"\n| `{name}` |" not in guide] == []


async def test_the_migrations_make_the_tables_that_the_code_declares(
    postgres: Databases, migrated_template: str
) -> None:
    """What `alembic revision --autogenerate` would write now: nothing."""
    url = await postgres.create_database(migrated_template)
    check = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "alembic", "check", cwd=ROOT, env=os.environ | {"LEASEHOLD_DATABASE_URL": url},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await check.communicate()
    assert check.returncode == 0, said.decode()


def test_every_recipe_has_five_lines_at_most_the_test_that_tells_and_the_files_that_it_touched() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = dict(re.findall(r"^### (.+?)\n\n(.+?)(?=\n\n#|\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(RECIPES) <= recipes.keys()
    for name in RECIPES:
        lines = [line for line in recipes[name].splitlines() if re.match(r"\d\. ", line)]
        assert 1 <= len(lines) <= 5, name
        assert re.search(r"Forgotten\? `tests/[\w/.]+`", recipes[name]), name
        assert re.search(r"Files: \d+", recipes[name]), name

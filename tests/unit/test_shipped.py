"""What an installation offers without anybody's word."""

from __future__ import annotations

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from leasehold.cli.demo import DemoFailed, run
from leasehold.pipelines import shipped, with_demonstrations
from leasehold.settings import Settings

DEMONSTRATIONS = {"noop", "demo_long_task"}


def test_a_plain_installation_offers_no_demonstrations() -> None:
    """A client's flood of them would hold slots for hours."""
    assert Settings(_env_file=None).pipelines == "leasehold.pipelines:shipped"
    assert not DEMONSTRATIONS & {pipeline.name for pipeline in shipped()}


def test_those_who_show_the_platform_offer_everything() -> None:
    offered = {pipeline.name for pipeline in with_demonstrations()}
    assert offered == DEMONSTRATIONS | {pipeline.name for pipeline in shipped()}


@pytest.mark.parametrize("missing", ["PIL", "pyvips"])
def test_without_the_extra_for_pictures_leasehold_dev_has_none_and_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """A worker could not load their handlers, and would end. An API that has pictures needs no such library."""
    monkeypatch.setattr("leasehold.pipelines.find_spec", lambda name: None if name == missing else find_spec(name))
    assert "media" not in with_demonstrations()
    assert "media" in shipped()
    assert {"noop", "webhook"} <= {pipeline.name for pipeline in with_demonstrations()}
    with pytest.raises(DemoFailed, match=re.escape("pip install 'leasehold[embedded,media]'")):
        asyncio.run(run([], out=Path("out")))

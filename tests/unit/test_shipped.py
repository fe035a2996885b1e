"""What an installation offers without anybody's word."""

from __future__ import annotations

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

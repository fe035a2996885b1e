"""The tasks of kit_main's app."""

from leasehold import current
from tests.app import kit_main


@kit_main.app.task
def part(n: int) -> str:
    return f"part {n} by attempt {current().number}"

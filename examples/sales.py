"""A data pipeline: one step cuts a day into files, a part adds up each file, and the step adds up the parts."""

import csv
import io
from collections import Counter
from typing import Any

from pydantic import BaseModel

from leasehold import App, Attempt, Done, FanOut, Pipeline, Step

app = App("sales")


class Day(BaseModel):
    csv: str
    rows_per_file: int = 2


sales = Pipeline(
    "sales",
    module=__name__,
    params=Day,
    steps=[Step("total"), Step("part", part=True, reads=("total",))],
)
app.add(sales)


@sales.handles("total")
async def total(attempt: Attempt) -> FanOut | Done:
    parts = await attempt.joined()
    if parts is None:
        return FanOut("part", await split(attempt))
    sums: Counter[str] = Counter()
    for part_sums in parts:
        sums.update(part_sums)
    return Done(value=dict(sums))


async def split(attempt: Attempt) -> list[str]:
    """Cut the day into files. Another attempt writes the same bytes under the same names."""
    head, *lines = attempt.params.csv.splitlines()
    files: list[str] = []
    for first in range(0, len(lines), attempt.params.rows_per_file):
        files.append(f"part-{len(files)}.csv")
        text = "\n".join([head, *lines[first : first + attempt.params.rows_per_file]])
        await attempt.write(files[-1], text.encode(), "text/csv")
    return files


@sales.handles("part")
async def part(attempt: Attempt) -> dict[str, Any]:
    """Add up one file. Any worker may run a part."""
    text = (await attempt.read(await attempt.item())).decode()
    sums: Counter[str] = Counter()
    for row in csv.DictReader(io.StringIO(text)):
        sums[row["product"]] += int(row["amount"])
    return dict(sums)

"""Draws the graph of a job's steps for the job's page. The lines of the graph lead from left to right, from each step
to the steps that need it. If the steps do not branch, there is no graph.

If a step fanned out (was split into parts), up to _MAX_PARTS parts have a box each. More than _MAX_PARTS parts share
one box. A workflow has no graph, because its code decides which step comes next. The timeline shows the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

from leasehold.db.job_reads import Row

#: The size of a box, and the gaps between boxes, in units of the drawing.
WIDTH, HEIGHT, _GAP_X, _GAP_Y = 168, 30, 44, 12
#: More than _MAX_PARTS parts of one step share one box. A graph of more than _MAX_BOXES boxes is not drawn.
_MAX_PARTS, _MAX_BOXES = 6, 60
#: The state of a box of many parts is the first of these states that at least one of the parts has.
_WORST_FIRST = ("failed", "running", "retry", "waiting", "pending", "blocked", "cancelled", "skipped", "succeeded")
#: Maps a step to the steps that it needs, or the key of a box to the keys of the boxes that it needs.
Links: TypeAlias = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the drawing. `step`: the name of the step; empty for a box of many parts. `name`: the text in the box.
    `words`: the text that the browser shows for the box under the mouse; it has the state of the step, or the numbers
    of parts in each state.
    """

    step: str
    name: str
    state: str
    words: str
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Graph:
    """`paths`: the lines between boxes, as SVG paths."""

    boxes: Sequence[Box]
    paths: Sequence[str]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A box that has no place in the drawing yet. The fields are those of Box."""

    step: str
    name: str
    state: str
    words: str


def needs_of(tasks: Sequence[Row]) -> dict[str, list[str]]:
    """Each step, with the steps that it needs. A part (its `parent_id` is the task that fanned out) needs the step of
    that task. For any other task, `unblocks` names the tasks that need it.
    """
    names: dict[UUID, str] = {task["id"]: task["step"] for task in tasks}
    needs: dict[str, list[str]] = {task["step"]: [] for task in tasks}
    for task in tasks:
        if task["parent_id"] is not None:
            needs[task["step"]] += [names[task["parent_id"]]] if task["parent_id"] in names else []
            continue
        for unblocked_id in task["unblocks"]:
            if unblocked_id in names:
                needs[names[unblocked_id]].append(task["step"])
    return needs


def graph_of(tasks: Sequence[Row]) -> Graph | None:
    """The graph of these steps. None: the steps do not branch, need too many boxes, or belong to a workflow."""
    if any(task["contained"] for task in tasks):  # a workflow contains the tasks that it starts
        return None
    nodes, needs = _nodes_and_needs(tasks, needs_of(tasks))
    # How many boxes need each box.
    follower_counts = Counter(need for needed_keys in needs.values() for need in set(needed_keys))
    has_branches = max(follower_counts.values(), default=0) > 1 or any(len(set(keys)) > 1 for keys in needs.values())
    if not has_branches or len(nodes) > _MAX_BOXES:
        return None
    return _draw(nodes, needs)


def _nodes_and_needs(tasks: Sequence[Row], needs: Links) -> tuple[dict[str, _Node], dict[str, Sequence[str]]]:
    """Returns two mappings. The first has the box of each key. The second has for each box the keys of the boxes that
    it needs. The key of a box is its step. If many parts share a box, the key of this box is the step of the first
    part.
    """
    parts_by_parent: dict[UUID, list[Row]] = {}
    for task in tasks:
        if task["parent_id"] is not None:
            parts_by_parent.setdefault(task["parent_id"], []).append(task)
    grouped_parts = {parent_id: parts for parent_id, parts in parts_by_parent.items() if len(parts) > _MAX_PARTS}
    nodes, links = {}, {}
    for task in tasks:
        step, state = task["step"], task["status"]
        if task["parent_id"] not in grouped_parts:
            nodes[step] = _Node(step, step, state, f"{step}: {state.replace('_', ' ')}")
            links[step] = needs[step]
    for parts in grouped_parts.values():
        states = Counter(part["status"] for part in parts)
        key = parts[0]["step"]
        name = f"{len(parts)} {key.rpartition('.')[0] or key}"  # the name of a part ends with a dot and its number
        state = next(state for state in (*_WORST_FIRST, *states) if states[state])
        counts = ", ".join(f"{n} {state.replace('_', ' ')}" for state, n in states.most_common())
        nodes[key] = _Node("", name, state, f"{name}: {counts}")
        links[key] = needs[key]
    return nodes, links


def _draw(nodes: Mapping[str, _Node], needs: Links) -> Graph:
    """Place the boxes in columns. Within a column, a box is near the boxes that it needs."""
    columns = _columns(_levels(needs))
    most_rows = max(len(column) for column in columns)
    places: dict[str, tuple[int, int]] = {}  # x and y of each box
    for number, column in enumerate(columns):
        # `if need in places` leaves out a part that shares a box, because it has no place of its own.
        column.sort(key=lambda key: _mean([places[need][1] for need in needs[key] if need in places]))
        top = (most_rows - len(column)) * (HEIGHT + _GAP_Y) // 2
        for row, key in enumerate(column):
            places[key] = number * (WIDTH + _GAP_X), top + row * (HEIGHT + _GAP_Y)
    boxes = [
        Box(node.step, node.name, node.state, node.words, places[key][0], places[key][1]) for key, node in nodes.items()
    ]
    paths = [_path(places[need], places[key]) for key in nodes for need in dict.fromkeys(needs[key]) if need in places]
    width = len(columns) * (WIDTH + _GAP_X) - _GAP_X
    return Graph(boxes, paths, width, most_rows * (HEIGHT + _GAP_Y) - _GAP_Y)


def _levels(needs: Links) -> dict[str, int]:
    """The column of each box. A box stands in the column after the rightmost box that it needs. Each round moves the
    boxes that stand too far to the left. When a round has moved no box, all boxes stand in their columns.
    """
    levels = dict.fromkeys(needs, 0)
    for _ in needs:  # a chain of all boxes, the slowest case, needs one round for each box
        has_moved = False
        for key, needed_keys in needs.items():
            level = max((levels[need] + 1 for need in needed_keys if need in levels), default=0)
            has_moved |= level != levels[key]
            levels[key] = level
        if not has_moved:
            break
    return levels


def _columns(levels: Mapping[str, int]) -> list[list[str]]:
    columns: list[list[str]] = [[] for _ in range(max(levels.values()) + 1)]
    for key, level in levels.items():
        columns[level].append(key)
    return columns


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _path(start: tuple[int, int], end: tuple[int, int]) -> str:
    """A curve from the right side of the box at `start` to the left side of the box at `end`."""
    x, y = start[0] + WIDTH, start[1] + HEIGHT // 2
    to_x, to_y = end[0], end[1] + HEIGHT // 2
    bend = max((to_x - x) // 2, 12)
    return f"M{x} {y}C{x + bend} {y} {to_x - bend} {to_y} {to_x} {to_y}"

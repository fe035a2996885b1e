"""The map of cells: what it may say, and how a cell reads it again."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from leasehold.domain.errors import BadSetting, WrongCell
from leasehold.security.cells import MAX_MAP_BYTES, Cells, parse
from leasehold.settings import Settings

TWO = {"cells": {"a": "https://a.example/", "b": "https://b.example/api"}, "tenants": {"acme": "b"}}


def written(path: Path, document: object) -> Path:
    """In another file, which takes its place: two writes of one file within a tick of the clock may look the same."""
    new = path.with_suffix(".written")
    new.write_bytes(orjson.dumps(document))
    new.replace(path)
    return path


def cells_of(path: Path, own: str = "a") -> Cells:
    found = Cells.of(Settings(_env_file=None, cell=own, cells_file=str(path)))
    assert found is not None
    return found


def test_an_installation_without_a_name_is_no_cell() -> None:
    assert Cells.of(Settings(_env_file=None)) is None


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"cells": {"a": "https://a.example"}, "tenant": {}},
        {"cells": ["a"]},
        {"cells": {"A": "https://a.example"}},
        {"cells": {"twelveletter": "https://a.example"}},
        {"cells": {"a": "a.example"}},
        {"cells": {"a": "ftp://a.example"}},
        {"cells": {"a": "https://a.example/ x"}},
        {"cells": {"a": "https://a.example", "b": 1}},
        {"tenants": {"acme": "a"}},
        "{",
        {"cells": {"a": "https://user:password@a.example"}},
        {"cells": {"a": "https://a.example/?x=1"}},
        {"cells": {"a": "https://a.example"}, "tenants": {"acme": "b"}},
        {"cells": {"a": "https://a.example"}, "tenants": {"acme": 1}},
    ],
)
def test_a_map_that_makes_no_sense_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r"map of cells|cell|URL"):
        parse(document if isinstance(document, str) else orjson.dumps(document).decode())


def test_a_map_may_place_no_tenant() -> None:
    read = parse('{"cells": {"a": "http://a.example", "elevencells": "https://b.example/"}}')
    assert read.addresses == {"a": "http://a.example", "elevencells": "https://b.example"}
    assert (read.tenants, read.homes) == ({}, frozenset())


@pytest.mark.parametrize("content", [None, b"", b"{", orjson.dumps({"cells": {"b": "https://b.example"}})])
def test_a_cell_does_not_start_without_a_map_that_names_it(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cells.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadSetting, match=r"LEASEHOLD_CELLS_FILE.*(No such file|it is empty|map of cells)"):
        cells_of(path)
    with pytest.raises(BadSetting, match="LEASEHOLD_CELLS_FILE"):
        Cells.of(Settings(_env_file=None, cell="a"))


def test_a_tenant_of_another_cell_is_sent_there_and_all_others_stay(tmp_path: Path) -> None:
    cells = cells_of(written(tmp_path / "cells.json", TWO))
    cells.refuse_elsewhere("nobody knows where")
    with pytest.raises(WrongCell) as refused:
        cells.refuse_elsewhere("acme")
    assert (refused.value.cell, refused.value.address) == ("b", "https://b.example/api")
    cells_of(tmp_path / "cells.json", own="b").refuse_elsewhere("acme")


def test_a_key_of_a_cell_that_the_map_does_not_name_is_only_a_wrong_key(tmp_path: Path) -> None:
    cells = cells_of(written(tmp_path / "cells.json", TWO))
    for own_or_unknown in (None, "a", "c"):
        cells.refuse_before_key_is_read(own_or_unknown)
    with pytest.raises(WrongCell):
        cells.refuse_before_key_is_read("b")


def test_before_its_key_is_read_a_tenant_is_sent_away_only_from_a_cell_that_has_taken_none_over(tmp_path: Path) -> None:
    """One that has moved here still uses the key that its old cell made."""
    cells = cells_of(written(tmp_path / "cells.json", TWO), own="b")
    cells.refuse_before_key_is_read("a")
    cells.refuse_elsewhere("acme", "a")  # the map decides
    for tenant in (None, "another"):
        with pytest.raises(WrongCell) as refused:
            cells.refuse_elsewhere(tenant, "a")
        assert (refused.value.cell, refused.value.address) == ("a", "https://a.example")
        cells.refuse_elsewhere(tenant, "unknown")
        cells.refuse_elsewhere(tenant, "b")


def test_a_map_may_place_as_many_tenants_as_cells_can_have(tmp_path: Path) -> None:
    """The file of a secret is smaller, and a map that grows beyond it would be read no more."""
    map_file = written(tmp_path / "cells.json", TWO)
    cells = cells_of(map_file)
    many = {f"tenant-{number:06}-of-a-name-of-forty-characters": "b" for number in range(200_000)}
    written(map_file, TWO | {"tenants": many})
    for found in (cells, cells_of(map_file)):
        with pytest.raises(WrongCell):
            found.refuse_elsewhere("tenant-199999-of-a-name-of-forty-characters")
    os.truncate(written(map_file, TWO), MAX_MAP_BYTES + 1)
    assert len(cells.map.tenants) == 200_000, "the last map that could be read"
    with pytest.raises(BadSetting, match="it has more than 67108864 bytes"):
        cells_of(map_file)


def test_a_changed_map_holds_at_once_and_a_broken_one_never(tmp_path: Path) -> None:
    path = written(tmp_path / "cells.json", TWO)
    cells = cells_of(path)
    written(path, TWO | {"tenants": {"acme": "a"}})
    cells.refuse_elsewhere("acme")
    broken: object
    for broken in ({"cells": {"b": "https://b.example"}}, []):
        written(path, broken)
        cells.refuse_elsewhere("acme")
    path.unlink()
    cells.refuse_elsewhere("acme")
    new = written(tmp_path / "new.json", TWO)
    new.replace(path)
    with pytest.raises(WrongCell):
        cells.refuse_elsewhere("acme")

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import asyncpg


@dataclass
class Two:
    first: asyncpg.Connection[Any]
    second: asyncpg.Connection[Any]

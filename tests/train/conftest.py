"""What the tests of mst-train share: ten rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions with an answer of one word."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = [{"prompt": f"Is number {i} odd?", "completion": "yes" if i % 2 else "no"} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

"""Write the generated files of the repository, or with --check compare them.

docs/manifest.schema.json      the JSON schema of mst.json
tests/golden/help/*.txt        the --help of every command
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = (
    "mst", "mst inspect", "mst verify", "mst lineage", "mst-convert", "mst-convert adapter", "mst-merge", "mst-train",
    "mst-align", "mst-eval", "mst-serve",
)  # fmt: skip


def generated() -> dict[str, str]:
    """Path -> content of every generated file."""
    from mst_core import manifest

    files = {"docs/manifest.schema.json": json.dumps(manifest.schema(), indent=2) + "\n"}
    environment = {**os.environ, "COLUMNS": "100"}
    for command in COMMANDS:
        words = [str(Path(sys.executable).parent / command.split()[0]), *command.split()[1:], "--help"]
        shown = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
        files[f"tests/golden/help/{command.replace(' ', '_')}.txt"] = shown.stdout
    return files


def main() -> int:
    """Write, or with --check compare and name what differs."""
    differing = []
    for name, content in generated().items():
        path = ROOT / name
        if "--check" in sys.argv:
            if not path.exists() or path.read_text() != content:
                differing.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    if differing:
        print(f"generated files are out of date: {', '.join(differing)}\n  hint: python scripts/generate.py")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())

"""Write the generated files of the repository, or with --check compare them.

docs/manifest.schema.json      the JSON schema of mst.json
docs/families.md               the architectures and what proves each
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
    "mst", "mst inspect", "mst verify", "mst lineage", "mst-convert", "mst-convert families", "mst-convert adapter",
    "mst-merge", "mst-train",
    "mst-align", "mst-align head", "mst-eval", "mst-serve",
)  # fmt: skip


FAMILIES_PAGE = """# Architectures

Printed by `mst-convert families`, written by scripts/generate.py. Each row is a file of rules in
packages/core/mst_core/families; any architecture that is not here is refused by name. Remote code is never run.

{table}

All are also compared with what transformers saves (names and shapes), where transformers knows them, and go through
every layout and back bit for bit. Some settings within an architecture convert and cannot be trained: `mst-train`
names them.
"""


def generated() -> dict[str, str]:
    """Path -> content of every generated file."""
    from mst_convert import families
    from mst_core import manifest
    from mst_core.families import FAMILIES

    files = {"docs/manifest.schema.json": json.dumps(manifest.schema(), indent=2) + "\n"}
    files["docs/families.md"] = FAMILIES_PAGE.format(table=families.table(FAMILIES))
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

"""The rules of the house, held by reading the code (imports as AST) and by running the commands."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name: path.parent.parent for path in sorted((ROOT / "packages").glob("*/mst_*/__init__.py"))}
TOOLS = {"mst": "mst_core.cli_mst", "mst-convert": "mst_convert.cli", "mst-merge": "mst_convert.merge.cli",
         "mst-train": "mst_train.cli", "mst-align": "mst_align.cli", "mst-eval": "mst_evalkit.cli",
         "mst-serve": "mst_serve.cli"}  # fmt: skip
HEAVY = (
    "torch",
    "numpy",
    "transformers",
    "safetensors",
    "megatron",
    "peft",
    "deepspeed",
    "vllm",
    "lmdeploy",
    "lm_eval",
)
ONE_FOLDER = ("megatron", "peft", "deepspeed", "vllm", "lmdeploy", "lm_eval", "fastapi", "uvicorn", "gguf")
LIGHT = {"pydantic", "pydantic_settings", "yaml", "rich", "blake3", "mst_core", "httpx2"}
"""What core's inner ring may import at module level beside the standard library."""


def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            name = ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return found


MODULES = modules()


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def imports(name: str, *, module_level: bool) -> Iterator[str]:
    """Dotted names that a module imports (those under TYPE_CHECKING cost nothing and do not count)."""
    nodes: list[ast.AST] = list(tree(name).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not (module_level and inside):
            nodes.extend(ast.iter_child_nodes(node))


def test_tools_import_core_and_never_each_other() -> None:
    for name in MODULES:
        own = name.partition(".")[0]
        others = {found.partition(".")[0] for found in imports(name, module_level=False)} & PACKAGES.keys() - {own}
        assert others <= ({"mst_core"} if own != "mst_core" else set()), f"{name} imports {others}"


def test_inner_ring_is_light() -> None:
    for name in MODULES:
        if name.partition(".")[0] != "mst_core" or name.startswith("mst_core.engine"):
            continue
        for found in imports(name, module_level=True):
            top = found.partition(".")[0]
            assert top in LIGHT or top in sys.stdlib_module_names, f"{name} imports {found} at module level"
            assert not found.startswith("mst_core.engine"), f"{name} (inner ring) imports {found} (outer ring)"


def test_plans_and_settings_are_light() -> None:
    for name in MODULES:
        if name.rpartition(".")[2] in ("cli", "spec", "plan"):
            found = {found.partition(".")[0] for found in imports(name, module_level=True)}
            assert not found & set(HEAVY), f"{name} imports {found & set(HEAVY)}"


@pytest.mark.parametrize("library", ONE_FOLDER)
def test_each_big_library_is_imported_in_one_folder(library: str) -> None:
    folders = {
        MODULES[name].parent.relative_to(ROOT).as_posix()
        for name in MODULES
        if any(found.partition(".")[0] == library for found in imports(name, module_level=False))
    }
    assert len(folders) <= 1, f"{library} is imported in {sorted(folders)}"


def test_no_import_cycles() -> None:
    edges = {
        name: {found for found in imports(name, module_level=True) if found in MODULES and found != name}
        for name in MODULES
    }
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if state.get(name) == 2:
            return
        assert state.get(name) != 1, f"import cycle: {' -> '.join([*path, name])}"
        state[name] = 1
        for other in sorted(edges[name]):
            visit(other, (*path, name))
        state[name] = 2

    for name in edges:
        visit(name, ())


def test_environment_is_read_in_one_place_each() -> None:
    readers = {name for name in MODULES if re.search(r"os\.environ|getenv", MODULES[name].read_text())}
    allowed = {
        "mst_core.cli",  # MST_DEBUG
        "mst_core.cluster",  # the launchers' variables
        "mst_core.engine.launch",  # what the ranks it starts get: threads, no accelerators
    }
    assert readers <= allowed, f"{readers - allowed} read the environment"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_alone_with_core(package: str) -> None:
    """Only core, the package and third-party packages on the path: every module imports."""
    names = [name for name in MODULES if name.partition(".")[0] == package and "megatron" not in name]
    paths = [str(PACKAGES["mst_core"]), str(PACKAGES[package]), sysconfig.get_paths()["purelib"]]
    script = (
        f"import sys; sys.path += {paths!r}\nimport importlib\nfor name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def cpu_of(script: str) -> tuple[float, str, str]:
    """(the least CPU seconds of five runs, stdout, the last line of stderr) of a Python script."""
    tail = (
        "import resource\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(code, heavy, used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    )
    seconds = []
    for _ in range(5):
        words = [sys.executable, "-c", f"import sys\ncode = 0\n{script}\n{tail}"]
        done = subprocess.run(words, capture_output=True, text=True)
        said, _, cpu = done.stderr.strip().splitlines()[-1].rpartition(" ")
        seconds.append(float(cpu))
    return min(seconds), done.stdout, said


@pytest.mark.parametrize("tool", TOOLS)
def test_help_is_light_and_quick(tool: str, slowness: float) -> None:
    script = (
        f"sys.argv = ['x', '--help']\nfrom {TOOLS[tool]} import main\n"
        "try:\n    main()\nexcept SystemExit as stop: code = stop.code or 0"
    )
    seconds, shown, said = cpu_of(script)
    assert said == "0 []"
    assert shown.startswith("usage: ")
    assert seconds < 0.5 * slowness, f"{tool} --help takes {seconds:.2f} s of CPU, at {slowness:.2f} x an idle machine"


def test_generated_files_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "generate.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_has_one_version_and_pins_core() -> None:
    from mst_core.version import VERSION

    for path in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        text = path.read_text()
        assert f'version = "{VERSION}"' in text, path
        if path.parent.name != "core":
            assert f"]=={VERSION}" in text or f"mst-tools-core=={VERSION}" in text, path

"""``--verify logits``: both sides run over the same random tokens, in fp32 on the CPU, and their logits compared.

transformers runs a Hugging Face side, megatron-core a Megatron one. Each runs in processes of its own: one model is in
memory at a time, and the bridge that lets megatron-core run without CUDA would make transformers' logits NaN.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mst_convert.accounts import CASTS
from mst_convert.sources import Source
from mst_convert.spec import ConvertSpec
from mst_convert.targets import Target
from mst_core import console, devices, legacy, megatron_names, tensors, torch_dist
from mst_core.errors import InputError, MissingPackage, RunError
from mst_core.families import LOGITS, PROOFS

if TYPE_CHECKING:
    from torch import Tensor

    from mst_core.checkpoint import Staging

TOKENS = (2, 32)
"""Sequences, and their length where the model has as many positions."""
MOST_RANKS = 16
"""Processes that a legacy checkpoint may take: one for each of its files."""
PROCESS = 1 << 30
"""Bytes of a process with torch and its libraries, the first; each further one shares much of it."""
INSTEAD = "--verify roundtrip compares every tensor instead"
PACKAGES = {"hf": "transformers", "megatron": "megatron.core", "megatron-legacy": "megatron.core"}


class Side(NamedTuple):
    """A checkpoint to run; of Megatron's: where config.json is, the rows of its vocabulary, its tp, pp and ep."""

    layout: str
    directory: Path
    hf: Path
    vocab_rows: int
    sizes: tuple[int, int, int]


def memory(source: Source, ranks: int) -> int:
    """Bytes that a side takes: its weights in fp32, a quarter more while they are loaded, and its processes."""
    return source.model.parameters * 5 + PROCESS + (ranks - 1) * PROCESS // 2


def check(spec: ConvertSpec, source: Source) -> int:
    """Refuse, by the plan, a model that either library cannot run, and (but for a dry run) a machine that cannot.
    Returns the bytes of memory that it takes.

    InputError, MissingPackage.
    """
    layouts = {source.layout, spec.to}
    family, config, where = source.family, source.config, source.hf_dir / "config.json"
    if source.model.scores:
        raise _cannot("a reward model gives a score, no logits", where)
    if family.carried:
        raise _cannot(f"{family.architecture} has a vision tower, which text does not run", where)
    if source.quantised:
        raise _cannot("its source is quantised, and transformers runs that on a GPU only", where)
    try:
        family.megatron(config, where)
    except InputError as error:
        raise _cannot(error.what, where) from error
    if "hf" in layouts and (PROOFS[family.name] != LOGITS or config.get("model_type") != family.model_type):
        raise _cannot(
            f"transformers has no {family.architecture} of model_type {config.get('model_type')!r}"
            " without code from elsewhere",
            where,
        )
    ranks = max(prod(_source_sizes(source)), prod(_sizes(spec)))
    if source.layout == "megatron":
        stored = torch_dist.metadata(source.directory)
        if megatron_names.detect(source.model, source.tasks, stored).fsdp:
            raise _cannot("megatron-core's loader does not read fsdp_dtensor into a GPTModel", source.directory)
    if spec.to == "megatron-legacy" and spec.vp > 1:
        raise _cannot("virtual pipeline stages (--vp)", source.directory)
    if ranks > MOST_RANKS:
        raise _cannot(f"{ranks} ranks (at most {MOST_RANKS} are started)", source.directory)
    needed = memory(source, ranks)
    if not spec.dry_run:
        _check_machine(layouts, needed)
    return needed


def _cannot(what: str, where: Path) -> InputError:
    return InputError(f"--verify logits cannot run it: {what}", where=where, hint=INSTEAD)


def _check_machine(layouts: set[str], needed: int) -> None:
    missing = sorted({name for layout in layouts if not _installed(name := PACKAGES[layout])})
    if missing:
        what = f"--verify logits needs {' and '.join(missing)}"
        raise MissingPackage(what, hint="pip install 'mst-tools-core[engine,megatron]'")
    free = devices.free_memory()
    if needed > free:
        sizes = f"{console.size(needed)} of memory (the weights in fp32), {console.size(free)} are free"
        raise InputError(f"--verify logits takes {sizes}", hint=INSTEAD)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _sizes(spec: ConvertSpec) -> tuple[int, int, int]:
    return (spec.tp, spec.pp, spec.ep) if spec.to == "megatron-legacy" else (1, 1, 1)


def _source_sizes(source: Source) -> tuple[int, int, int]:
    """tp, pp and ep of the source. InputError for a legacy layout that is not run."""
    if source.layout != "megatron-legacy":
        return (1, 1, 1)
    place = source.directory
    ranks = legacy.read(place)
    tp, pp, ep = (max(numbers) + 1 for numbers in zip(*((r.tp, r.pp, r.ep) for r in ranks), strict=True))
    layers = {sum(".self_attention.linear_proj.weight" in name for name in rank.stages[0]) for rank in ranks}
    if len(ranks[0].stages) > 1 or len(layers) > 1 or len(ranks) != tp * pp * ep:
        raise _cannot("virtual or uneven pipeline stages, or experts on a tensor parallel size of their own", place)
    if any(name.endswith((".experts.weight1", ".experts.weight2")) for name in ranks[0].stages[0]):
        raise _cannot("experts of the old GroupedMLP, which megatron-core no longer has", place)
    return tp, pp, ep


# --- the comparison ----------------------------------------------------------------------------------------------


def compare(spec: ConvertSpec, source: Source, target: Target, staging: Staging) -> dict[str, Any]:
    """Run both sides. Returns the figures for the report; RunError if the logits differ by more than the threshold."""
    from safetensors.torch import load_file

    first = Side(source.layout, source.directory, source.hf_dir, source.vocab_rows, _source_sizes(source))
    rows = source.model.dims.vocab + target.padding_rows
    second = Side(spec.to, staging.path, staging.path / "hf", rows, _sizes(spec))
    rounded = CASTS[spec.dtype] if spec.dtype else None
    tokens = _tokens(source)
    with tempfile.TemporaryDirectory(prefix="mst-logits-") as folder, console.progress("running", 2, "model") as bar:
        found = []
        for name, side, dtype in (("source", first, rounded), ("output", second, None)):
            out = Path(folder, name, "logits.safetensors")
            out.parent.mkdir()
            _run(side, tokens, out, dtype)
            found.append(load_file(out)["logits"])
            bar.advance()
    difference, spread = judge(found[0], found[1], spec.logits_threshold, source.directory)
    return {
        "difference": difference,
        "standard_deviation": spread,
        "threshold": spec.logits_threshold,
        "tokens": [len(tokens), len(tokens[0])],
        **({"not_run": "multi-token-prediction layers"} if "mtp" in source.model.facts else {}),
    }


def judge(one: Tensor, other: Tensor, threshold: float, where: Path) -> tuple[float, float]:
    """The largest difference of two logits, and the standard deviation of ``one``'s, which ``threshold`` multiplies.
    RunError if the difference is more."""
    difference, spread = float((one - other).abs().max()), float(one.std())
    # Written so that NaN fails too; logits that are all alike would compare nothing.
    if not (spread > 0 and difference <= threshold * spread):
        measured = f"{difference / (spread or 1):.1e} of their standard deviation {spread:.2e}"
        raise RunError(
            f"the logits of source and output differ by {difference:.2e}, {measured};"
            f" --logits-threshold is {threshold:g}",
            where=where,
            hint="weights, config.json and mst's rules for the architecture do not fit together; if the model runs well"
            " elsewhere, please report it",
        )
    return difference, spread


def _tokens(source: Source) -> list[list[int]]:
    draw = random.Random(0)
    positions = source.family.megatron(source.config, source.hf_dir)["gpt"]["max_sequence_length"]
    rows, length = TOKENS
    return [[draw.randrange(source.model.dims.vocab) for _ in range(min(length, positions))] for _ in range(rows)]


def _run(side: Side, tokens: list[list[int]], out: Path, rounded: str | None) -> None:
    """The logits of one side to ``out``, in new processes."""
    from mst_core.engine import launch

    if side.layout == "hf":
        arguments: tuple[Any, ...] = ("mst_convert.logits:run_transformers", 1, side.directory, tokens, out, rounded)
    else:
        asked = (side.directory, side.hf, side.vocab_rows, side.layout == "megatron-legacy", *side.sizes, rounded)
        arguments = ("mst_core.engine.megatron.logits:write", prod(side.sizes), asked, tokens, out)
    try:
        launch.run_on_cpu(*arguments)
    except (InputError, RunError) as error:
        raise type(error)(error.what, where=error.where, hint=INSTEAD) from error


def run_transformers(directory: Path, tokens: list[list[int]], out: Path, rounded: str | None) -> None:
    """logits_BTV (fp32) of transformers' own model to a safetensors file. InputError if it cannot load every weight.

    rounded   "BF16" or another: the weights are rounded to it first, as the conversion does
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        raise InputError(f"transformers cannot load it: {error}", where=directory) from error
    wrong = [str(name) for kind in ("missing_keys", "mismatched_keys") for name in loading[kind]]
    if wrong:
        raise InputError(f"transformers does not find {', '.join(sorted(wrong)[:10])}", where=directory)
    if rounded:
        tensors.round_to(model, rounded)
    with torch.no_grad():
        logits_BTV = model.eval()(torch.tensor(tokens), use_cache=False).logits
    save_file({"logits": logits_BTV.float().contiguous()}, out)

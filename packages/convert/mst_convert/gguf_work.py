"""A GGUF file to a Hugging Face directory, through transformers' own GGUF loader (it dequantises to fp32 in memory)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from mst_convert.accounts import CASTS, EMBEDDING, LM_HEAD
from mst_convert.plan import ConvertPlan
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, console, files, manifest, tensors
from mst_core.checkpoint import Staging
from mst_core.errors import InputError, MissingPackage
from mst_core.families import Model, family_for
from mst_core.manifest import Parent
from mst_core.spec import Result
from mst_core.tensors import TORCH_NAMES, Wanted

TOOL = "mst-convert"


def convert(spec: ConvertSpec, plan: ConvertPlan) -> Result:
    """Load, check every tensor against the family, write."""
    source = Path(plan.source)
    loaded, tokenizer = _load(source)
    state = loaded.state_dict()
    config = _config(loaded)
    model = family_for(config, source).model(config, source, names=state)
    dtype = CASTS[spec.dtype or "bf16"]
    config["dtype"] = TORCH_NAMES[dtype]
    wanted = _wanted(model, state, dtype, source)
    count, digest = files.hash_file(source)
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        writer = tensors.write_hf(staging, wanted, int(spec.max_shard_size))
        with console.progress("writing", len(wanted), "tensor") as bar:
            for name, _, _ in wanted:
                writer.put(name, state[name].to(tensors.torch_dtype(dtype)))
                bar.advance()
        writer.finish()
        staging.write("config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        generation = _plain(loaded.generation_config.to_diff_dict())
        staging.write("generation_config.json", json.dumps(generation, indent=2, sort_keys=True) + "\n")
        _write_tokenizer(staging, tokenizer)
        made = staging.commit(
            kind="model",
            layout="hf",
            model=model.info(TORCH_NAMES[dtype]),
            parents=[Parent(role="source", id=f"blake3:{digest}", lossless=False)],
            tool=TOOL,
            settings=spec.changing_bytes(),
            notes={"source_bytes": count, "elements_written_once": model.parameters},
        )
    console.say(f"{len(wanted)} tensors, {model.parameters:,} elements written once, {manifest.short(made.id)}")
    data = {"out": str(spec.out), "id": made.id, "lossless": False, "elements": model.parameters}
    return Result(text=str(spec.out), data=data)


def _load(source: Path) -> tuple[Any, Any]:
    """The model (fp32) and the tokenizer. A file that transformers cannot read becomes InputError."""
    try:
        import gguf  # noqa: F401  (transformers asks for it by itself, later and less clearly)
        import torch
        import transformers
    except ImportError as error:
        raise MissingPackage(f"a GGUF file needs {error.name}", hint="pip install transformers gguf") from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    where, name = str(source.parent), source.name
    console.say("dequantising to fp32 in memory")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, gguf_file=name)
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise InputError(f"transformers cannot read it: {error}", where=source) from error
    return model, tokenizer


def _config(model: Any) -> dict[str, Any]:
    """config.json of the model as if it had never been quantised (save_pretrained refuses it as it is)."""
    config: dict[str, Any] = _plain(model.config.to_diff_dict())
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    return config


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """JSON values only (a dtype object becomes its name)."""
    plain: dict[str, Any] = json.loads(json.dumps(config, default=lambda value: str(value).removeprefix("torch.")))
    return plain


def _wanted(model: Model, state: dict[str, Any], dtype: str, where: Path) -> list[Wanted]:
    """Every tensor of the family, each present and of its shape; nothing else but a tied lm_head."""
    wanted = [(tensor.name, dtype, tensor.shape) for tensor in model.hf_tensors()]
    bad = [n for n, _, shape in wanted if n not in state or tuple(state[n].shape) != shape or state[n].is_meta]
    extra = state.keys() - {name for name, _, _ in wanted}
    if model.tied and LM_HEAD in extra and bool((state[LM_HEAD] == state[EMBEDDING]).all()):
        extra -= {LM_HEAD}
    if bad or extra:
        names = ", ".join(sorted([*bad, *extra])[:5])
        raise InputError(f"tensors missing, of a wrong shape or unknown: {names}", where=where)
    return wanted


def _write_tokenizer(staging: Staging, tokenizer: Any) -> None:
    before = set(files.listing(staging.path))
    tokenizer.save_pretrained(staging.path)
    settings = staging.path / "tokenizer_config.json"
    if settings.is_file():
        # These say how this process loaded it, and the id must not.
        kept = {k: v for k, v in tensors.read_json(settings).items() if k not in ("is_local", "local_files_only")}
        settings.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    for name in sorted(set(files.listing(staging.path)) - before):
        staging.adopt(name)

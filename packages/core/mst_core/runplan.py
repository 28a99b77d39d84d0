"""The plan of a training run: what headers and files can tell before any process starts. Pure, no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field

from mst_core import (
    checkpoint,
    cluster,
    deepspeed_json,
    families,
    hub,
    lora_sites,
    manifest,
    megatron_names,
    remote,
    resume,
    tensors,
    torch_dist,
    vocabulary,
)
from mst_core.data import render, rows, sources
from mst_core.data.sources import Source
from mst_core.errors import InputError, MissingPackage, SettingsError
from mst_core.parallel.layout import check_layout
from mst_core.runspec import NO_DORA, NO_QLORA, RunSpec
from mst_core.spec import Plan, Result
from mst_core.tensors import TensorRef

SEQ_LENGTH = 1024
"""The longest row where --seq-length says nothing."""

TRAINABLE = ("F32", "BF16", "F16")
OF_A_NODE = ("--node-rank", "--rendezvous", "--rdzv-endpoint")
"""Flags that differ from node to node, or that another launcher makes needless."""


class RunPlan(Plan):
    """What a run will do."""

    model: str
    layout: str
    family: str
    parameters: int
    engine: str
    ranks: int
    layout_of_ranks: str
    trains: str
    lines: int | None
    steps: str
    seq_length: int
    batch: str
    out: str
    sources: list[Source] = Field(exclude=True)
    """What --data and --eval-data are: files that are here."""
    eval_sources: list[Source] = Field(exclude=True)
    nodes: tuple[int, str | None] | None = Field(None, exclude=True)
    """Of --print-launch: how many, and where the first one listens."""

    @property
    def model_dir(self) -> Path:
        """The local directory behind --model."""
        return Path(self.model)

    def instead(self, prog: str, words: list[str]) -> Result | None:
        """The commands of --print-launch."""
        if self.nodes is None:
            return None
        kept, skip = [], False
        for word in words:
            name, given, _ = word.partition("=")
            if not skip and name not in ("--print-launch", *OF_A_NODE):
                kept.append(word)
            skip = name in OF_A_NODE and not given
        count, rendezvous = self.nodes
        text = cluster.commands(prog, kept, count, self.ranks // count, rendezvous)
        return Result(text=text, data={"commands": text.splitlines()})


def plan_run(
    spec: RunSpec, title: str, *, template: bool = True, counted: bool = True, scores: bool = False
) -> RunPlan:
    """``template``: the rows are conversations, so a chat template is needed. ``counted``: a row is a sample, so that
    counting the rows tells the steps. ``scores``: a reward model is trained, which may begin with one.

    Raises SettingsError or InputError for everything that need not wait for the run."""
    if not (spec.dry_run or spec.print_launch):
        _ = spec.place
    _check_reports(spec)
    _check_out(spec)
    if spec.packing and spec.cp > 1:
        raise SettingsError("--packing is not there yet for context parallel ranks", hint="--cp 1, or no --packing")
    model_dir = hub.resolve(spec.model)
    if spec.out.absolute() == model_dir.absolute():
        raise InputError("--out is the model itself", where=spec.out, hint="choose another --out")
    layout = layout_of(model_dir)
    engine = engine_for(spec, layout, model_dir)
    model = check_model(spec, engine, layout, model_dir, scores=scores)
    hf, family = render.tokenizer_dir(model_dir), model.family
    config = tensors.config(hf)
    if spec.lora_rank is not None:
        check_lora(model, spec)
    if spec.add_tokens:
        _check_tokens(spec, layout, model_dir)
    if template and not render.has_template(model_dir):
        raise InputError("its tokenizer has no chat template", where=hf, hint=render.TEMPLATE_HINT)
    data = sources.resolve(spec.data)
    eval_data = sources.resolve(spec.eval_data) if spec.eval_data else []
    limit = int(config.get("max_position_embeddings") or SEQ_LENGTH)
    seq_length = spec.seq_length or min(SEQ_LENGTH, limit)
    if seq_length > limit:
        raise SettingsError(f"--seq-length {spec.seq_length} is beyond the model's {limit} positions")
    checkpoint.check_free(spec.out, 0 if spec.lora_rank else model.parameters * 2)
    lines = _count(spec, data)
    known = (
        f"{spec.total_steps(lines or 0)}"
        if spec.steps or (counted and lines is not None)
        else "known when the rows are read"
    )
    lora = f"LoRA rank {spec.lora_rank} on {', '.join(spec.lora_targets)}"
    what = ("all weights" if spec.lora_rank is None else lora) + (" and new tokens" if spec.add_tokens else "")
    return RunPlan(
        title=title,
        model=str(model_dir),
        layout=layout,
        family=f"{family.name} ({family.architecture})",
        parameters=model.parameters,
        engine=engine,
        ranks=spec.ranks,
        layout_of_ranks=_layout(spec, engine),
        trains=f"{what}, {spec.precision or 'bf16, on a CPU fp32'}",
        lines=lines,
        steps=known + ("" if spec.steps else f" ({spec.epochs or 1:g} epochs, a line being a row)"),
        seq_length=seq_length,
        batch=f"{spec.global_batch} rows a step, {spec.micro_batch} a forward pass",
        out=spec.remote or str(spec.out),
        sources=data,
        eval_sources=eval_data,
        nodes=(spec.nodes, spec.rendezvous) if spec.print_launch else None,
    )


def check_model(spec: RunSpec, engine: str, layout: str, model_dir: Path, *, scores: bool = False) -> families.Model:
    """What its files say. Raises InputError for a directory that the engine cannot hold, and for a reward model unless
    one is wanted (``scores``)."""
    if (model_dir / manifest.NAME).exists():
        manifest.read(model_dir)  # one that was edited is refused now, not after the last step
    model = open_model(model_dir, layout)
    if model.scores and not scores:
        hint = "mst-align --method rm trains one; give the language model that it was made of"
        raise InputError("is a reward model, which gives tokens no probability", where=model_dir, hint=hint)
    if layout == "hf":
        _check_tensors(tensors.headers(model_dir), model, model_dir)
    if engine == "megatron":
        hf, family = render.tokenizer_dir(model_dir), model.family
        groups = family.megatron(tensors.config(hf), str(hf / "config.json"))
        if "softmax_type" in groups["transformer"] or family.carried:
            what = f"the megatron engine does not train {family.architecture} yet (attention sinks, images)"
            raise InputError(what, where=model_dir, hint=f"mst-convert --model {model_dir} --to hf, and --engine plain")
        check_layout(model, spec, model_dir)
    return model


def _layout(spec: RunSpec, engine: str) -> str:
    sizes = {"vp": spec.vp, "cp": spec.cp, "ep": spec.ep, "etp": spec.etp or 1}
    found = [f"tp {spec.tp}", f"pp {spec.pp}", f"dp {spec.dp}"]
    found += [f"{name} {size}" for name, size in sizes.items() if size > 1] + ["sp"] * spec.sp
    if engine == "deepspeed":
        found += [f"{name} {value}" for name, value in deepspeed_json.told(spec).items()]
    return ", ".join(found)


def _check_out(spec: RunSpec) -> None:
    if spec.remote:
        remote.check_out(spec.remote, spec.out, spec.overwrite, spec.resume)
        if spec.resume:
            return
    extends = spec.resume and (spec.out / resume.RUN).is_file()
    checkpoint.check_out(spec.out, spec.overwrite or extends)
    step = resume.stopped_at(spec.out)
    if step is not None and not spec.resume and not spec.overwrite:
        what = f"a run to it was stopped, and step {step} is saved"
        raise InputError(what, where=spec.out, hint="--resume goes on, --overwrite starts again")


def _check_reports(spec: RunSpec) -> None:
    for name in spec.report_to:
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"--report-to {name} needs {name}", hint=f"pip install {name}")


def layout_of(model_dir: Path) -> str:
    """hf or megatron. Raises InputError for anything else, with what it is."""
    if model_dir.name.endswith(".partial"):
        manifest.read(model_dir)
    if model_dir.suffix == ".gguf":
        hint = f"mst-convert --model {model_dir} --to hf --out {model_dir.with_suffix('')}-hf"
        raise InputError("is a GGUF file, not a model to train", where=model_dir, hint=hint)
    if (model_dir / "adapter_config.json").is_file():
        hint = f"merge it first: mst-merge --model BASE --adapter {model_dir} --to hf --out {model_dir}-merged"
        raise InputError("is an adapter, not a model", where=model_dir, hint=hint)
    if torch_dist.is_megatron(model_dir):
        if not (model_dir / "hf" / "config.json").is_file():
            raise InputError("has no hf/config.json, so its family and tokenizer are unknown", where=model_dir)
        if not (model_dir / manifest.NAME).exists():
            to_hf = f"mst-convert --model {model_dir} --to hf --hf-config {model_dir / 'hf'} --out {model_dir}-hf"
            what = "has no mst.json: it was not made by an mst tool, so its output could not name its base"
            raise InputError(what, where=model_dir, hint=f"{to_hf}, and train that")
        return "megatron"
    if (model_dir / "config.json").is_file():
        return "hf"
    raise InputError("is no model: neither config.json nor latest_checkpointed_iteration.txt", where=model_dir)


def open_model(model_dir: Path, layout: str) -> families.Model:
    """What its configuration and its tensors' names say. InputError for an architecture that is not known."""
    hf = model_dir / "hf" if layout == "megatron" else model_dir
    config, where = tensors.config(hf), str(hf / "config.json")
    family = families.family_for(config, where)
    if layout == "megatron":
        stored = torch_dist.metadata(torch_dist.checkpoint_dir(model_dir))
        return megatron_names.model_of(family, config, stored, where)
    return family.model(config, where, names=tensors.headers(model_dir))


def engine_for(spec: RunSpec, layout: str, model_dir: Path) -> str:
    """The engine in effect. Raises InputError where the directory is not the one it eats."""
    engine = {"hf": "plain", "megatron": "megatron"}[layout] if spec.engine == "auto" else spec.engine
    if engine != "megatron" and layout == "megatron":
        hint = f"mst-convert --model {model_dir} --to hf --out {model_dir}-hf, or --engine megatron"
        raise InputError(f"is a {layout} directory, which the {engine} engine does not eat", where=model_dir, hint=hint)
    if engine != "megatron" and spec.needs_megatron:
        what = f"is a Hugging Face directory, which the {engine} engine trains; {spec.needs_megatron[0]} needs megatron"
        raise InputError(what, where=model_dir, hint="--engine megatron")
    if spec.qlora and (reason := NO_QLORA.get(engine)):
        raise InputError(f"--qlora: {reason}", where=model_dir)
    if engine == "megatron" and spec.lora_dora:
        raise InputError(f"--lora-dora: {NO_DORA}", where=model_dir)
    if engine != "plain" and spec.compile:
        what = f"is a {layout} directory, which the {engine} engine trains; --compile is for the plain one"
        raise InputError(what, where=model_dir, hint="without --compile")
    if engine == "plain" and spec.ranks > 1:
        what = "is a Hugging Face directory, and the plain engine is one process"
        raise InputError(what, where=model_dir, hint="--engine fsdp, deepspeed or megatron")
    return engine


def _count(spec: RunSpec, data: Sequence[Source]) -> int | None:
    """Rows of an epoch, bad ones included; None where only reading them tells."""
    if spec.num_samples is not None:
        return spec.num_samples
    counts = [rows.count(source.files) for source in data]
    held = [
        count if not source.first else min(count, source.first)
        for source, count in zip(data, counts, strict=True)
        if count is not None
    ]
    return sum(held) if len(held) == len(counts) else None


def _check_tensors(found: Mapping[str, TensorRef], model: families.Model, where: Path) -> None:
    """Every tensor that the config needs is there, of its shape and a plain dtype, and none that it does not know."""
    wanted = {spec.name: spec.shape for spec in model.hf_tensors()}
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise InputError(f"lacks {len(missing)} tensors that its config needs: {_some(missing)}", where=where)
    spare = model.duplicates().keys()
    unknown = sorted(
        name for name in found.keys() - wanted.keys() - spare if not model.family.is_ignored(name, model.dims)
    )
    if unknown:
        raise InputError(f"holds {len(unknown)} tensors that its config does not know: {_some(unknown)}", where=where)
    for name, shape in wanted.items():
        ref = found[name]
        if tuple(ref.shape) != tuple(shape):
            raise InputError(f"{name} is {list(ref.shape)}, the config says {list(shape)}", where=where)
        if ref.dtype not in TRAINABLE:
            what = f"{name} has the dtype {ref.dtype}; weights to train are {', '.join(TRAINABLE)}"
            raise InputError(what, where=where, hint="give the unquantised model")


def check_lora(model: families.Model, spec: RunSpec) -> list[lora_sites.Site]:
    """The sites of --lora-targets. SettingsError for a name that no layer has, and for what a site cannot have."""
    found = lora_sites.chosen(model, spec.lora_targets)
    if spec.qlora and "experts" in model.dims.more:
        what = "--qlora: bitsandbytes keeps linear layers in 4 bits, not the parameters that hold all experts"
        raise SettingsError(what, hint="train the adapter without --qlora, on ranks of --engine megatron --ep")
    if spec.lora_dora and any(site.parameter for site in found):
        layers = dict.fromkeys(site.name.rpartition(".")[2] for site in lora_sites.sites(model) if not site.parameter)
        what = "--lora-dora: PEFT has no DoRA for the layers of experts and those beside them"
        raise SettingsError(what, hint=f"--lora-targets {','.join(layers)}")
    return found


def _check_tokens(spec: RunSpec, layout: str, model_dir: Path) -> None:
    """--add-tokens, as far as files tell."""
    tokens = vocabulary.asked(spec.add_tokens)
    if layout == "megatron":
        to = f"{model_dir}-hf"
        hint = f"mst-convert --model {model_dir} --to hf --out {to}, and --model {to} --engine megatron"
        raise InputError("--add-tokens grows Hugging Face directories only", where=model_dir, hint=hint)
    vocabulary.check(tokens, model_dir)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")

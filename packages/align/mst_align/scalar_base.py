"""A language model with a scalar head in the place of its vocabulary's: what mst-align head makes, and --method rm
begins with.

A directory like any other, made tensor by tensor (by --method rm once, in --cache), so that every engine trains and
writes it as it does any model. The head starts as N(0, 1 / (hidden + 1)) (Stiennon et al. 2020, arXiv 2009.01325), of
the seed alone. From zero, which would make the first loss ln 2, SmolLM2 learnt next to nothing in 64 steps: what the
rest of the model learns goes through the head, whose direction was noise.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from mst_align.head import HeadPlan, HeadSpec
from mst_core import checkpoint, console, families, manifest, tensors
from mst_core.checkpoint import TOKENIZER_FILES, Staging
from mst_core.data.render import load_tokenizer
from mst_core.engine import grow
from mst_core.errors import InputError
from mst_core.runplan import RunPlan, open_model
from mst_core.runspec import RunSpec
from mst_core.spec import Result

HEAD = "score.weight"
PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def prepared[P: RunPlan](spec: RunSpec, plan: P) -> P:
    """The plan of training the model with a scalar head, which is made if the cache has none."""
    if open_model(plan.model_dir, plan.layout).scores:
        return plan
    base = manifest.identify(plan.model_dir)
    made = grow.cached(
        spec.cache, "reward", [base.id, spec.seed], lambda staging: _make(staging, plan.model_dir, base, spec.seed)
    )
    return plan.model_copy(update={"model": str(made)})


def work(spec: HeadSpec, plan: HeadPlan) -> Result:
    """mst-align head."""
    model_dir = Path(plan.model)
    base = manifest.identify(model_dir)
    with checkpoint.stage(spec.out, spec.overwrite) as staging:
        made = _make(staging, model_dir, base, spec.seed)
    return Result(text=str(spec.out), data={"out": str(spec.out), "id": made.id})


def _make(staging: Staging, model_dir: Path, base: manifest.Manifest, seed: int) -> manifest.Manifest:
    config, stored = tensors.config(model_dir), tensors.headers(model_dir)
    family = families.family_for(config, model_dir)
    pad, token = _padding(load_tokenizer(model_dir), model_dir)
    config = {
        **{name: value for name, value in config.items() if name != "num_labels"},
        "architectures": [family.reward],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad,
        "tie_word_embeddings": False,
    }
    model = family.model(config, model_dir, names=stored)
    kept = [stored[spec.name] for spec in model.hf_tensors() if spec.name != HEAD]
    dtype = kept[0].dtype
    shape = (1, model.dims.hidden)
    writer = tensors.write_hf(staging, [*((ref.name, ref.dtype, ref.shape) for ref in kept), (HEAD, dtype, shape)])
    for ref in kept:
        writer.put(ref.name, tensors.read(ref))
    start = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[1] + 1)
    writer.put(HEAD, start.to(tensors.torch_dtype(dtype)))
    writer.finish()
    staging.write("config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    for name in TOKENIZER_FILES:
        path = model_dir / name
        if not path.is_file():
            continue
        if name in ("tokenizer_config.json", "special_tokens_map.json"):
            told = {**tensors.read_json(path), "pad_token": token}
            staging.write(name, json.dumps(told, indent=2, ensure_ascii=False) + "\n")
        else:
            staging.copy(path, name)
    made = grow.commit(staging, model, base, model_dir, "mst-align head", {"seed": seed})
    console.say(f"a head of one score in the place of the vocabulary's; rows are padded with {token}")
    return made


def _padding(tokenizer: Any, where: Path) -> tuple[int, str]:
    """The token that pads. transformers reads the score at the last token that is not it: no conversation may end in
    it, as many do where the end of a turn pads too."""
    text = tokenizer.apply_chat_template(PROBE, tokenize=False)
    used = set(tokenizer(text, add_special_tokens=False)["input_ids"]) | {tokenizer.bos_token_id}
    special = [number for number, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    for number in (tokenizer.pad_token_id, tokenizer.unk_token_id, *special):
        if number is not None and number not in used:
            return number, str(tokenizer.convert_ids_to_tokens(number))
    raise InputError(
        "its tokenizer has no token to pad with that no conversation has",
        where=where,
        hint="a pad_token of its own, as a special token of the tokenizer",
    )

"""The plain engine against torch and transformers by hand, and PEFT on what it writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mst_align.methods import choose
from mst_align.pairs import objective as of_pairs
from mst_core.checkpoint import stage
from mst_core.data import pack
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch
from mst_core.errors import InputError
from mst_core.runspec import RunSpec
from mst_train.objective import SFT
from tests.convert.test_adapters import convert
from tests.oracle.test_merge_peft import merge


def spec_of(**settings: Any) -> RunSpec:
    fields = {"precision": "fp32", "lr": 1e-3, "weight_decay": 0.1, "micro_batch": 2, **settings}
    return RunSpec(model="m", data=(Path("d"),), out=Path("o"), **fields)


def units_of(count: int, rows: int = 1) -> list[loop.Unit]:
    generator = torch.Generator().manual_seed(5)

    def sample() -> Sample:
        length = int(torch.randint(6, 14, (1,), generator=generator))
        tokens = torch.randint(0, 330, (length,), generator=generator).tolist()
        return Sample(tokens, [0, 0, 0] + [1] * (length - 3))

    return [tuple(sample() for _ in range(rows)) for _ in range(count)]


def saved(engine: PlainEngine, out: Path) -> Path:
    with stage(out) as staging:
        engine.save(staging)
        staging.commit(kind="model", layout="hf", tool="test", settings={})
    return out


def theirs_of(units: list[loop.Unit]) -> dict[str, torch.Tensor]:
    """All rows at once, as transformers takes them."""
    whole = loop._collate(units, None)
    labels_BT = whole.tokens_BT.masked_fill(whole.mask_BT == 0, -100)
    attention_BT = (torch.arange(labels_BT.shape[1]) < whole.lengths_B[:, None]).long()
    return {"input_ids": whole.tokens_BT, "attention_mask": attention_BT, "labels": labels_BT}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_three_steps_are_those_of_torch(tiny_hf: Callable[..., Path], family: str) -> None:
    """transformers' own loss on all rows at once, torch's clipping and AdamW, matrices decayed only."""
    spec, units = spec_of(clip_grad=0.5), units_of(8)
    engine = PlainEngine(spec, tiny_hf(family))
    model = AutoModelForCausalLM.from_pretrained(tiny_hf(family), dtype=torch.float32)
    model.get_input_embeddings().padding_idx = None
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    whole = theirs_of(units)
    for _ in range(3):
        found = engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
        optimizer.zero_grad()
        loss = model(**whole).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        assert found["loss"] == pytest.approx(float(loss), abs=1e-5)
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert norm > 0.5  # so clipping was at work


LORA = {"recompute": "full", "lora_rank": 4, "packing": True}


@pytest.mark.parametrize("more", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["all", "lora, in a row"])
def test_compiled_steps_are_the_same(tiny_hf: Callable[..., Path], more: dict[str, Any]) -> None:
    """Also where lengths change, and for packed rows."""
    units = units_of(8)
    packed = [(row,) for row in pack.Packed([unit[0] for unit in units], [[0, 1, 2], [3, 4], [5, 6, 7]])]
    found = []
    for compiles in (False, True):
        spec = spec_of(compile=compiles, **more)
        engine = PlainEngine(spec, tiny_hf("llama", num_hidden_layers=2))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        steps = (units, units[:4], units[2:6], packed[:2])
        found.append(
            [engine.step(loop.micro_batches(step, engine, spec, None), SFT, spec.lr)["loss"] for step in steps]
        )
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) is compiles
    assert found[1] == pytest.approx(found[0], abs=1e-5)


def test_logits_are_made_for_learnt_tokens_only(tiny_hf: Callable[..., Path]) -> None:
    """In a step, and where a batch is scored."""
    spec, units = spec_of(), units_of(4)
    engine = PlainEngine(spec, tiny_hf("qwen2"))
    shapes: list[tuple[int, ...]] = []
    engine.head.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape)))
    batches = loop.micro_batches(units, engine, spec, None)
    engine.step(batches, SFT, spec.lr)
    assert shapes == [(1, int(batch.mask_BT.sum()), 330) for batch in batches]
    again, shapes[:] = list(shapes), []
    for batch in batches:
        engine.score(batch)
    assert shapes == again


def test_padding_is_not_seen(tiny_hf: Callable[..., Path]) -> None:
    engine = PlainEngine(spec_of(), tiny_hf("llama"))
    units = units_of(4)
    together = engine.score(loop._collate(units, None))
    for row, unit in enumerate(units):
        alone = engine.score(loop._collate([unit], None))[0]
        assert (together[row, : len(alone)] - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_untouched_bf16_model_comes_back_bit_equal(
    tiny_hf: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Names, dtypes and tied heads as they were; configuration and tokenizer byte for byte."""
    source = tiny_hf(family, dtype="bfloat16")
    out = saved(PlainEngine(spec_of(), source), tmp_path / "out")
    first, second = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype == torch.bfloat16
        assert torch.equal(tensor, second[name]), name
    for path in source.iterdir():
        assert (out / path.name).is_file(), path.name
        if path.suffix in (".json", ".jinja"):
            assert path.read_bytes() == (out / path.name).read_bytes()


def test_what_was_trained_is_what_comes_out(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    """A tied model that ships its head: both are written, equal, and the directory scores as the engine did."""
    model = tmp_path / "model"
    shutil.copytree(tiny_hf("qwen2"), model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    spec, units = spec_of(), units_of(4)
    engine = PlainEngine(spec, model)
    engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
    out = saved(engine, tmp_path / "out")
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert not torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])
    batch = loop._collate(units, None)
    again = PlainEngine(spec_of(), out)
    assert (again.score(batch) - engine.score(batch)).abs().max() <= 1e-5


def test_a_tensor_that_would_be_lost_is_refused_before_the_run(tiny_hf: Callable[..., Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_hf("llama"), model)
    tensors = load_file(model / "model.safetensors")
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tensors, **constant}, model / "model.safetensors", metadata={"format": "pt"})
    out = saved(PlainEngine(spec_of(), model), tmp_path / "out")
    assert load_file(out / "model.safetensors").keys() == tensors.keys()
    save_file({**tensors, "model.extra": torch.ones(8)}, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.extra is not a parameter of LlamaForCausalLM"):
        PlainEngine(spec_of(), model)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen2", {}),
        ("qwen2", {"lora_targets": ("q_proj", "down_proj")}),
        ("qwen2", {"lora_rslora": True}),
        ("qwen2", {"lora_dora": True}),
        ("llama", {"lora_dora": True, "lora_rslora": True, "lora_targets": ("v_proj", "up_proj")}),
    ],
)
def test_peft_reads_and_merges_the_adapter(
    tiny_hf: Callable[..., Path], tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    """So does mst-merge."""
    model = tiny_hf(family)
    spec, pairs = spec_of(lora_rank=4, lora_alpha=12.0, lr=5e-3, **more), units_of(4, 2)
    engine = PlainEngine(spec, model)
    objective = of_pairs(choose("dpo", {"beta": 0.5}))
    references = loop.refer(engine, objective, pairs, (), spec).logp_NR
    for _ in range(3):
        engine.step(loop.micro_batches(pairs, engine, spec, references), objective, spec.lr)
    out = saved(engine, tmp_path / "adapter")
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == (3 if spec.lora_dora else 2) * 4 * (2 if "lora_targets" in more else 7)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    batch = loop._collate(pairs, None)
    wanted = engine.score(batch)
    assert (wanted - engine.score(batch, reference=True)).abs().max() > 0.1
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out)
    assert (_logp(peft, batch) - wanted).abs().max() <= 1e-5
    scales = {module.scaling["default"] for module in peft.modules() if hasattr(module, "lora_A")}
    assert scales == {6.0 if spec.lora_rslora else 3.0}
    merge(model, without_manifest(out, tmp_path / "only"), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (_logp(merged, batch) - wanted).abs().max() <= 1e-4
    assert (_logp(peft.merge_and_unload(), batch) - wanted).abs().max() <= 1e-4


def test_dora_starts_at_the_base_and_moves_its_magnitudes(tiny_hf: Callable[..., Path]) -> None:
    spec, units = spec_of(lora_rank=2, lora_dora=True, lr=1e-2), units_of(4)
    engine, model = PlainEngine(spec, tiny_hf("llama")), load_file(tiny_hf("llama") / "model.safetensors")
    magnitudes = {name: p for name, p in engine.trained if "magnitude" in name}
    assert len(magnitudes) == 7 * 4
    name = "model.layers.2.mlp.up_proj"
    one = magnitudes[f"base_model.model.{name}.lora_magnitude_vector.default.weight"]
    norms = model[f"{name}.weight"].norm(dim=1)  # of each output, DoRA's section 4.1
    assert torch.allclose(one, norms, rtol=1e-6)
    batch = loop._collate(units, None)
    assert (engine.score(batch) - engine.score(batch, reference=True)).abs().max() <= 1e-5
    engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
    assert (one - norms).abs().max() > 5e-3
    assert all(p.ndim < 2 for p in engine.optimizer.param_groups[1]["params"])  # not decayed
    assert {id(p) for p in magnitudes.values()} == {id(p) for p in engine.optimizer.param_groups[1]["params"]}


MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**MOE, "num_experts": 4, "head_dim": 32, "decoder_sparse_step": 2, "tie_word_embeddings": False},
    "qwen2_moe": {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_families_whose_names_or_attention_are_their_own(
    tiny_hf: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """Experts that transformers stacks in memory, soft-capped attention: the steps are torch's, the files their own."""
    source = tiny_hf(family, dtype="bfloat16", **EXPERTS[family])
    out = saved(PlainEngine(spec_of(), source), tmp_path / "untouched")
    first, second = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

    spec, units = spec_of(clip_grad=0.0, weight_decay=0.0), units_of(8)
    engine = PlainEngine(spec, source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    model.get_input_embeddings().padding_idx = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    whole = theirs_of(units)
    for _ in range(3):
        found = engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
        optimizer.zero_grad()
        loss = model(**whole).loss
        loss.backward()
        optimizer.step()
        assert found["loss"] == pytest.approx(float(loss), abs=1e-5)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    ours = load_file(saved(engine, tmp_path / "ours") / "model.safetensors")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == torch.bfloat16
        assert (ours[name].float() - tensor.float()).abs().max() <= 1e-2, name
    assert sum(not torch.equal(ours[name], first[name]) for name in ours) > 0.9 * len(ours)


def without_manifest(adapter: Path, out: Path) -> Path:
    """PEFT's two files alone."""
    out.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(adapter / name, out)
    return out


def _logp(model: Any, batch: Batch) -> torch.Tensor:
    """logp_BT of the learnt tokens, by log_softmax of the logits."""
    with torch.no_grad():
        scores_BSV = model(input_ids=batch.tokens_BT).logits[:, :-1].log_softmax(-1)
    picked_BS = scores_BSV.gather(-1, batch.tokens_BT[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros_like(picked_BS[:, :1]), picked_BS], dim=1) * batch.mask_BT


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "mixtral", "phi3"])
def test_adapters_of_experts_and_fused_layers_are_read_by_all(
    tiny_hf: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    """PEFT, mst-merge, and mst-convert adapter: to a bridge's checkpoint and back it merges to the same model."""
    model = tiny_hf(family, **EXPERTS.get(family, {}))
    spec, units = spec_of(lora_rank=4, lr=5e-3), units_of(8)
    engine = PlainEngine(spec, model)
    for _ in range(3):
        engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
    out = without_manifest(saved(engine, tmp_path / "adapter"), tmp_path / "only")
    batch = loop._collate(units, None)
    wanted = engine.score(batch)
    read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out)
    assert (_logp(read, batch) - wanted).abs().max() <= 1e-5
    merged = merge(model, out, tmp_path / "merged")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert (_logp(whole, batch) - wanted).abs().max() <= 1e-4
    convert(model=out, to="megatron-bridge", base=model, out=tmp_path / "bridge")
    convert(model=tmp_path / "bridge", to="peft", out=tmp_path / "back")
    again = merge(model, tmp_path / "back", tmp_path / "again")
    base = load_file(model / "model.safetensors")
    assert all((again[name] - tensor).abs().max() <= 1e-6 for name, tensor in merged.items())
    kept = (name for name, tensor in merged.items() if torch.equal(tensor, base[name]))
    others = ("norm", "embed", "lm_head", "gate.weight", "bias")  # no linear layers of the decoder
    assert all(any(other in name for other in others) for name in kept)

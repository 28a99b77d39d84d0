"""The plain engine against torch and transformers by hand, and PEFT on what it writes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mst_align.losses import dpo_objective
from mst_core.checkpoint import stage
from mst_core.data import pack
from mst_core.data.render import Sample
from mst_core.engine import loop
from mst_core.engine.plain import PlainEngine
from mst_core.engine.seam import Batch
from mst_core.errors import InputError
from mst_core.runspec import RunSpec
from mst_train.objective import SFT


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
    whole = loop._collate(units, None)
    labels_BT = whole.tokens_BT.masked_fill(whole.mask_BT == 0, -100)
    attention_BT = (torch.arange(labels_BT.shape[1]) < whole.lengths_B[:, None]).long()
    for _ in range(3):
        found = engine.step(loop.micro_batches(units, engine, spec, None), SFT, spec.lr)
        optimizer.zero_grad()
        loss = model(input_ids=whole.tokens_BT, attention_mask=attention_BT, labels=labels_BT).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        assert found["loss"] == pytest.approx(float(loss), abs=1e-5)
        assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert norm > 0.5  # so clipping was at work


LORA = {"recompute": "full", "lora_rank": 4}


@pytest.mark.parametrize("more", [{}, pytest.param(LORA, marks=pytest.mark.slow)], ids=["all", "lora, recomputed"])
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
    """And every token has its log-probability where a batch is scored."""
    spec, units = spec_of(), units_of(4)
    engine = PlainEngine(spec, tiny_hf("qwen2"))
    shapes: list[tuple[int, ...]] = []
    engine.head.register_forward_hook(lambda module, given, logits: shapes.append(tuple(logits.shape)))
    batches = loop.micro_batches(units, engine, spec, None)
    engine.step(batches, SFT, spec.lr)
    assert shapes == [(1, int(batch.mask_BT.sum()), 330) for batch in batches]
    shapes.clear()
    engine.score(batches[0])
    assert shapes == [(*batches[0].tokens_BT.shape, 330)]


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


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "down_proj")])
def test_peft_reads_and_merges_the_adapter(
    tiny_hf: Callable[..., Path], tmp_path: Path, targets: tuple[str, ...]
) -> None:
    from peft import PeftModel

    model = tiny_hf("qwen2")
    spec, pairs = spec_of(lora_rank=4, lora_alpha=12.0, lora_targets=targets, lr=5e-3), units_of(4, 2)
    engine = PlainEngine(spec, model)
    objective = dpo_objective(0.5)
    references = loop._references(engine, objective, pairs, spec, "reference")
    for _ in range(3):
        engine.step(loop.micro_batches(pairs, engine, spec, references), objective, spec.lr)
    out = saved(engine, tmp_path / "adapter")
    tensors = load_file(out / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * (7 if targets == ("all-linear",) else 2)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    batch = loop._collate(pairs, None)
    wanted = engine.score(batch)
    assert (wanted - engine.score(batch, reference=True)).abs().max() > 0.1
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), out)
    assert (_logp(peft, batch) - wanted).abs().max() <= 1e-5
    assert (_logp(peft.merge_and_unload(), batch) - wanted).abs().max() <= 1e-4


def _logp(model: Any, batch: Batch) -> torch.Tensor:
    """logp_BT by log_softmax of the logits."""
    with torch.no_grad():
        scores_BSV = model(input_ids=batch.tokens_BT).logits[:, :-1].log_softmax(-1)
    picked_BS = scores_BSV.gather(-1, batch.tokens_BT[:, 1:, None]).squeeze(-1)
    return torch.cat([torch.zeros_like(picked_BS[:, :1]), picked_BS], dim=1)

"""megatron.training's own load_checkpoint on what mst-convert wrote: one torchrun of four ranks serves all tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch import torchrun
from tests.oracle.test_convert_layouts import ROWS, SIZES, convert, make

SHAPE = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 8, "max_position_embeddings": 64,
}  # fmt: skip
REST = {
    "group_query_attention": True, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}  # fmt: skip
WORDS = [word for name, value in SHAPE.items() for word in (f"--{name.replace('_', '-')}", str(value))] + [
    "--group-query-attention", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
    "--untie-embeddings-and-output-weights", "--position-embedding-type", "rope", "--attention-dropout", "0.0",
    "--hidden-dropout", "0.0",
]  # fmt: skip
SIZES_OF = {"tp1": (1, 1), "tp2pp2": (2, 2)}
FORMATS = ("torch_dist", "legacy")
RUNS = [
    (f"{layout}, {size}, {how}", layout, size, how)
    for size in SIZES_OF
    for layout in FORMATS
    for how in ("flags", "checkpoint args")
] + [("legacy, tp2pp2, uneven", "legacy", "tp2pp2", "uneven")]
UNEVEN = ["--decoder-first-pipeline-num-layers", "1"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    where = tmp_path_factory.mktemp("training")
    assert SIZES["hidden_size"] == SHAPE["hidden_size"]
    hf = make(where / "hf", "llama")
    dist = convert(model=hf, to="megatron", out=where / "dist", vocab_padding=ROWS, verify="none")
    plan: dict[str, Any] = {"runs": {}}
    for name, layout, size, how in RUNS:
        tp, pp = SIZES_OF[size]
        place = dist
        first = 1 if how == "uneven" else None
        if layout == "legacy" and not (place := where / f"legacy-{size}-{first}").exists():
            convert(
                model=hf, to="megatron-legacy", out=place, spec="local", tp=tp, pp=pp, first_stage_layers=first,
                vocab_padding=ROWS // tp, verify="none",
            )  # fmt: skip
        words = [
            "--load",
            str(place),
            "--tensor-model-parallel-size",
            str(tp),
            "--pipeline-model-parallel-size",
            str(pp),
        ]
        words += ["--make-vocab-size-divisible-by", str(ROWS // tp), "--global-batch-size", "4"]
        words += ["--ckpt-format", "torch" if layout == "legacy" else "torch_dist"]
        words += {"flags": WORDS, "uneven": WORDS + UNEVEN}.get(how, ["--use-checkpoint-args"])
        plan["runs"][name] = {"hf": str(hf), "words": words, "asked": [*SHAPE, *REST]}
    return torchrun("tests.oracle.convert_training_ranks", plan, where, timeout=400, CUDA_DEVICE_MAX_CONNECTIONS="1")


@pytest.mark.parametrize("name", [name for name, *_ in RUNS])
def test_load_checkpoint_loads_strictly_and_bit_for_bit(ran: list[dict[str, Any]], name: str) -> None:
    for rank in ran:
        found = rank[name]
        assert found["wrong"] == []
        assert found["tensors"] > 6
        assert found["strict"] == ["True"]  # Megatron-LM falls back to strict=False and says "successfully loaded"
        assert found["iteration"] == 0
        assert found["rows"] == ROWS


@pytest.mark.parametrize("name", [name for name, *_ in RUNS])
def test_arguments_are_those_of_the_model(ran: list[dict[str, Any]], name: str) -> None:
    assert ran[0][name]["args"] == {**SHAPE, **REST}

"""Quantised Hugging Face sources: what comes out is what transformers makes of them, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.convert.test_layouts import CONFIGS, SIZES, convert, same
from tests.convert.test_merge import make_adapter, merge
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mst_convert import dequantise
from mst_convert import plan as planning
from mst_convert.spec import ConvertSpec
from mst_core import manifest
from mst_core.blocks import Array, Coded, Place
from mst_core.errors import InputError
from mst_core.families import family_for

GPT_OSS: dict[str, Any] = {**SIZES, **CONFIGS["gpt-oss"], "hidden_size": 64, "intermediate_size": 96}
DEEPSEEK: dict[str, Any] = {
    **SIZES, **CONFIGS["deepseek-v3"], "hidden_size": 200, "intermediate_size": 256, "moe_intermediate_size": 136,
    "q_lora_rank": 128, "kv_lora_rank": 130, "n_shared_experts": 1,
}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
KEPT = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "layernorm.weight", "gate.weight", "correction_bias")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def save(directory: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def two(tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], quantise: Callable[..., Any]) -> list[Path]:
    """A quantised directory, and the plain one that transformers would make of it."""
    generator = torch.Generator().manual_seed(3)
    coded: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for spec in family_for(config).model(config).hf_tensors():
        made = quantise(spec.name, spec.shape, generator)
        if made is None:
            tensor = torch.randn(spec.shape, generator=generator)
            plain[spec.name] = tensor if spec.name.endswith("correction_bias") else tensor.bfloat16()
            coded[spec.name] = plain[spec.name]
        else:
            parts, plain[spec.name] = made
            coded |= parts
    return [
        save(tmp_path / "quantised", {**config, "quantization_config": settings}, coded),
        save(tmp_path / "plain", config, plain),
    ]


def mxfp4(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Any:
    if not name.endswith(("gate_up_proj", "down_proj")):
        return None
    experts, columns, rows = shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


def fp8(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Any:
    if name.endswith(KEPT):
        return None
    weight = (torch.randn(shape, generator=generator) * 100).to(torch.float8_e4m3fn)
    scales = torch.rand([-(-size // 128) for size in shape], generator=generator) / 300
    plain = _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32).bfloat16()
    return {name: weight, f"{name}_scale_inv": scales}, plain


MAKE: dict[str, Callable[[Path], list[Path]]] = {
    "mxfp4": lambda directory: two(directory, GPT_OSS, MXFP4, mxfp4),
    "fp8": lambda directory: two(directory, DEEPSEEK, FP8, fp8),
}


# --- the arithmetic ------------------------------------------------------------------------------------------------


def decoded(file: Path, array: Array, start: int = 0, nbytes: int | None = None) -> torch.Tensor:
    data = bytearray(array.nbytes if nbytes is None else nbytes)

    def read(path: Path, offset: int, into: memoryview) -> None:
        into[:] = path.read_bytes()[offset : offset + len(into)]

    coded, place = array.coded, array.place
    assert coded is not None
    assert place is not None
    dequantise.decode(array, coded, place, start, memoryview(data), read)
    return torch.frombuffer(data, dtype=torch.bfloat16)


def stored(file: Path, codes: torch.Tensor, scales: torch.Tensor, code: str, block: tuple[int, int]) -> Array:
    raw, more = (tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in (codes, scales))
    file.write_bytes(b"head" + raw + more)
    rows, columns = (codes.numel() // 16 // scales.shape[-1], scales.shape[-1] * 32) if code == "mxfp4" else codes.shape
    dtype = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}[scales.dtype]
    how = Coded(code, Place(file, 4 + len(raw)), dtype, block)
    return Array("x", "BF16", rows, columns, Place(file, 4), coded=how)


def test_mxfp4_every_scale_and_byte(tmp_path: Path) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).repeat(1, 1, 16)
    ours = decoded(tmp_path / "x", stored(tmp_path / "x", blocks, scales, "mxfp4", (1, 32))).reshape(256, 512)
    theirs = convert_moe_packed_tensors(blocks, scales)[0].T.contiguous()
    assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (4, 8), (130, 200), (1, 129), (576, 3000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_every_shape_and_any_range_of_it(tmp_path: Path, shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes[(codes & 127) == 127] = 0  # not a number
    weight = codes.view(torch.float8_e4m3fn)
    grid = [-(-size // 128) for size in shape]
    scales = (torch.rand(grid, generator=generator) * torch.tensor(2.0) ** -9).to(dtype)
    array = stored(tmp_path / "x", weight, scales, "fp8", (128, 128))
    theirs = _dequantize_fp8_weight(weight, scales, [128, 128], torch.float32).bfloat16().reshape(-1)
    assert torch.equal(bits(decoded(tmp_path / "x", array)), bits(theirs))
    each = torch.tensor([[scales[r // 128, c // 128] for c in range(shape[1])] for r in range(min(shape[0], 140))])
    formula = (weight[:140].float() * each.float()).bfloat16().reshape(-1)
    assert torch.equal(bits(formula), bits(theirs[: formula.numel()]))
    if not shape[0] % 128 and not shape[1] % 128:  # it knows no edges
        known = Fp8Dequantize(None)._dequantize_one(weight, scales, output_dtype=torch.bfloat16).reshape(-1)
        assert torch.equal(bits(known), bits(theirs))
    for start, count in ((0, 1), (3, 7), (theirs.numel() // 3, theirs.numel() // 2), (theirs.numel() - 1, 1)):
        part = decoded(tmp_path / "x", array, 2 * start, 2 * min(count, theirs.numel() - start))
        assert torch.equal(bits(part), bits(theirs[start : start + part.numel()]))


@pytest.mark.parametrize("start", [0, 1, 31, 64, 1000])
def test_mxfp4_any_range(tmp_path: Path, start: int) -> None:
    blocks, scales = mxfp4("down_proj", (3, 64, 10), torch.Generator().manual_seed(2))[0].values()
    array = stored(tmp_path / "x", blocks, scales, "mxfp4", (1, 32))
    whole = convert_moe_packed_tensors(blocks, scales).transpose(1, 2).reshape(-1)
    assert torch.equal(bits(decoded(tmp_path / "x", array, 2 * start, 2 * 333)), bits(whole[start : start + 333]))


def test_a_band_is_all_that_is_in_memory(tmp_path: Path) -> None:
    weight = torch.ones(1024, 1024).to(torch.float8_e4m3fn)
    array = stored(tmp_path / "x", weight, torch.ones(8, 8), "fp8", (128, 128))
    sizes: list[int] = []

    def read(path: Path, offset: int, into: memoryview) -> None:
        sizes.append(len(into))
        into[:] = bytes(len(into))

    coded, place = array.coded, array.place
    assert coded is not None
    assert place is not None
    dequantise.decode(array, coded, place, 0, memoryview(bytearray(array.nbytes)), read)
    assert max(sizes) == dequantise.BAND


# --- conversions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", MAKE)
@pytest.mark.parametrize("form", ["megatron", "megatron-legacy"])
def test_converts_as_the_plain_model_would(tmp_path: Path, method: str, form: str) -> None:
    quantised, plain = MAKE[method](tmp_path)
    settings: dict[str, Any] = {"to": form, **({"ep": 2} if form == "megatron-legacy" else {})}
    ours = convert(model=quantised, out=tmp_path / "ours", verify="roundtrip", **settings)
    theirs = convert(model=plain, out=tmp_path / "theirs", **settings)
    digests = [
        {f.path: f.blake3 for f in manifest.read(out).files if "config.json" not in f.path} for out in (ours, theirs)
    ]
    assert digests[0] == digests[1]
    config = json.loads((ours / "hf" / "config.json").read_text())
    assert config == json.loads((plain / "config.json").read_text())
    assert [parent.lossless for out in (ours, theirs) for parent in manifest.read(out).parents] == [False, True]
    same(plain, convert(model=ours, to="hf", out=tmp_path / "back"))


def test_scales_in_another_shard(tmp_path: Path) -> None:
    quantised, plain = MAKE["fp8"](tmp_path)
    state = load_file(quantised / "model.safetensors")
    (quantised / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + name.endswith('_scale_inv')}-of-00002.safetensors" for name in state}
    for shard in set(shards.values()):
        save_file({name: state[name] for name in state if shards[name] == shard}, quantised / shard)
    (quantised / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    ours = convert(model=quantised, to="megatron", out=tmp_path / "ours")
    same(plain, convert(model=ours, to="hf", out=tmp_path / "back"))


@pytest.mark.parametrize(("method", "count"), [("mxfp4", 8), ("fp8", 68)])
def test_the_plan_says_so(tmp_path: Path, method: str, count: int) -> None:
    quantised, _ = MAKE[method](tmp_path)
    plan = planning.plan(ConvertSpec(model=str(quantised), to="megatron", out=tmp_path / "out"))
    assert not plan.lossless
    rows = dict(plan.rows())
    assert rows["lossless"] == "no"
    assert rows["dequantised"].startswith(f"{count} tensors from {method} to bf16")
    held = load_file(quantised / "model.safetensors")
    assert plan.tensors_in == len(held)
    assert count == sum(name.endswith(("_blocks", "_scale_inv")) for name in held)


@pytest.mark.parametrize("method", MAKE)
def test_a_dtype_applies_after_it(tmp_path: Path, method: str) -> None:
    quantised, plain = MAKE[method](tmp_path)
    ours = convert(model=quantised, to="megatron", out=tmp_path / "ours", dtype="fp32")
    back = load_file(convert(model=ours, to="hf", out=tmp_path / "back") / "model.safetensors")
    for name, tensor in load_file(plain / "model.safetensors").items():
        assert torch.equal(back[name], tensor.float()), name


@pytest.mark.parametrize("method", MAKE)
def test_merges_as_the_plain_base_would(tmp_path: Path, method: str) -> None:
    quantised, plain = MAKE[method](tmp_path)
    kinds = ["o_proj"] if method == "fp8" else ["q_proj", "v_proj"]
    lora = make_adapter(tmp_path / "lora", plain, target_modules=kinds)
    for base, out in ((quantised, "ours"), (plain, "theirs")):
        merge(model=base, adapter=lora, out=tmp_path / out)
    same(tmp_path / "ours", tmp_path / "theirs")
    configs = [json.loads((tmp_path / out / "config.json").read_text()) for out in ("ours", "theirs")]
    assert configs[0] == configs[1]


# --- refusals ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
PROJ = "model.layers.0.mlp.experts.down_proj"
UP = "model.layers.0.self_attn.o_proj.weight"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "no scales": ("mxfp4", lambda t, c: t.pop(PROJ + "_scales"), r"down_proj_scales: missing, expected \[4, 64, 3\]"),
    "no blocks": ("mxfp4", lambda t, c: t.pop(PROJ + "_blocks"), "down_proj_blocks: missing, but there is"),
    "scales' shape": (
        "mxfp4",
        lambda t, c: t.update({PROJ + "_scales": t[PROJ + "_scales"][:, :, :2].contiguous()}),
        r"down_proj_scales: \[4, 64, 2\], expected \[4, 64, 3\]",
    ),
    "scales' dtype": (
        "mxfp4",
        lambda t, c: t.update({PROJ + "_scales": t[PROJ + "_scales"].float()}),
        "down_proj_scales: has the dtype F32, expected U8",
    ),
    "blocks' shape": (
        "mxfp4",
        lambda t, c: t.update({PROJ + "_blocks": t[PROJ + "_blocks"].flatten(2)}),
        r"down_proj_blocks: U8 \[4, 64, 48\], expected U8 \[experts, out, groups, 16\]",
    ),
    "another size": (
        "mxfp4",
        lambda t, c: t.update({f"{PROJ}_{k}": t[f"{PROJ}_{k}"][:3].contiguous() for k in ("blocks", "scales")}),
        r"down_proj: \[3, 96, 64\], expected \[4, 96, 64\]",
    ),
    "twice": ("mxfp4", lambda t, c: t.update({PROJ: torch.zeros(4, 96, 64)}), "is there quantised and plain"),
    "blocks, not said": ("mxfp4", lambda t, c: c.pop("quantization_config"), "down_proj_blocks: not known"),
    "said, no blocks": (
        "mxfp4",
        lambda t, c: [t.pop(name) for name in list(t) if name.endswith(("_blocks", "_scales"))],
        "says that the weights are quantised .mxfp4., and none are",
    ),
    "no scale": ("fp8", lambda t, c: t.pop(UP + "_scale_inv"), r"o_proj.weight_scale_inv: missing, expected \[2, 1\]"),
    "scale's shape": (
        "fp8",
        lambda t, c: t.update({UP + "_scale_inv": torch.ones(1, 1)}),
        r"o_proj.weight_scale_inv: \[1, 1\], expected \[2, 1\]",
    ),
    "scale's dtype": (
        "fp8",
        lambda t, c: t.update({UP + "_scale_inv": torch.ones(2, 1, dtype=torch.uint8)}),
        "o_proj.weight_scale_inv: has the dtype U8, expected BF16 or F16 or F32",
    ),
    "scaled, plain": ("fp8", lambda t, c: t.update({UP: t[UP].bfloat16()}), "weight_scale_inv: scales no tensor"),
    "e5m2": ("fp8", lambda t, c: t.update({UP: t[UP].to(torch.float8_e5m2)}), "has the dtype F8_E5M2"),
    "fp8, not said": ("fp8", lambda t, c: c.pop("quantization_config"), "o_proj.weight: has the dtype F8_E4M3"),
    "said, no fp8": (
        "fp8",
        lambda t, c: [t.pop(n) if n.endswith("_inv") else t.update({n: t[n].bfloat16()}) for n in list(t)],
        "says that the weights are quantised .fp8., and none are",
    ),
    "no blocks of fp8": ("fp8", lambda t, c: c["quantization_config"].pop("weight_block_size"), r"quantised \(fp8\)"),
    "blocks of nothing": ("fp8", lambda t, c: c["quantization_config"].update(weight_block_size=[0, 128]), "fp8"),
    "other fp8": ("fp8", lambda t, c: c["quantization_config"].update(fmt="e5m2"), r"quantised \(fp8\)"),
    **{
        method: ("fp8", lambda t, c, m=method: c.update(quantization_config={"quant_method": m}), method)  # type: ignore[misc]
        for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors")
    },
}


@pytest.mark.parametrize("fault", REFUSED)
def test_refused_by_name(tmp_path: Path, fault: str) -> None:
    method, change, words = REFUSED[fault]
    quantised, _ = MAKE[method](tmp_path)
    state, config = load_file(quantised / "model.safetensors"), json.loads((quantised / "config.json").read_text())
    change(state, config)
    save(quantised, config, state)
    with pytest.raises(InputError, match=words):
        planning.plan(ConvertSpec(model=str(quantised), to="megatron", out=tmp_path / "out"))


def test_megatrons_config_must_be_plain(tmp_path: Path) -> None:
    quantised, plain = MAKE["mxfp4"](tmp_path)
    out = convert(model=plain, to="megatron", out=tmp_path / "m")
    (out / "hf" / "config.json").write_bytes((quantised / "config.json").read_bytes())
    with pytest.raises(InputError, match=r"quantised \(mxfp4\), and Megatron's can only be plain"):
        planning.plan(ConvertSpec(model=str(out), to="hf", out=tmp_path / "back"))

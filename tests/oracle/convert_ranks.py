"""One rank of test_convert_megatron.py, under torchrun: real megatron-core, nothing of mst's engines.

    python -m torch.distributed.run --nproc-per-node 4 -m tests.oracle.convert_ranks PLAN.json

For every case and layout: build GPTModel (local spec) from the family's settings with all parameters NaN, load the
converted directory with ``dist_checkpointing.load`` at default strictness, compare every parameter bit for bit with the
slice that the Hugging Face tensors say (written out below without mst's maps), and at TP1 PP1 the logits.
The findings of each rank go to ``OUT/rank-N.json``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LAYOUTS = ((1, 1), (2, 2), (1, 2), (2, 1))


def expected(hf: dict[str, torch.Tensor], model: Any, tp: tuple[int, int], offset: int) -> dict[str, torch.Tensor]:
    """What each parameter of this rank must be. ``tp`` is (rank, size); ``offset`` the first layer of the stage."""
    rank, size = tp
    config = model.config

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(size, 0)[rank]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(size, 1)[rank]

    def vocabulary(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(model.vocab_size, tensor.shape[1])
        padded[: tensor.shape[0]] = tensor
        return rows(padded)

    def fused(prefix: str, kind: str) -> torch.Tensor:
        groups, d = config.num_query_groups, config.kv_channels
        parts = []
        for name, heads in (("q", config.num_attention_heads), ("k", groups), ("v", groups)):
            tensor = hf[f"{prefix}.self_attn.{name}_proj.{kind}"]
            parts.append(tensor.reshape(groups, heads // groups * d, *tensor.shape[1:]))
        whole = torch.cat(parts, 1)
        return rows(whole.reshape(-1, *whole.shape[2:]))

    want: dict[str, torch.Tensor] = {}
    for name, _ in model.named_parameters():
        if name == "embedding.word_embeddings.weight":
            want[name] = vocabulary(hf["model.embed_tokens.weight"])
        elif name == "output_layer.weight":
            want[name] = vocabulary(hf.get("lm_head.weight", hf["model.embed_tokens.weight"]))
        elif name == "decoder.final_layernorm.weight":
            want[name] = hf["model.norm.weight"]
        else:
            _, _, number, rest = name.split(".", 3)
            p = f"model.layers.{int(number) + offset}"
            makers = {
                "input_layernorm.weight": lambda p=p: hf[f"{p}.input_layernorm.weight"],
                "pre_mlp_layernorm.weight": lambda p=p: hf[f"{p}.post_attention_layernorm.weight"],
                "self_attention.linear_qkv.weight": lambda p=p: fused(p, "weight"),
                "self_attention.linear_qkv.bias": lambda p=p: fused(p, "bias"),
                "self_attention.linear_proj.weight": lambda p=p: columns(hf[f"{p}.self_attn.o_proj.weight"]),
                "self_attention.q_layernorm.weight": lambda p=p: hf[f"{p}.self_attn.q_norm.weight"],
                "self_attention.k_layernorm.weight": lambda p=p: hf[f"{p}.self_attn.k_norm.weight"],
                "mlp.linear_fc1.weight": lambda p=p: torch.cat(
                    [rows(hf[f"{p}.mlp.gate_proj.weight"]), rows(hf[f"{p}.mlp.up_proj.weight"])]
                ),
                "mlp.linear_fc2.weight": lambda p=p: columns(hf[f"{p}.mlp.down_proj.weight"]),
            }
            want[name] = makers[rest]()
    return want


def build(settings: dict[str, Any], vocab_rows: int, tp: int, pp: int) -> Any:
    """A GPTModel of this rank's stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    fields = dict(settings["transformer"])
    fields["activation_func"] = getattr(torch.nn.functional, fields["activation_func"])
    config = TransformerConfig(
        **fields,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        attention_softmax_in_fp32=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=fields.get("qk_layernorm", False), normalization="RMSNorm")
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        **{**settings["gpt"], "vocab_size": vocab_rows},
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
    )
    if settings["rope"]:
        rotary = model.rotary_pos_emb
        rotary.inv_freq = rotary._apply_scaling(rotary.inv_freq, **settings["rope"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model.eval()


def run_case(case: dict[str, Any], tp: int, pp: int) -> dict[str, Any]:
    from megatron.core import dist_checkpointing, parallel_state
    from safetensors.torch import load_file

    hf = load_file(case["hf"] + "/model.safetensors")
    model = build(case["settings"], case["vocab_rows"], tp, pp)
    loaded = dist_checkpointing.load(model.sharded_state_dict(), case["megatron"] + "/release")
    model.load_state_dict({k: v for k, v in loaded.items() if k in model.state_dict()})
    stage = parallel_state.get_pipeline_model_parallel_rank()
    offset = stage * case["settings"]["transformer"]["num_layers"] // pp
    want = expected(hf, model, (parallel_state.get_tensor_model_parallel_rank(), tp), offset)
    wrong = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, want[name])]
    found: dict[str, Any] = {"parameters": len(want), "wrong": wrong, "common": sorted(loaded.keys() & {"args"})}
    if (tp, pp) == (1, 1):
        saved = torch.load(case["logits"])
        tokens = saved["tokens"]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        with torch.no_grad():
            logits = model(tokens, positions, None)
        vocab = saved["logits"].shape[-1]
        found["logits"] = (logits[..., :vocab].float() - saved["logits"]).abs().max().item()
    if case.get("save") and (tp, pp) == (2, 2):
        if dist.get_rank() == 0:
            Path(case["save"]).mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(model.sharded_state_dict(), case["save"])
        dist.barrier()
    return found


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    ones = torch.ones
    torch.ones = lambda *a, **k: ones(*a, **{**k, "device": "cpu"})  # type: ignore[assignment]  # causal masks
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    dist.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    get_cuda_rng_tracker().fork = lambda *_: nullcontext()  # no dropout here, so no state to switch

    findings = {}
    for tp, pp in LAYOUTS:
        parallel_state.initialize_model_parallel(tp, pp)
        for name, case in plan["cases"].items():
            findings[f"{name} tp{tp} pp{pp}"] = run_case(case, tp, pp)
        parallel_state.destroy_model_parallel()
    Path(plan["out"], f"rank-{os.environ['RANK']}.json").write_text(json.dumps(findings))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

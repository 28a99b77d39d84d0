"""What a rank of Megatron must hold, from the Hugging Face tensors, written out without mst's maps.

MAPPINGS.md 1.1 to 1.7, 2.1 to 2.7, 2.10, 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


class Slices:
    """The tensors of this rank, of the local spec."""

    def __init__(self, hf: Tensors, config: Any, vocab_rows: int) -> None:
        from megatron.core import parallel_state

        self.hf, self.config, self.vocab_rows = hf, config, vocab_rows
        self.tp = parallel_state.get_tensor_model_parallel_rank()
        self.tp_size = parallel_state.get_tensor_model_parallel_world_size()
        self.ep = parallel_state.get_expert_model_parallel_rank()
        self.ep_size = parallel_state.get_expert_model_parallel_world_size()

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        mine: torch.Tensor = tensor.chunk(self.tp_size, 0)[self.tp]
        return mine

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        mine: torch.Tensor = tensor.chunk(self.tp_size, 1)[self.tp]
        return mine

    def vocabulary(self, tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(self.vocab_rows, tensor.shape[1])
        padded[: tensor.shape[0]] = tensor
        return self.rows(padded)

    def fused_qkv(self, p: str, kind: str) -> torch.Tensor:
        groups, d = self.config.num_query_groups, self.config.kv_channels
        parts = []
        for name, heads in (("q", self.config.num_attention_heads), ("k", groups), ("v", groups)):
            tensor = self.hf[f"{p}.self_attn.{name}_proj.{kind}"]
            parts.append(tensor.reshape(groups, heads // groups * d, *tensor.shape[1:]))
        whole = torch.cat(parts, 1)
        return self.rows(whole.reshape(-1, *whole.shape[2:]))

    def gated(self, p: str, gate: str = "gate_proj", up: str = "up_proj") -> torch.Tensor:
        return torch.cat([self.rows(self.hf[f"{p}.{gate}.weight"]), self.rows(self.hf[f"{p}.{up}.weight"])])

    def of_experts(self) -> Slices:
        """The same with the tensor parallel rank that experts have."""
        from megatron.core import parallel_state

        mine = copy(self)
        mine.tp = parallel_state.get_expert_tensor_parallel_rank()
        mine.tp_size = parallel_state.get_expert_tensor_parallel_world_size()
        return mine

    def expert(self, p: str, local: int, rest: str) -> torch.Tensor:
        number = self.ep * self.config.num_moe_experts // self.ep_size + local
        if f"{p}.mlp.experts.gate_up_proj" in self.hf:  # gpt-oss: transposed, gate and up rows in turn
            both = self.hf[f"{p}.mlp.experts.gate_up_proj"][number].T
            bias = self.hf[f"{p}.mlp.experts.gate_up_proj_bias"][number]
            return {
                "linear_fc1.weight": lambda: torch.cat([self.rows(both[::2]), self.rows(both[1::2])]),
                "linear_fc1.bias": lambda: torch.cat([self.rows(bias[::2]), self.rows(bias[1::2])]),
                "linear_fc2.weight": lambda: self.columns(self.hf[f"{p}.mlp.experts.down_proj"][number].T),
                "linear_fc2.bias": lambda: self.hf[f"{p}.mlp.experts.down_proj_bias"][number],
            }[rest]()
        mixtral = f"{p}.block_sparse_moe.experts.{number}"
        if f"{mixtral}.w1.weight" in self.hf:
            if rest == "linear_fc1.weight":
                return self.gated(mixtral, "w1", "w3")
            return self.columns(self.hf[f"{mixtral}.w2.weight"])
        if rest == "linear_fc1.weight":
            return self.gated(f"{p}.mlp.experts.{number}")
        return self.columns(self.hf[f"{p}.mlp.experts.{number}.down_proj.weight"])

    def one_of(self, *names: str) -> torch.Tensor:
        return next(self.hf[name] for name in names if name in self.hf)

    def __call__(self, name: str, layer: int) -> torch.Tensor:
        """What ``name`` of a state dict must be; ``layer`` is the global number of its layer."""
        hf, p = self.hf, f"model.layers.{layer}"
        if name == "embedding.word_embeddings.weight":
            return self.vocabulary(hf["model.embed_tokens.weight"])
        if name == "output_layer.weight":
            return self.vocabulary(self.one_of("lm_head.weight", "model.embed_tokens.weight"))
        if name in ("decoder.final_layernorm.weight", "decoder.final_norm.weight"):
            return hf["model.norm.weight"]
        rest = name.split(".", 3)[3].removeprefix("mtp_model_layer.")
        if rest.startswith("mlp.experts.local_experts."):
            _, _, _, local, rest = rest.split(".", 4)
            return self.of_experts().expert(p, int(local), rest)
        attention, mlp = f"{p}.self_attn", f"{p}.mlp"
        shared = f"{mlp}.shared_expert" if f"{mlp}.shared_expert_gate.weight" in hf else f"{mlp}.shared_experts"
        gates = (f"{mlp}.gate", f"{p}.block_sparse_moe.gate", f"{mlp}.router")
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "enorm.weight": lambda: hf[f"{p}.enorm.weight"],
            "hnorm.weight": lambda: hf[f"{p}.hnorm.weight"],
            "eh_proj.weight": lambda: self.rows(hf[f"{p}.eh_proj.weight"]),
            "final_layernorm.weight": lambda: hf[f"{p}.shared_head.norm.weight"],
            "input_layernorm.weight": lambda: hf[f"{p}.input_layernorm.weight"],
            "pre_mlp_layernorm.weight": lambda: hf[f"{p}.post_attention_layernorm.weight"],
            "self_attention.linear_qkv.weight": lambda: self.fused_qkv(p, "weight"),
            "self_attention.linear_qkv.bias": lambda: self.fused_qkv(p, "bias"),
            "self_attention.linear_proj.weight": lambda: self.columns(hf[f"{attention}.o_proj.weight"]),
            "self_attention.linear_proj.bias": lambda: hf[f"{attention}.o_proj.bias"],
            "self_attention.q_layernorm.weight": lambda: self.one_of(
                f"{attention}.q_norm.weight", f"{attention}.q_a_layernorm.weight"
            ),
            "self_attention.k_layernorm.weight": lambda: hf[f"{attention}.k_norm.weight"],
            "self_attention.kv_layernorm.weight": lambda: hf[f"{attention}.kv_a_layernorm.weight"],
            "self_attention.linear_q_down_proj.weight": lambda: self.rows(hf[f"{attention}.q_a_proj.weight"]),
            "self_attention.linear_q_up_proj.weight": lambda: self.rows(hf[f"{attention}.q_b_proj.weight"]),
            "self_attention.linear_kv_down_proj.weight": lambda: self.rows(
                hf[f"{attention}.kv_a_proj_with_mqa.weight"]
            ),
            "self_attention.linear_kv_up_proj.weight": lambda: self.rows(hf[f"{attention}.kv_b_proj.weight"]),
            "self_attention.core_attention.softmax_offset": lambda: self.rows(hf[f"{attention}.sinks"]),
            "mlp.linear_fc1.weight": lambda: self.gated(mlp),
            "mlp.linear_fc2.weight": lambda: self.columns(hf[f"{mlp}.down_proj.weight"]),
            "mlp.router.weight": lambda: self.one_of(*(f"{gate}.weight" for gate in gates)),
            "mlp.router.bias": lambda: hf[f"{mlp}.router.bias"],
            "mlp.router.expert_bias": lambda: hf[f"{mlp}.gate.e_score_correction_bias"],
            "mlp.shared_experts.linear_fc1.weight": lambda: self.gated(shared),
            "mlp.shared_experts.linear_fc2.weight": lambda: self.columns(hf[f"{shared}.down_proj.weight"]),
            "mlp.shared_experts.gate_weight": lambda: hf[f"{mlp}.shared_expert_gate.weight"],
        }
        return makers[rest]()

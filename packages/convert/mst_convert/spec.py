"""The settings of mst-convert."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import AliasChoices, ByteSize, Field, model_validator

from mst_core.spec import Spec

STAGES = ("first_stage_layers", "last_stage_layers", "account_for_embedding", "account_for_loss")
"""Settings that make pipeline stages uneven."""
ONLY: dict[str, tuple[str, ...]] = {
    "vocab_padding": ("megatron", "megatron-legacy"),
    "spec": ("megatron", "megatron-legacy"),
    "form": ("megatron",),
    "tp": ("megatron-legacy",),
    "pp": ("megatron-legacy",),
    "vp": ("megatron-legacy",),
    "ep": ("megatron-legacy",),
    "etp": ("megatron-legacy",),
    **dict.fromkeys(STAGES, ("megatron-legacy",)),
    "experts": ("megatron-legacy",),
    "max_shard_size": ("hf", "megatron"),
}
"""Settings that belong to some layouts only."""
HOW = ("hf_config", "part", "workers", "resume", "verify", "logits_threshold")
"""Settings that cannot change a byte of the output."""


class ConvertSpec(Spec):
    """Convert a checkpoint between layouts."""

    model: str = Field(description="a Hugging Face or Megatron directory, a .gguf file, or hf://org/name@revision")
    to: Literal["megatron", "megatron-legacy", "hf"] = Field(
        description="layout of the output: torch_dist, mp_rank_* files, or Hugging Face"
    )
    out: Path = Field(description="the directory to write")
    dtype: Literal["bf16", "fp16", "fp32"] | None = Field(
        None, description="cast the weights (no longer lossless); without it they keep theirs, and a GGUF becomes bf16"
    )
    vocab_padding: int = Field(
        128, ge=1, description="to Megatron: pad the vocabulary with zero rows to a multiple of this"
    )
    spec: Literal["te", "local", "hybrid"] = Field(
        "te", description="to Megatron: whose names: TransformerEngine's spec, the local one, or HybridModel"
    )
    form: Literal["stacked", "per-layer"] | None = Field(
        None, description="--to megatron: layers in one tensor, or each its own; stacked where all layers are alike"
    )
    tp: int = Field(
        1,
        ge=1,
        description="--to megatron-legacy: tensor parallel size",
        validation_alias=AliasChoices("tp", "tensor_model_parallel_size"),
    )
    pp: int = Field(
        1,
        ge=1,
        description="--to megatron-legacy: pipeline parallel size",
        validation_alias=AliasChoices("pp", "pipeline_model_parallel_size"),
    )
    vp: int = Field(
        1,
        ge=1,
        description="--to megatron-legacy: virtual pipeline stages of each rank",
        validation_alias=AliasChoices("vp", "num_virtual_stages_per_pipeline_rank"),
    )
    ep: int = Field(
        1,
        ge=1,
        description="--to megatron-legacy: expert parallel size",
        validation_alias=AliasChoices("ep", "expert_model_parallel_size"),
    )
    etp: int | None = Field(
        None,
        ge=1,
        description="--to megatron-legacy: tensor parallel size of experts (default: --tp)",
        validation_alias=AliasChoices("etp", "expert_tensor_parallel_size"),
    )
    first_stage_layers: int | None = Field(
        None,
        ge=1,
        description="--to megatron-legacy: layers of the first pipeline stage; the others share the rest evenly",
        validation_alias=AliasChoices("first_stage_layers", "decoder_first_pipeline_num_layers"),
    )
    last_stage_layers: int | None = Field(
        None,
        ge=1,
        description="--to megatron-legacy: layers of the last pipeline stage",
        validation_alias=AliasChoices("last_stage_layers", "decoder_last_pipeline_num_layers"),
    )
    account_for_embedding: bool = Field(
        False,
        description="--to megatron-legacy: the embedding takes the place of a layer on the first stage",
        validation_alias=AliasChoices("account_for_embedding", "account_for_embedding_in_pipeline_split"),
    )
    account_for_loss: bool = Field(
        False,
        description="--to megatron-legacy: the loss takes the place of a layer on the last stage",
        validation_alias=AliasChoices("account_for_loss", "account_for_loss_in_pipeline_split"),
    )
    experts: Literal["grouped", "sequential", "legacy-grouped"] = Field(
        "grouped",
        description="--to megatron-legacy: names of experts, TEGroupedMLP's, SequentialMLP's or those of GroupedMLP,"
        " which megatron-core had up to 0.16",
    )
    max_shard_size: ByteSize = Field(
        ByteSize(5_000_000_000), description="largest weight file, as 5GB or 500MB (not of megatron-legacy)"
    )
    hf_config: Path | None = Field(
        None, description="directory with config.json and tokenizer, for a Megatron checkpoint without hf/ in it"
    )
    weights_only: bool = Field(
        False,
        description="leave optimizer state behind; without it torch_dist keeps what another one can hold, and the rest"
        " is refused",
    )
    workers: int = Field(2, ge=1, le=64, description="cores to copy with")
    part: str | None = Field(
        None,
        pattern=r"^[1-9]\d*/[1-9]\d*$",
        description="as 2/4: write every fourth file from the second on. Run all parts, on as many machines as share"
        " the disk; the last one to end makes the output appear",
    )
    resume: bool = Field(False, description="go on with OUT.partial of a conversion that was killed")
    verify: Literal["none", "hash", "roundtrip", "logits"] = Field(
        "hash",
        description="before the output appears: read it back against its hashes; convert it back and compare too; or"
        " run both sides on the CPU and compare their logits too",
    )
    logits_threshold: float = Field(
        1e-4,
        gt=0,
        allow_inf_nan=False,
        description="--verify logits: largest difference, in standard deviations of the logits",
    )

    @model_validator(mode="after")
    def _each_flag_has_its_layout(self) -> Self:
        if self.max_shard_size < 1:
            raise ValueError("--max-shard-size must be at least one byte")
        for field, layouts in ONLY.items():
            if field in self.model_fields_set and getattr(self, field) is not None and self.to not in layouts:
                raise ValueError(f"--{field.replace('_', '-')} belongs to --to {' or '.join(layouts)}")
        if "logits_threshold" in self.model_fields_set and self.verify != "logits":
            raise ValueError("--logits-threshold belongs to --verify logits")
        if self.parts[0] > self.parts[1]:
            raise ValueError(f"--part {self.part}: there is no such part")
        if self.to == "megatron-legacy" and self.spec == "hybrid":
            raise ValueError("--spec hybrid belongs to --to megatron: HybridModel has no legacy checkpoints")
        return self

    @model_validator(mode="after")
    def _sizes_are_megatrons(self) -> Self:
        """What Megatron refuses of parallel sizes, whatever the model."""
        fixed = self.first_stage_layers is not None or self.last_stage_layers is not None
        if self.pp == 1 and (fixed or self.vp > 1):
            raise ValueError("--vp, --first-stage-layers and --last-stage-layers need --pp of 2 or more")
        if fixed and (self.account_for_embedding or self.account_for_loss):
            raise ValueError("--account-for-embedding and --account-for-loss are for stages of equal size")
        if self.tp % self.expert_tp:
            # Ranks of the same tensor and expert rank would hold different parts of experts in one file.
            raise ValueError(
                f"--etp {self.etp} does not divide --tp {self.tp}, and legacy files are named by tp and ep"
            )
        return self

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of experts."""
        return self.etp or self.tp

    @property
    def parts(self) -> tuple[int, int]:
        """Which part of how many."""
        part, of = (self.part or "1/1").split("/")
        return int(part), int(of)

    def changing_bytes(self) -> dict[str, object]:
        """The settings for the manifest: those of the layout that is written."""
        skipped = [field for field, layouts in ONLY.items() if self.to not in layouts]
        if self.to != "megatron" or not self.weights_only:
            skipped.append("weights_only")  # only torch_dist could have held more
        return self.effective(*HOW, *skipped)

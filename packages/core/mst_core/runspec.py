"""The settings that mst-train and mst-align share: the model, the rows, the engine, the optimizer, the run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Field, PrivateAttr, model_validator

from mst_core import cluster
from mst_core.cluster import Place
from mst_core.files import URL
from mst_core.spec import Spec

Name = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, Path) else given)]
"""A source of rows (data/sources.py); from Python also a Path."""
NO_QLORA = {
    "megatron": "megatron-core has no 4-bit layers: --engine plain, fsdp, or deepspeed --zero 2",
}
NO_ROWS = {
    "megatron": "the megatron engine trains no single rows of its embedding, which is cut over the ranks: "
    "--engine plain, fsdp or deepspeed",
}
NO_DORA = "the megatron engine has no DoRA (a rank holds only a part of each weight): --engine plain, fsdp or deepspeed"


class RunSpec(Spec):
    """A training run. Megatron's own flag names are accepted as aliases."""

    model: str = Field(description="the checkpoint that goes in: a directory, hf://org/name or ms://org/name")
    data: tuple[Name, ...] = Field(
        description="rows to learn from: files, directories, globs, hf://org/name, ms://org/name; NAME:SHARE, "
        "NAME#FIRST (repeat, or separate by commas)"
    )
    eval_data: tuple[Name, ...] = Field((), description="rows to measure the loss on")
    num_samples: int | None = Field(None, ge=1, description="rows of an epoch (default: all)")
    out: Path = Field(description="the directory that comes out; s3://bucket/path and other URLs of fsspec too")
    cache: Path = Field(Path("~/.cache/mst"), description="tokenised rows and reference log-probabilities")
    add_tokens: tuple[str, ...] = Field(
        (), description="tokens that the vocabulary gets before training: each as it is, or files of one a line"
    )
    seed: int = Field(0, ge=0, description="order of rows, initialisation")
    bad_rows: Literal["error", "skip"] = Field(
        "error", description="a row that cannot be used stops the run, or goes to rejected.jsonl"
    )

    engine: Literal["auto", "plain", "megatron", "fsdp", "deepspeed"] = Field(
        "auto", description="auto follows the layout of --model (hf: plain, megatron: megatron); fsdp and deepspeed: hf"
    )
    tp: int = Field(
        1,
        ge=1,
        description="tensor parallel size",
        validation_alias=AliasChoices("tp", "tensor_model_parallel_size"),
    )
    pp: int = Field(
        1,
        ge=1,
        description="pipeline parallel size",
        validation_alias=AliasChoices("pp", "pipeline_model_parallel_size"),
    )
    sp: bool = Field(False, description="sequence parallel", validation_alias=AliasChoices("sp", "sequence_parallel"))
    vp: int = Field(
        1,
        ge=1,
        description="virtual pipeline stages per rank (interleaved schedule)",
        validation_alias=AliasChoices(
            "vp", "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"
        ),
    )
    decoder_first_pipeline_num_layers: int | None = Field(
        None, ge=1, description="layers of the first pipeline stage (default: as many as the others)"
    )
    decoder_last_pipeline_num_layers: int | None = Field(None, ge=1, description="layers of the last pipeline stage")
    cp: int = Field(
        1, ge=1, description="context parallel size", validation_alias=AliasChoices("cp", "context_parallel_size")
    )
    ep: int = Field(
        1, ge=1, description="expert parallel size", validation_alias=AliasChoices("ep", "expert_model_parallel_size")
    )
    etp: int | None = Field(
        None,
        ge=1,
        description="tensor parallel size of the experts (default: tp)",
        validation_alias=AliasChoices("etp", "expert_tensor_parallel_size"),
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="how tokens travel to their experts"
    )
    moe_aux_loss_coeff: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="load balancing loss of the router; 0 turns it off",
        validation_alias=AliasChoices("moe_aux_loss_coeff", "router_aux_loss_coef"),
    )
    nproc: int | None = Field(
        None,
        ge=1,
        description="ranks of a node (default: those of the layout); data parallel size follows",
        validation_alias=AliasChoices("nproc", "nproc_per_node"),
    )
    nodes: int = Field(1, ge=1, description="machines of the run", validation_alias=AliasChoices("nodes", "nnodes"))
    node_rank: int | None = Field(None, ge=0, description="which of them this is, where no launcher says it")
    rendezvous: str | None = Field(
        None,
        pattern=r"^[^:]+:\d+$",
        description="HOST:PORT where the first node listens, where no launcher says it",
        validation_alias=AliasChoices("rendezvous", "rdzv_endpoint"),
    )
    print_launch: bool = Field(False, description="print the command of each node and stop")
    timeout: float = Field(
        1800.0, gt=0, allow_inf_nan=False, description="seconds that ranks wait for one another before the run fails"
    )
    distributed_optimizer: bool = Field(
        False,
        description="shard optimizer state over data parallel ranks",
        validation_alias=AliasChoices("distributed_optimizer", "use_distributed_optimizer"),
    )
    overlap_grad_reduce: bool = Field(False, description="reduce gradients during the backward pass")
    overlap_param_gather: bool = Field(
        False, description="gather parameters of the distributed optimizer during the next forward pass"
    )
    recompute: Literal["full", "selective"] | None = Field(
        None,
        description="recompute activations in the backward pass: whole layers, or only some modules",
        validation_alias=AliasChoices("recompute", "recompute_granularity"),
    )
    recompute_method: Literal["uniform", "block"] = Field(
        "uniform", description="full: every group of layers, or the first layers of each stage"
    )
    recompute_num_layers: int = Field(1, ge=1, description="full: layers of a group, or of each stage")
    recompute_modules: tuple[Literal["core_attn", "mlp", "moe", "shared_experts"], ...] = Field(
        ("core_attn",), description="selective: which"
    )

    zero: int | None = Field(
        None,
        ge=0,
        le=3,
        description="deepspeed: shard optimizer (1), gradients too (2), weights too (3) (default: 2)",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none", description="deepspeed: keep optimizer state, or weights too (--zero 3), in CPU memory"
    )
    deepspeed: Path | dict[str, Any] | None = Field(
        None, description="deepspeed: a configuration of its own (JSON; in YAML also nested), checked against the flags"
    )
    micro_batch: int = Field(
        1,
        ge=1,
        description="rows (or pairs) per forward pass",
        validation_alias=AliasChoices("micro_batch", "micro_batch_size"),
    )
    global_batch: int = Field(
        8,
        ge=1,
        description="rows (or pairs) per optimizer step",
        validation_alias=AliasChoices("global_batch", "global_batch_size"),
    )
    packing: bool = Field(
        False, description="no padding: the rows of a micro-batch one after another, kept apart exactly; not with --cp"
    )
    seq_length: int | None = Field(
        None, ge=2, description="longest row in tokens (default: 1024, or the model's positions if fewer)"
    )
    truncate: Literal["error", "right", "prompt-left"] = Field(
        "error", description="a longer row is refused, cut at its right end, or loses the beginning of its prompt"
    )
    steps: int | None = Field(
        None, ge=1, description="optimizer steps", validation_alias=AliasChoices("steps", "train_iters")
    )
    epochs: float | None = Field(None, gt=0, description="passes over the rows (default: 1, if no --steps)")

    lr: float = Field(1e-5, gt=0, allow_inf_nan=False, description="peak learning rate")
    min_lr: float = Field(0.0, ge=0, allow_inf_nan=False, description="learning rate at the end of the schedule")
    warmup: float = Field(0.03, ge=0, lt=1, description="fraction of the steps for linear warmup")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="after the warmup")
    weight_decay: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="AdamW; matrices only, never norms or biases"
    )
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW")
    clip_grad: float = Field(1.0, ge=0, allow_inf_nan=False, description="global gradient norm; 0 turns it off")
    precision: Literal["bf16", "fp16", "fp32"] | None = Field(
        None, description="of the forward and backward pass (default: bf16 on an accelerator, fp32 on a CPU)"
    )
    compile: bool = Field(False, description="plain: compile the decoder layers (torch.compile), once for all lengths")
    initial_loss_scale: float = Field(65536.0, ge=1, allow_inf_nan=False, description="fp16: halved when it overflows")
    loss_scale_window: int = Field(1000, ge=1, description="fp16: steps without overflow until the scale doubles")

    lora_rank: int | None = Field(None, ge=1, description="train a LoRA adapter of this rank (default: all weights)")
    lora_alpha: float | None = Field(None, gt=0, description="LoRA scale is alpha / rank (default: 2 x rank)")
    lora_targets: tuple[str, ...] = Field(
        ("all-linear",), description="names of layers, or all-linear: all of the decoder's, experts included"
    )
    lora_rslora: bool = Field(
        False,
        description="LoRA scale is alpha / sqrt(rank)",
        validation_alias=AliasChoices("lora_rslora", "use_rslora"),
    )
    qlora: Literal["nf4", "nf4-double"] | None = Field(
        None,
        description="keep the weights under the adapter in 4 bits (bitsandbytes), nf4-double their scales in 8; plain, "
        "fsdp, deepspeed below --zero 3",
    )
    lora_dora: bool = Field(
        False,
        description="train the magnitude of each output apart (DoRA); not on megatron",
        validation_alias=AliasChoices("lora_dora", "use_dora"),
    )

    save_every: int | None = Field(
        None,
        ge=1,
        description="steps between two checkpoints in OUT.partial (default: one when SIGTERM stops the run)",
        validation_alias=AliasChoices("save_every", "save_interval"),
    )
    async_save: bool = Field(
        False, description="write checkpoints while the training goes on, from a copy in host memory"
    )
    keep: int = Field(2, ge=1, description="how many checkpoints stay in OUT.partial, the newest ones")
    keep_state: bool = Field(False, description="keep optimizer state in OUT: --resume --steps MORE can extend the run")
    resume: bool = Field(
        False, description="go on from the newest whole checkpoint in OUT.partial, or extend an OUT with its state"
    )
    log_every: int = Field(1, ge=1, description="steps between two lines of metrics.jsonl")
    report_to: tuple[Literal["wandb", "swanlab", "trackio"], ...] = Field(
        (), description="send the metrics there too, as its own settings say (repeat, or separate by commas)"
    )
    peak_tflops: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="of one device, for MFU (default: known for some GPUs in bf16)"
    )
    eval_every: int | None = Field(
        None, ge=1, description="steps between two passes over --eval-data (default: at the end)"
    )

    _remote: str | None = PrivateAttr(None)

    @property
    def remote(self) -> str | None:
        """The URL that --out is (s3://bucket/path); ``out`` is then the directory here that is copied there."""
        return self._remote

    @model_validator(mode="after")
    def _place_out(self) -> Self:
        if url := URL.fullmatch(str(self.out)):
            self._remote = f"{url[1]}://{url[2]}"
            object.__setattr__(self, "out", self.cache.expanduser() / "outputs" / url[1] / url[2])
        return self

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("--steps and --epochs contradict each other: give one")
        self._check_lora()
        if self.sp and self.tp == 1:
            raise ValueError("--sp needs --tp of 2 or more: it shards activations over the tensor parallel ranks")
        if self.min_lr > self.lr:
            raise ValueError(f"--min-lr {self.min_lr:g} is above --lr {self.lr:g}")
        if self.vp > 1 and self.pp == 1:
            raise ValueError("--vp needs --pp of 2 or more: its stages are virtual ones of each pipeline rank")
        if self.pp == 1 and (self.decoder_first_pipeline_num_layers or self.decoder_last_pipeline_num_layers):
            raise ValueError("--decoder-first-pipeline-num-layers and --decoder-last-... need --pp of 2 or more")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("--overlap-param-gather needs --distributed-optimizer and --overlap-grad-reduce")
        self._check_recompute()
        if self.nproc is None and (alone := math.lcm(self.model_ranks, self.expert_ranks)) % self.nodes:
            raise ValueError(f"--nodes {self.nodes} does not divide the layout's {alone} ranks: give --nproc")
        if self.ranks % self.model_ranks:
            raise ValueError(f"{self._asked} is not a multiple of tp x cp x pp = {self.model_ranks}")
        if self.ranks % self.expert_ranks:
            raise ValueError(f"{self._asked} is not a multiple of etp x ep x pp = {self.expert_ranks}")
        self._check_engine()
        if self.async_save and self.save_every is None:
            raise ValueError("--async-save needs --save-every")
        if self.global_batch % (self.micro_batch * self.dp):
            whole = self.micro_batch * self.dp
            raise ValueError(f"--global-batch {self.global_batch} is not a multiple of micro-batch x dp = {whole}")
        return self

    def _check_lora(self) -> None:
        if self.lora_rank is None and (self.lora_alpha is not None or self.lora_targets != ("all-linear",)):
            raise ValueError("--lora-alpha and --lora-targets need --lora-rank")
        if self.lora_rank is None and (self.lora_rslora or self.lora_dora or self.qlora):
            raise ValueError("--lora-rslora, --lora-dora and --qlora need --lora-rank")
        if self.lora_rank is not None and self.add_tokens and (reason := NO_ROWS.get(self.engine)):
            raise ValueError(f"--add-tokens with --lora-rank: {reason}")
        if self.qlora and (reason := NO_QLORA.get(self.engine)):
            raise ValueError(f"--qlora: {reason}")
        if self.lora_dora and self.engine == "megatron":
            raise ValueError(f"--lora-dora: {NO_DORA}")

    def _check_recompute(self) -> None:
        given = self.model_fields_set
        for names, granularity in (
            (("recompute_method", "recompute_num_layers"), "full"),
            (("recompute_modules",), "selective"),
        ):
            for name in names:
                if name in given and self.recompute != granularity:
                    raise ValueError(f"--{name.replace('_', '-')} needs --recompute {granularity}")

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size of the experts."""
        return self.etp or self.tp

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the layers without experts, a context part each."""
        return self.tp * self.cp * self.pp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold one copy of the experts; as many without experts, of which --etp then says nothing."""
        return (self.expert_tp if self.etp or self.ep > 1 else 1) * self.ep * self.pp

    def _check_engine(self) -> None:
        if self.engine in ("plain", "fsdp", "deepspeed") and self.needs_megatron:
            raise ValueError(f"--engine {self.engine} has no {self.needs_megatron[0]}: it needs megatron")
        if self.engine == "plain" and self.ranks > 1:
            raise ValueError("--engine plain is one process: --nproc and --nodes need fsdp, deepspeed or megatron")
        if self.engine != "deepspeed" and (self.zero is not None or self.offload != "none" or self.deepspeed):
            raise ValueError("--zero, --offload and --deepspeed need --engine deepspeed")
        if self.compile and (self.engine not in ("auto", "plain") or self.ranks > 1):
            raise ValueError("--compile is for the plain engine")

    @property
    def ranks(self) -> int:
        """Processes of the run, on all its nodes."""
        return self.nodes * self.nproc if self.nproc else math.lcm(self.model_ranks, self.expert_ranks)

    @property
    def _asked(self) -> str:
        return f"--nproc {self.nproc}" if self.nodes == 1 else f"--nodes {self.nodes} x --nproc {self.nproc}"

    @property
    def place(self) -> Place:
        """Where this process stands among those of the run. Raises SettingsError where its launcher contradicts."""
        return cluster.place(self.ranks, self.nodes, self.node_rank, self.rendezvous)

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.ranks // self.model_ranks

    @property
    def needs_megatron(self) -> list[str]:
        """The flags in effect that only the megatron engine has."""
        on = {
            "--tp": self.tp > 1,
            "--pp": self.pp > 1,
            "--cp": self.cp > 1,
            "--ep": self.ep > 1,
            "--etp": self.etp is not None,
            "--distributed-optimizer": self.distributed_optimizer,
            "--overlap-grad-reduce": self.overlap_grad_reduce,
            "--recompute selective": self.recompute == "selective",
            "--recompute-method block": self.recompute_method == "block",
            "--recompute-num-layers": self.recompute_num_layers > 1,
            "--moe-aux-loss-coeff": self.moe_aux_loss_coeff > 0,
            "--precision fp16": self.precision == "fp16",
        }
        return [flag for flag, yes in on.items() if yes]

    def total_steps(self, units: int) -> int:
        """Optimizer steps over so many rows (or pairs): --steps, or --epochs of global batches, nothing dropped (the
        last batch of an epoch may be smaller)."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil((self.epochs or 1.0) * math.ceil(units / self.global_batch)))

    @property
    def alpha(self) -> float:
        """The LoRA alpha in effect."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * (self.lora_rank or 1)

    @property
    def lora_scale(self) -> float:
        """What B @ A is multiplied by: alpha / rank, with rsLoRA (arXiv 2312.03732) alpha / sqrt(rank)."""
        rank = self.lora_rank or 1
        return self.alpha / (math.sqrt(rank) if self.lora_rslora else rank)

"""Flags, YAML, and every mistake at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mst_core.errors import SettingsError
from mst_core.runspec import RunSpec

GOOD = ["--model", "m", "--data", "a.jsonl", "--out", "o"]


def wrong(*words: str) -> str:
    with pytest.raises(SettingsError) as caught:
        RunSpec.parse([*words], prog="mst-x")
    return str(caught.value)


def test_flags_and_megatron_aliases() -> None:
    spec = RunSpec.parse(
        [*GOOD, "--data", "b.jsonl,c.jsonl", "--tensor-model-parallel-size", "2", "--lr", "1e-4", "--sp"]
    )
    assert (spec.tp, spec.lr, spec.sp) == (2, 1e-4, True)
    assert spec.data == ("a.jsonl", "b.jsonl", "c.jsonl")


def test_yaml_is_overridden_by_flags(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: m\ndata: [a.jsonl]\nout: o\nmicro-batch: 2\nglobal_batch: 4\npipeline-model-parallel-size: 2\n"
    )
    spec = RunSpec.parse(["--config", str(config), "--global-batch", "16"])
    assert (spec.micro_batch, spec.global_batch, spec.pp) == (2, 16, 2)


def test_every_mistake_at_once(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("modle: m\nseq_length: long\n")
    text = wrong(
        "--config", str(config), "--data", "a", "--lr", "-1", "--precison", "fp32", "--precision", "fp8", "stray"
    )
    assert "--model: required" in text
    assert "--out: required" in text
    assert "modle: no such setting; did you mean model?" in text
    assert "--precison: no such flag; did you mean --precision?" in text
    assert "stray: unexpected argument" in text
    assert "--lr: input should be greater than 0, not '-1'" in text
    assert "--precision: input should be 'bf16', 'fp16' or 'fp32', not 'fp8'" in text
    assert "seq-length: input should be a valid integer" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "5", "--epochs", "1"], "--steps and --epochs contradict"),
        (["--lora-alpha", "8"], "need --lora-rank"),
        (["--sp"], "--sp needs --tp"),
        (["--engine", "plain", "--tp", "2"], "--engine plain has no --tp: it needs megatron"),
        (["--nproc", "3", "--tp", "2"], "--nproc 3 is not a multiple"),
        (["--nproc", "2", "--cp", "2", "--pp", "2"], "--nproc 2 is not a multiple of tp x cp x pp = 4"),
        (["--nproc", "6", "--ep", "2", "--etp", "2"], "--nproc 6 is not a multiple of etp x ep x pp = 4"),
        (["--vp", "2"], "--vp needs --pp"),
        (["--decoder-last-pipeline-num-layers", "2"], "need --pp of 2"),
        (["--overlap-param-gather"], "needs --distributed-optimizer and --overlap-grad-reduce"),
        (["--recompute", "selective", "--recompute-method", "block"], "--recompute-method needs --recompute full"),
        (["--recompute", "full", "--recompute-modules", "mlp"], "--recompute-modules needs --recompute selective"),
        (["--engine", "plain", "--precision", "fp16"], "has no --precision fp16"),
        (["--engine", "plain", "--recompute", "selective"], "has no --recompute selective"),
        (["--global-batch", "3", "--micro-batch", "2"], "--global-batch 3 is not a multiple"),
        (["--lr", "1e-5", "--min-lr", "1e-4"], "--min-lr 0.0001 is above"),
        (["--lr", "nan"], "--lr"),
    ],
)
def test_contradictions(words: list[str], says: str) -> None:
    assert says in wrong(*GOOD, *words)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--num-virtual-stages-per-pipeline-rank", "2", "--pp", "2"], "vp", 2),
        (["--virtual-pipeline-model-parallel-size", "2", "--pp", "2"], "vp", 2),
        (["--context-parallel-size", "2"], "cp", 2),
        (["--expert-model-parallel-size", "4"], "ep", 4),
        (["--expert-tensor-parallel-size", "2"], "etp", 2),
        (["--moe-token-dispatcher-type", "allgather"], "moe_token_dispatcher_type", "allgather"),
        (["--router-aux-loss-coef", "0.01"], "moe_aux_loss_coeff", 0.01),
        (["--recompute-granularity", "full"], "recompute", "full"),
        (["--use-distributed-optimizer"], "distributed_optimizer", True),
        (["--overlap-grad-reduce"], "overlap_grad_reduce", True),
        (["--recompute", "full", "--recompute-method", "block"], "recompute_method", "block"),
        (["--recompute", "full", "--recompute-num-layers", "2"], "recompute_num_layers", 2),
        (["--recompute", "selective", "--recompute-modules", "mlp,moe"], "recompute_modules", ("mlp", "moe")),
        (["--pp", "2", "--decoder-first-pipeline-num-layers", "3"], "decoder_first_pipeline_num_layers", 3),
        (["--initial-loss-scale", "1024"], "initial_loss_scale", 1024.0),
        (["--loss-scale-window", "10"], "loss_scale_window", 10),
    ],
)
def test_megatrons_flags(words: list[str], field: str, value: object) -> None:
    assert getattr(RunSpec.parse([*GOOD, *words]), field) == value


@pytest.mark.parametrize(
    ("words", "ranks", "dp"),
    [
        ("--tp 2 --sp --ep 4", 8, 4),
        ("--tp 2 --sp --ep 4 --etp 1", 4, 2),
        ("--cp 2 --ep 4", 4, 2),
        ("--pp 2 --ep 2 --nproc 8", 8, 4),
        ("--tp 2 --cp 2", 4, 1),
    ],
)
def test_the_ranks_of_a_layout(words: str, ranks: int, dp: int) -> None:
    spec = RunSpec.parse([*GOOD, *words.split()])
    assert (spec.ranks, spec.dp) == (ranks, dp)


def test_no_environment_variable_is_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL", "from the environment")
    monkeypatch.setenv("LR", "5")
    assert RunSpec.parse(GOOD).lr == 1e-5
    assert "--model: required" in wrong("--data", "a", "--out", "o")


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [", "\xff\xfe"])
def test_a_config_that_is_none(tmp_path: Path, content: str) -> None:
    config = tmp_path / "run.yaml"
    config.write_bytes(content.encode("latin-1"))
    assert "--config" in wrong(*GOOD, "--config", str(config))
    assert "--config" in wrong(*GOOD, "--config", str(tmp_path / "none.yaml"))


def test_effective_settings_hold_no_paths() -> None:
    effective = RunSpec.parse(GOOD).effective()
    assert "lr" in effective
    assert not {"model", "data", "out", "config", "overwrite"} & effective.keys()

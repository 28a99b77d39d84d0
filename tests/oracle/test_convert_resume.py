"""A Megatron-LM run goes on from what mst-convert made of its checkpoint, dropout included, as if nothing had been.

megatron.training's own save_checkpoint and load_checkpoint, in two torchruns of two ranks (convert_resume_ranks.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mst_core import manifest, torch_dist
from tests.oracle.test_convert_layouts import ROWS, convert, make
from tests.oracle.test_convert_optimizer import different, ranks, seen
from tests.oracle.test_convert_training import WORDS

DROPOUT = [word if word != "0.0" else "0.1" for word in WORDS]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("resume")
    hf = make(where / "hf", "llama")
    words = [*DROPOUT, "--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", str(ROWS // 2)]
    words += ["--global-batch-size", "4", "--ckpt-format", "torch_dist", "--train-iters", "10", "--save-interval", "5"]
    ranks("save", {str(where / "run"): [*words, "--save", str(where / "saved")]}, where, "convert_resume_ranks")
    plan = {str(where / "original"): [*words, "--load", str(where / "saved"), "--seed", "99"]}
    for form in ("stacked", "per-layer"):
        out = convert(
            model=where / "saved", hf_config=hf, to="megatron", out=where / f"out-{form}", form=form, vocab_padding=ROWS
        )
        plan[str(where / form)] = [*words, "--load", str(out), "--seed", "99"]
    ranks("load", plan, where, "convert_resume_ranks")
    return where


@pytest.mark.parametrize("name", ["original", "stacked", "per-layer"])
def test_the_run_goes_on(where: Path, name: str) -> None:
    """ "original" says that Megatron-LM itself goes on bit for bit, random numbers and trained padding included."""
    for rank in range(2):
        saved, loaded = seen(where / "run", rank), seen(where / name, rank)
        assert different(saved["before"], loaded["before"]) == []
        assert different(saved["after"], loaded["after"]) == []
        assert loaded["iteration"] == 2
        assert loaded["scheduler"] == saved["scheduler"]
        assert loaded["random"] == saved["random"]
    rest = saved["before"]["output_layer.weight"][50 - ROWS :]
    assert rest.any()


def test_what_was_saved_and_converted(where: Path) -> None:
    """The common state is Megatron-LM's, with all that its arguments hold."""
    out = where / "out-per-layer"
    assert "decoder.layers.0.mlp.linear_fc2.weight" in torch_dist.metadata(out)
    kept, made = torch_dist.common_state(where / "saved"), torch_dist.common_state(out)
    assert len(kept["args"].state) > 500
    assert kept.keys() == made.keys() >= {"args", "iteration", "opt_param_scheduler", "optimizer"}
    assert made["content_metadata"] == {**kept["content_metadata"], "non_homogeneous_layers": True}
    assert manifest.read(out).encoding["iteration"] == 2
    assert made["opt_param_scheduler"] == kept["opt_param_scheduler"]

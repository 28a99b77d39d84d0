"""mst-train as a program and from Python: what comes out, how it is named, and that it learns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.train.running import train

from mst_convert.plan import plan as convert_plan
from mst_convert.spec import ConvertSpec
from mst_convert.work import work as convert_work
from mst_core import checkpoint, manifest, torch_dist
from mst_core.errors import InputError
from mst_core.pickling import Call

BIN = Path(sys.executable).parent


def test_a_full_run_and_its_manifest(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    model = tiny_hf("llama", dtype="bfloat16")
    done = train(model, data, tmp_path / "a", epochs=4, eval_data=(data,), eval_every=4)
    assert done["loss"] < 0.7 * done["first_loss"]
    assert (done["rows"], done["steps"]) == (10, 12)
    assert done["eval/loss"] < done["first_loss"]
    made = manifest.read(tmp_path / "a")
    assert checkpoint.verify(tmp_path / "a") == []
    base, rows = made.parents
    assert (base.role, base.id, base.lossless) == ("base", manifest.identify(model).id, False)
    assert (rows.role, rows.id) == ("data", f"blake3:{blake3(data.read_bytes()).hexdigest()}")
    assert (made.id, made.kind, made.layout) == (done["id"], "model", "hf")
    assert made.model == manifest.identify(model).model
    assert made.digests.tokenizer == manifest.identify(model).digests.tokenizer
    assert made.digests.weights != manifest.identify(model).digests.weights
    assert made.made_by is not None
    settings = made.made_by.settings
    assert {name: settings[name] for name in ("steps", "engine", "precision", "seq_length", "stage", "dp")} == {
        "steps": 12, "engine": "plain", "precision": "fp32", "seq_length": 256, "stage": "sft", "dp": 1,
    }  # fmt: skip
    assert not any(str(tmp_path) in str(value) for value in settings.values())
    assert {"metrics.jsonl", "loss.png"} < {entry.path for entry in made.attachments}
    # What came out goes in again.
    assert train(tmp_path / "a", data, tmp_path / "b", steps=1)["first_loss"] == pytest.approx(done["loss"], abs=1.0)


def test_the_same_run_has_the_same_id_however_it_is_said(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    model = tiny_hf("llama")
    one = train(model, data, tmp_path / "one")
    same = [
        train(model, data, tmp_path / "two", epochs=1, log_every=2, eval_data=(data,)),
        train(model, data, tmp_path / "three", steps=3, bad_rows="skip", engine="plain", seq_length=256),
    ]
    assert [found["id"] for found in same] == [one["id"]] * 2
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "three/model.safetensors").read_bytes()
    others = [
        train(model, data, tmp_path / f"other{index}", **change)
        for index, change in enumerate(({"seed": 1}, {"steps": 2}, {"lr": 2e-3}))
    ]
    assert len({one["id"], *(found["id"] for found in others)}) == 4
    lora = train(model, data, tmp_path / "lora", lora_rank=4)
    again = train(model, data, tmp_path / "lora-again", lora_rank=4, lora_alpha=8.0)
    assert lora["id"] == again["id"]
    adapter = manifest.read(tmp_path / "lora")
    assert (adapter.kind, adapter.layout, adapter.model) == ("adapter", "peft", None)
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, None)


def test_a_model_that_changes_under_the_run_is_refused(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    from mst_core.engine import loop

    model = tmp_path / "model"
    shutil.copytree(tiny_hf("llama"), model)
    fit = loop.fit

    def meanwhile(*given: Any) -> Any:
        (model / "generation_config.json").write_text("{}")
        return fit(*given)

    monkeypatch.setattr(loop, "fit", meanwhile)
    with pytest.raises(InputError, match="changed while it was trained from"):
        train(model, data, tmp_path / "out", steps=1)
    assert not list(tmp_path.glob("out*"))


def test_compiling_needs_a_compiler(
    mst: Callable[..., Any], tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    words = ("--model", tiny_hf("llama"), "--data", data, "--out", tmp_path / "out", "--steps", 1, "--compile")
    done = mst("mst-train", *words, code=4, env={"PATH": str(BIN)})
    assert "--compile needs a C++ compiler" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_dry_run_tells_the_steps_and_writes_nothing(
    mst: Callable[..., Any], tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    words = ("--model", tiny_hf("llama"), "--data", data, "--out", tmp_path / "out", "--global-batch", 4)
    planned = json.loads(mst("mst-train", *words, "--epochs", 2, "--dry-run", "--json").stdout)
    assert (planned["lines"], planned["steps"].split()[0], planned["engine"]) == (10, "6", "plain")
    assert not list(tmp_path.iterdir())


def test_nothing_in_a_checkpoints_pickle_runs(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its common state calls os.system when megatron-core unpickles it."""
    ran, state = tmp_path / "ran", torch_dist.release_state
    call = Call("posix.system", (f"touch {ran}",))
    monkeypatch.setattr(torch_dist, "release_state", lambda *args: {**state(*args), "more": call})
    spec = ConvertSpec(model=str(tiny_hf("llama")), to="megatron", out=tmp_path / "megatron")
    convert_work(spec, convert_plan(spec))
    train(tmp_path / "megatron", data, tmp_path / "out", steps=1)
    assert not ran.exists()


def test_it_runs_under_torchrun(
    mst: Callable[..., Any], tiny_hf: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    """Two pipeline stages, started by somebody else: one result on stdout, and the plain engine's loss."""
    mst("mst-convert", "--model", tiny_hf("llama"), "--to", "megatron", "--out", tmp_path / "megatron")
    words = ("--model", tmp_path / "megatron", "--data", data, "--pp", 2, "--steps", 2, "--global-batch", 4)
    done = mst(
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        2,
        BIN / "mst-train",
        *words,
        "--out",
        tmp_path / "out",
        "--json",
    )
    assert done.stdout.count("\n") == 1
    plain = train(tiny_hf("llama"), data, tmp_path / "plain", steps=2, lr=1e-5)
    assert json.loads(done.stdout)["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert checkpoint.verify(tmp_path / "out") == []


def test_a_users_deepspeed_configuration(mst: Any, tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    given = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100000}, "bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(given))
    model, words = tiny_hf("llama"), ["--data", data, "--precision", "fp32", "--global-batch", 4, "--steps", 2]
    words += ["--engine", "deepspeed", "--nproc", 2, "--deepspeed", tmp_path / "ds.json", "--recompute", "full"]
    done = mst("mst-train", "--model", model, *words, "--eval-data", data, "--out", tmp_path / "out", "--json")
    settings = manifest.read(tmp_path / "out").made_by.settings
    assert (settings["engine"], settings["zero"], settings["dp"]) == ("deepspeed", 1, 2)
    assert not any(str(tmp_path) in str(value) for value in settings.values())
    plain = train(model, data, tmp_path / "plain", lr=1e-5, steps=2, eval_data=(data,))
    assert json.loads(done.stdout)["eval/loss"] == pytest.approx(plain["eval/loss"], abs=1e-5)
    assert "WARNING" not in done.stderr

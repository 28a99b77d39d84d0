"""What a run measures, where it goes, and that a run which goes on leaves no gap and nothing twice."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import running
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from mst_core import checkpoint, families, flops, lora_sites, manifest, tensors
from mst_core.engine import saves
from mst_core.errors import MissingPackage, Stopped
from mst_core.runspec import RunSpec

train = partial(running.train, steps=6, save_every=2)


def stopped_and_resumed(model: Path, data: Path, out: Path, **settings: Any) -> None:
    """A run that ends after step 5, of which only 4 are saved, and goes on."""
    from mst_core.engine.plain import PlainEngine

    step = PlainEngine.step

    def cut(self: PlainEngine, *given: Any) -> dict[str, float]:
        if self.steps == 5:
            raise Stopped("stopped")
        return step(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainEngine, "step", cut)
        with pytest.raises(Stopped):
            train(model, data, out, **settings)
    train(model, data, out, resume=True, **settings)


def test_a_run_that_goes_on_has_every_step_once(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    stopped_and_resumed(tiny_hf("llama"), data, tmp_path / "out", peak_tflops=0.5)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    names = {"loss", "lr", "grad_norm", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "memory_gb", "data_wait_s"}
    assert all(names <= row.keys() and all(row[name] > 0 for name in names) for row in rows)
    board = EventAccumulator(str(tmp_path / "out/tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    assert (tmp_path / "out/loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_goes_on_keeps_what_was_measured_before_its_first_step(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_hf("llama"), data, tmp_path / "whole", eval_data=(data,))
    whole = capsys.readouterr().err
    stopped_and_resumed(tiny_hf("llama"), data, tmp_path / "out", eval_data=(data,))
    assert table(capsys.readouterr().err) == table(whole) != []
    rows, notes = [], []
    for name in ("whole", "out"):
        notes.append(manifest.read(tmp_path / name).notes)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows.append([{key: row.get(key) for key in ("step", "loss", "eval/loss")} for row in map(json.loads, lines)])
    assert rows[0] == rows[1]
    assert [(row["step"], row["eval/loss"] is not None) for row in rows[0]] == [
        (0, True), *((step, False) for step in range(1, 6)), (6, True),
    ]  # fmt: skip
    for note in notes:
        assert note["evaluation_before"]["loss"] == rows[0][0]["eval/loss"] > note["evaluation"]["loss"]


def table(said: str) -> list[str]:
    return said[said.rindex("evaluation rows") :].splitlines()[2:]


def test_an_extended_run_has_the_steps_of_before(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    more: dict[str, Any] = {"keep_state": True, "schedule": "constant"}
    train(tiny_hf("llama"), data, tmp_path / "out", steps=3, **more)
    train(tiny_hf("llama"), data, tmp_path / "out", steps=5, resume=True, **more)
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert len(list((tmp_path / "out/tensorboard").iterdir())) == 2
    assert checkpoint.verify(tmp_path / "out") == []


def test_the_plot_is_there_at_each_save(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    seen = []
    save = saves.Saves.save

    def watched(self: saves.Saves, step: int, done: Any) -> None:
        save(self, step, done)
        seen.append((tmp_path / "out.partial/loss.png").is_file())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saves.Saves, "save", watched)
        train(tiny_hf("llama"), data, tmp_path / "out")
    assert seen == [False, True]  # drawn after a save


@pytest.mark.parametrize(("family", "dims"), [("llama", {}), ("qwen3", {}), ("qwen2", {})])
@pytest.mark.parametrize("lora", [None, 4])
def test_flops_are_those_that_torch_counts(
    tiny_hf: Callable[..., Path], family: str, dims: dict[str, Any], lora: int | None
) -> None:
    """All but attention, whose causal half torch counts whole: taken apart by two lengths."""
    path = tiny_hf(family, **dims)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    spec = RunSpec(model="m", data=("d",), out="o", lora_rank=lora)
    config = tensors.config(path)
    known = families.family_for(config).model(config)
    if lora:
        from mst_core.engine import lora as adapters

        model = adapters.wrap(model, spec, known, lora_sites.chosen(known, spec.lora_targets))
    cost = flops.cost(known, config, spec)
    assert cost is not None

    def counted(length: int) -> int:
        tokens_BT = torch.arange(length)[None] + 3
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens_BT, use_cache=False).logits.sum().backward()
        return counter.get_total_flops()

    # Of two lengths the linear part is what does not grow with the square; full attention is twice the causal half.
    lengths = (32, 64)
    whole = [cost.step([length]) + (cost.step([length]) - _linear(cost, length)) for length in lengths]
    found = [counted(length) for length in lengths]
    # Frozen weights below the first adapter need no gradient at all, which the count by rows does not know.
    assert found == pytest.approx(whole, rel=0.05 if lora else 0.01)


def _linear(cost: flops.Cost, length: int) -> float:
    return cost._replace(attention=()).step([length])


def test_a_window_and_active_experts_count_as_they_are() -> None:
    assert flops._pairs(10, None) == 50
    assert flops._pairs(10, 4) == 32  # 4 x 10 - 8
    assert flops._pairs(3, 4) == 4.5
    config = {
        "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 330, "num_local_experts": 8,
        "max_position_embeddings": 256, "sliding_window": None,
    }  # fmt: skip
    spec = RunSpec(model="m", data=("d",), out="o")
    found = []
    for active in (1, 2):
        told = {**config, "num_experts_per_tok": active}
        cost = flops.cost(families.family_for(told).model(told), told, spec)
        assert cost is not None
        found.append(cost.matrices)
    assert found[1] - found[0] == 2 * 3 * 64 * 96  # one more expert in each of two layers
    assert flops.cost(families.family_for(config).model(config), config, spec) is None


def test_peaks_are_known_or_left_out(tiny_hf: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    known = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA H200": 989, "NVIDIA A100-SXM4-80GB": 312,
             "NVIDIA A10": 125, "NVIDIA B200": 2250, "NVIDIA GeForce RTX 4090": None, "cpu": None}  # fmt: skip
    assert {name: flops.peak(name, "bf16") for name in known} == known
    assert flops.peak("NVIDIA H100 PCIe", "fp32") is None
    done = train(tiny_hf("llama"), data, tmp_path / "out", steps=1)
    assert "mfu" not in done


def test_a_report_that_is_not_installed_is_refused_first(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackage) as caught:
        train(tiny_hf("llama"), data, tmp_path / "out", report_to=("trackio",))
    assert caught.value.hint == "pip install trackio"


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_report_gets_what_the_file_gets(
    name: str, tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library of that name with the real ones' init, log and finish, where the real one is not installed."""
    (tmp_path / f"{name}.py").write_text(
        "import json, os\n\n\ndef init(**given):\n    note('init', given)\n    return Run()\n\n\n"
        "def log(values, step=None):\n    note('log', {**values, 'step': step})\n\n\n"
        "def finish():\n    note('finish', {})\n\n\n"
        "class Run:\n    log, finish = staticmethod(log), staticmethod(finish)\n\n\n"
        "def note(kind, given):\n    with open(os.path.join(os.path.dirname(__file__), 'noted'), 'a') as file:\n"
        "        file.write(json.dumps([kind, given], default=str) + '\\n')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    stopped_and_resumed(tiny_hf("llama"), data, tmp_path / "out", report_to=(name,), eval_data=(data,))
    noted = [json.loads(line) for line in (tmp_path / "noted").read_text().splitlines()]
    monkeypatch.delitem(sys.modules, name)
    assert [kind for kind, _ in noted] == ["init", *["log"] * 6, "finish", "init", "log", "finish"]
    first, again = [given for kind, given in noted if kind == "init"]
    assert {key: first.get(key) for key in ("id", "name")} == {key: again.get(key) for key in ("id", "name")}
    assert again["resume"] == "allow"
    rows = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    sent, written = (
        [(one["step"], one.get("loss"), one.get("eval/loss")) for one in found]
        for found in ([given for kind, given in noted if kind == "log"], rows)
    )
    assert sent == written

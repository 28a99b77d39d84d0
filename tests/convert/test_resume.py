"""SIGKILL at any write of a conversion: nothing is accepted, and --resume ends with the same bytes and the same id."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.convert.test_layouts import convert, make, same

from mst_convert import copying, reading
from mst_convert import plan as planning
from mst_convert import work as working
from mst_convert.spec import ConvertSpec
from mst_core import checkpoint, manifest
from mst_core.errors import InputError, SettingsError

KILLS, SAMPLED = 200, 6
CUT = """
import os, signal, sys
from mst_convert import copying, reading
reading.PIECE = copying.NOTED = int(sys.argv[2])
left, pwritev = int(sys.argv[1]), os.pwritev
def counted(*words):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return pwritev(*words)
os.pwritev = counted
from mst_convert.cli import main
sys.argv = ["mst-convert", *sys.argv[3:]]
main()
"""
"""mst-convert in small pieces, killed at one of its writes."""


def cut(after: int, *words: object, piece: int = 512) -> int:
    """The exit code of a conversion that is killed after so many writes (or ends before)."""
    command = [sys.executable, "-c", CUT, str(after), str(piece), *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=120).returncode


def kill_and_resume(tmp_path: Path, seed: int) -> None:
    """One conversion, killed up to three times."""
    chosen = random.Random(seed)
    name, to = chosen.choice(["llama", "qwen3-moe", "gpt-oss"]), chosen.choice(["megatron", "megatron-legacy", "hf"])
    model = make(tmp_path / "hf", name)
    if to == "hf":
        model = convert(model=model, to="megatron", out=tmp_path / "model")
    whole = convert(model=model, to=to, out=tmp_path / "whole")
    out = tmp_path / "out"
    words = ["--model", model, "--to", to, "--out", out, "--workers", chosen.choice([1, 2, 3])]
    resume: list[str] = []
    for _ in range(chosen.choice([1, 1, 2, 3])):
        piece = chosen.choice([512, 4096])
        if cut(chosen.randrange(200 if piece == 512 else 25), *words, *resume, piece=piece) == 0:
            break
        assert not out.exists()
        with pytest.raises(InputError):
            planning.plan(ConvertSpec(model=str(tmp_path / "out.partial"), to="hf", out=tmp_path / "x"))
        resume = ["--resume"]
    else:
        assert cut(1 << 40, *words, "--resume") == 0
    assert manifest.read(out).id == manifest.read(whole).id
    assert checkpoint.verify(out) == []
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("seed", range(SAMPLED))
def test_a_killed_conversion_goes_on(tmp_path: Path, seed: int) -> None:
    kill_and_resume(tmp_path, seed)


def test_a_tensor_of_several_arrays_goes_on(tmp_path: Path) -> None:
    """GroupedMLP's weights: the crc of the whole is made of arrays that were written before and after the kill."""
    model = make(tmp_path / "hf", "qwen3-moe")
    settings: dict[str, Any] = {"to": "megatron-legacy", "experts": "legacy-grouped", "tp": 2}
    whole = convert(model=model, out=tmp_path / "whole", **settings)
    out = tmp_path / "out"
    words = ["--model", model, "--out", out, "--workers", 1]
    words += [word for name, value in settings.items() for word in (f"--{name}", value)]
    resume: list[str] = []
    for after in (25, 30, 35, 40):
        assert cut(after, *words, *resume) != 0
        resume = ["--resume"]
    assert cut(1 << 40, *words, "--resume") == 0
    assert manifest.read(out).id == manifest.read(whole).id
    for file in (out / "release").glob("*/*.pt"):
        assert zipfile.ZipFile(file).testzip() is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SAMPLED, KILLS))
def test_a_killed_conversion_goes_on_whole_count(tmp_path: Path, seed: int) -> None:
    kill_and_resume(tmp_path, seed)


@pytest.fixture
def killed(tmp_path: Path) -> list[Any]:
    """The words of a conversion that was killed half way."""
    hf = make(tmp_path / "hf", "llama")
    words = ["--model", hf, "--to", "megatron", "--out", tmp_path / "out"]
    assert cut(60, *words, "--workers", 1) == -9  # two may be far apart
    return words


def test_what_was_written_is_not_read_from_the_source_again(
    killed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    before = reading.Sources.read

    def counted(self: reading.Sources, array: Any, start: int, into: memoryview) -> None:
        nonlocal read
        read += len(into)
        before(self, array, start, into)

    monkeypatch.setattr(reading.Sources, "read", counted)
    convert(model=killed[1], to="megatron", out=tmp_path / "whole")
    whole, read = read, 0
    out = convert(model=killed[1], to="megatron", out=tmp_path / "out", resume=True)
    assert 0 < read < whole
    same(killed[1], convert(model=out, to="hf", out=tmp_path / "back"))


def test_damage_to_what_was_written_is_noticed(killed: list[Any], tmp_path: Path) -> None:
    staged = tmp_path / "out.partial" / "release" / "__0_0.distcp"
    data = bytearray(staged.read_bytes())
    data[2000] ^= 1
    staged.write_bytes(data)
    with pytest.raises(InputError, match=r"changed since the run that is resumed"):
        convert(model=killed[1], to="megatron", out=tmp_path / "out", resume=True)


def test_another_conversion_is_not_resumed(killed: list[Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="another conversion, cut short"):
        convert(model=killed[1], to="megatron", out=tmp_path / "out", dtype="fp32", resume=True)
    assert cut(1 << 40, *killed, "--resume") == 0  # nothing was lost by the mistake


def test_without_resume_it_starts_again(killed: list[Any], tmp_path: Path) -> None:
    same(
        killed[1],
        convert(model=convert(model=killed[1], to="megatron", out=tmp_path / "out"), to="hf", out=tmp_path / "b"),
    )


def test_a_torn_journal_line_is_left_out(tmp_path: Path) -> None:
    line = json.dumps({"file": "a", "end": 3, "blake3": "x"})
    (tmp_path / "j").write_text(line + "\n" + line.replace("3", "9")[:20])
    assert copying.read_journal(tmp_path / "j")["a"]["end"] == 3


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sizes and tensors are the same, so nothing else would tell that half of it is another model's."""
    hf = make(tmp_path / "hf", "llama")
    run = copying.Copying.run

    def changed(self: copying.Copying) -> None:
        run(self)
        path = hf / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")

    monkeypatch.setattr(copying.Copying, "run", changed)
    with pytest.raises(InputError, match="changed while it was converted"):
        convert(model=hf, to="megatron", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_parts_join_in_the_last_one_to_end(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "qwen3-moe")
    settings: dict[str, Any] = {"model": hf, "to": "megatron", "max_shard_size": 5000}
    whole = convert(**settings, out=tmp_path / "whole")
    out = tmp_path / "out"
    for part in ("2/3", "3/3"):
        spec = ConvertSpec(**{**settings, "model": str(hf)}, out=out, part=part)
        assert "done" in working.work(spec, planning.plan(spec)).text
        assert not out.exists()
    assert cut(40, *flags(hf, out, "1/3")) == -9
    assert not out.exists()
    with pytest.raises(InputError, match="another conversion"):
        convert(**{**settings, "max_shard_size": 9000}, out=out, part="1/3")
    convert(**settings, out=out, part="1/3")
    assert manifest.read(out).id == manifest.read(whole).id
    assert not (tmp_path / "out.partial").exists()


def flags(hf: Path, out: Path, part: str) -> list[object]:
    return ["--model", hf, "--to", "megatron", "--out", out, "--max-shard-size", 5000, "--part", part]


def test_parts_at_the_same_time(tmp_path: Path) -> None:
    hf = make(tmp_path / "hf", "qwen3-moe")
    whole = convert(model=hf, to="megatron", out=tmp_path / "whole", max_shard_size=5000)
    tool = [str(Path(sys.executable).parent / "mst-convert")]
    running = [
        subprocess.Popen([*tool, *map(str, flags(hf, tmp_path / "out", f"{n}/4"))], stderr=subprocess.PIPE, text=True)
        for n in range(1, 5)
    ]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert manifest.read(tmp_path / "out").id == manifest.read(whole).id
    assert not (tmp_path / "out.partial").exists()


def test_a_part_that_does_not_exist() -> None:
    with pytest.raises(SettingsError, match="no such part"):
        ConvertSpec.parse(["--model", "m", "--to", "hf", "--out", "o", "--part", "3/2"])

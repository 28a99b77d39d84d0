"""A directory appears whole or not at all; what is there is what the manifest says."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3

from mst_core import checkpoint, lineage, manifest
from mst_core.checkpoint import Staging, stage, verify
from mst_core.errors import InputError
from mst_core.manifest import Manifest, Parent


def make(
    out: Path,
    content: bytes = b"weights",
    *,
    overwrite: bool = False,
    parents: tuple[Parent, ...] = (),
    dirs: tuple[Path, ...] = (),
) -> Manifest:
    with stage(out, overwrite) as staging:
        with staging.open("model.safetensors") as file:
            file.write(content)
        staging.write("config.json", "{}")
        return commit(staging, parents, dirs)


def commit(staging: Staging, parents: tuple[Parent, ...] = (), dirs: tuple[Path, ...] = ()) -> Manifest:
    return staging.commit(kind="model", layout="hf", tool="test", settings={}, parents=parents, parent_dirs=dirs)


def test_files_are_hashed_as_written(tmp_path: Path) -> None:
    made = make(tmp_path / "out", b"x" * 3_000_000)
    entry = next(entry for entry in made.files if entry.path == "model.safetensors")
    assert entry.bytes == 3_000_000
    assert entry.blake3 == blake3(b"x" * 3_000_000).hexdigest()
    assert verify(tmp_path / "out") == []
    assert manifest.read(tmp_path / "out").id == made.id
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_same_content_same_id_elsewhere(tmp_path: Path) -> None:
    assert make(tmp_path / "a").id == make(tmp_path / "sub" / "b").id
    assert make(tmp_path / "c", b"other").id != make(tmp_path / "d").id


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with stage(tmp_path / "out") as staging:
            staging.write("config.json", "{}")
            raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_then_exchanged(tmp_path: Path) -> None:
    first = make(tmp_path / "out", b"one")
    with pytest.raises(InputError, match="exists"):
        make(tmp_path / "out", b"two")
    assert manifest.read(tmp_path / "out").id == first.id
    with pytest.raises(ZeroDivisionError):
        with stage(tmp_path / "out", overwrite=True):
            raise ZeroDivisionError
    assert verify(tmp_path / "out") == []
    second = make(tmp_path / "out", b"two", overwrite=True)
    assert manifest.read(tmp_path / "out").id == second.id != first.id
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_exchange_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", b"one")
    monkeypatch.setattr(checkpoint, "_rename", lambda *_: False)
    second = make(tmp_path / "out", b"two", overwrite=True)
    assert manifest.read(tmp_path / "out").id == second.id
    (tmp_path / "out").rename(tmp_path / "out.old.partial")  # as a kill between the two renames leaves it
    with pytest.raises(InputError, match="exists"):
        make(tmp_path / "out")
    assert verify(tmp_path / "out") == []


def test_a_directory_of_somebody_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    with pytest.raises(InputError, match="not a directory made by mst"):
        make(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "all of it"


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with stage(tmp_path / "out") as staging:
        staging.write("config.json", "{}")
        with pytest.raises(InputError, match="another process"):
            make(tmp_path / "out")
        commit(staging)
    assert verify(tmp_path / "out") == []


def test_an_unaccounted_file_stops_the_commit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nobody accounted for: stray\.bin"):
        with stage(tmp_path / "out") as staging:
            (staging.path / "stray.bin").write_bytes(b"?")
            commit(staging)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "mst.json", ""])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError):
        with stage(tmp_path / "out") as staging:
            staging.write(name, "x")


def test_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(InputError, match="disk is full"):
        make(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_check_free_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"needs .* TB, the disk has .* free"):
        checkpoint.check_free(tmp_path / "deep" / "out", 10**16)


def test_verify_names_every_problem(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out)
    (out / "model.safetensors").write_bytes(b"Weights")
    (out / "config.json").unlink()
    (out / "extra.safetensors").write_bytes(b"")
    assert sorted(problem.split(":")[0] for problem in verify(out)) == [
        "config.json",
        "extra.safetensors",
        "model.safetensors",
    ]


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "out")
    path = tmp_path / "out" / "mst.json"
    path.write_text(path.read_text().replace('"tool": "test"', '"tool": "best"'))
    with pytest.raises(InputError, match="was edited"):
        manifest.read(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a manifest"),
        (b"[]", "not an object"),
        (b"\xff", "not a manifest"),
        (b'{"format": 2}', "has format 2"),
        (b'{"format": 1, "surprise": 1}', "not a manifest"),
    ],
)
def test_what_is_no_manifest(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "mst.json").write_bytes(content)
    with pytest.raises(InputError, match=match):
        manifest.read(tmp_path)


def test_work_in_progress_is_no_model(tmp_path: Path) -> None:
    make(tmp_path / "out").dump()
    (tmp_path / "out").rename(tmp_path / "out.partial")
    with pytest.raises(InputError, match="work in progress"):
        manifest.identify(tmp_path / "out.partial")


def test_sigkill_leaves_no_output_and_the_next_run_clears_it(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\nfrom mst_core.checkpoint import stage\n"
        "with stage(pathlib.Path(sys.argv[1])) as s:\n"
        "    s.write('model.safetensors', 'half'); print('ready', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    with pytest.raises(InputError):
        manifest.identify(tmp_path / "out.partial")
    make(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert verify(tmp_path / "out") == []


def test_lineage_is_kept_and_ties_layouts_together(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", b"one")
    link = Parent(role="source", id=source.id, weights=source.digests.weights, lossless=True)
    megatron = make(tmp_path / "mcore", b"eno", parents=(link,), dirs=(tmp_path / "hf",))
    base = Parent(role="base", id=megatron.id, weights=megatron.digests.weights)
    adapter = make(tmp_path / "adapter", b"ab", parents=(base,), dirs=(tmp_path / "mcore",))
    other = make(tmp_path / "other", b"two")

    assert [depth for depth, *_ in lineage.walk(tmp_path / "adapter")] == [0, 1, 2]
    for directory, made in (("hf", source), ("mcore", megatron)):
        assert lineage.adapts(adapter, tmp_path / "adapter", made, tmp_path / directory)
    assert lineage.adapts(adapter, tmp_path / "adapter", other, tmp_path / "other") is False
    assert lineage.adapts(source, tmp_path / "hf", other, tmp_path / "other") is None
    assert verify(tmp_path / "adapter") == []


def test_a_lossy_step_breaks_the_tie(tmp_path: Path) -> None:
    source = make(tmp_path / "hf", b"one")
    tuned = make(
        tmp_path / "tuned",
        b"two",
        parents=(Parent(role="base", id=source.id, lossless=False),),
        dirs=(tmp_path / "hf",),
    )
    adapter = make(tmp_path / "adapter", b"ab", parents=(Parent(role="base", id=tuned.id),), dirs=(tmp_path / "tuned",))
    assert lineage.adapts(adapter, tmp_path / "adapter", source, tmp_path / "hf") is False


def test_a_url_is_no_directory_here(tmp_path: Path) -> None:
    """Without this, s3://bucket/x would be written to s3:/bucket/x below the working directory."""
    for url in ("s3://bucket/x", "gs://bucket/x"):
        with pytest.raises(InputError, match="is a URL"):
            checkpoint.check_out(Path(url), overwrite=False)
    checkpoint.check_out(tmp_path / "c:" / "x", overwrite=False)

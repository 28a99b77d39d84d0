"""An output in an object store: fsspec's own in memory, and a local S3 server where moto and s3fs are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from mst_core import checkpoint, manifest, remote, resume
from mst_core.engine import saves
from mst_core.errors import InputError, MissingPackage, Stopped
from mst_core.remote import Store
from mst_train.plan import plan
from mst_train.spec import TrainSpec
from mst_train.work import work


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of a server that answers as S3 does, with a bucket."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "s3":
        settings = {"AWS_ENDPOINT_URL": request.getfixturevalue("s3"), "AWS_ACCESS_KEY_ID": "k",
                    "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
    yield f"{request.param}://bucket/runs/tuned"
    fs, _ = fsspec.url_to_fs(f"{request.param}://bucket")
    if fs.exists("bucket"):
        fs.rm("bucket", recursive=True)


class Machine:
    """Trains to one URL with a cache of its own, as another machine would."""

    def __init__(self, model: Path, data: Path, url: str, cache: Path) -> None:
        self.fields = {"model": str(model), "data": (data,), "out": url, "cache": cache, "global_batch": 4, "steps": 6,
                       "lr": 3e-3, "precision": "fp32", "save_every": 2}  # fmt: skip

    def train(self, **settings: Any) -> dict[str, Any]:
        spec = TrainSpec(**{**self.fields, **settings})
        return work(spec, plan(spec)).data

    def stopped(self, **settings: Any) -> None:
        """Train, and end after step 4, which is saved and copied."""
        save = saves.Saves.save

        def cut(saves: saves.Saves, step: int, done: Any) -> None:
            save(saves, step, done)
            if step == 4:
                raise Stopped("stopped")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saves.Saves, "save", cut)
            with pytest.raises(Stopped):
                self.train(**settings)


@pytest.fixture
def machine(tiny_hf: Callable[..., Path], data: Path, url: str, tmp_path: Path) -> Callable[[str], Machine]:
    return lambda name: Machine(tiny_hf("llama", num_hidden_layers=2), data, url, tmp_path / name)


def test_a_run_is_there_whole_and_nothing_else(machine: Callable[[str], Machine], url: str, tmp_path: Path) -> None:
    made = machine("a").train()
    assert made["out"] == url
    store = Store(url)
    store.get("", tmp_path / "copy")
    assert checkpoint.verify(tmp_path / "copy") == []
    assert manifest.read(tmp_path / "copy").id == made["id"]
    assert store.partial.names() == []
    assert not list((tmp_path / "a" / "outputs").rglob("*.json"))
    local = machine("b").train(out=tmp_path / "local")
    assert local["id"] == made["id"]
    with pytest.raises(InputError, match="exists") as caught:
        machine("a").train()
    assert caught.value.where == url
    again = machine("a").train(overwrite=True, seed=1)
    assert again["id"] != made["id"]
    shutil.rmtree(tmp_path / "copy")
    store.get("", tmp_path / "copy")
    assert checkpoint.verify(tmp_path / "copy") == []


def test_another_machine_goes_on(
    machine: Callable[[str], Machine], url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("a").stopped()
    store = Store(url).partial
    assert store.steps() == [2, 4]
    assert "metrics.jsonl" in store.names()
    assert not Store(url).whole()
    with pytest.raises(InputError, match="was stopped, and step 4 is saved"):
        machine("b").train()
    made = machine("b").train(resume=True)
    assert "goes on after step 4 of 6" in capsys.readouterr().err
    Store(url).get("", tmp_path / "copy")
    rows = (tmp_path / "copy" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert made["id"] == machine("c").train(out=tmp_path / "local")["id"]


def test_what_is_broken_or_half_there_is_passed_over(
    machine: Callable[[str], Machine], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("a").stopped()
    store = Store(url).partial
    name = f"{resume.FOLDER}/{resume.name_of(4)}"
    store.fs.pipe_file(f"{store.root}/{name}/state/state.pt", b"torn")
    store.fs.pipe_file(f"{store.root}/{resume.FOLDER}/{resume.name_of(5)}/model.safetensors", b"no manifest yet")
    machine("b").train(resume=True)
    err = capsys.readouterr().err
    assert "step-00000004 is broken and passed over: state/state.pt" in err
    assert "goes on after step 2 of 6" in err
    assert store.names() == []


def test_old_checkpoints_go_and_the_newest_stay(machine: Callable[[str], Machine], url: str) -> None:
    seen = []
    publish = remote.publish

    def watched(to: str, staged: Path, step: int) -> None:
        publish(to, staged, step)
        seen.append(Store(to).partial.steps())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "publish", watched)
        machine("a").train(save_every=1, keep=2)
    assert seen == [[1], [1, 2], [2, 3], [3, 4], [4, 5]]


def test_a_store_that_refuses_the_output_gets_it_later(
    machine: Callable[[str], Machine], url: str, tmp_path: Path
) -> None:
    def refuse(self: Store, directory: Path, name: str = "", only: Any = None) -> None:
        with remote._refusals(self.url):
            raise OSError(28, "Insufficient storage")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "put", refuse)
        with pytest.raises(InputError, match="the store refuses") as caught:
            machine("a").train(save_every=None)
    assert "--resume goes on" in str(caught.value.hint)
    with pytest.raises(InputError, match="was not copied there"):
        machine("a").train()
    made = machine("a").train(resume=True)
    assert made["out"] == url
    Store(url).get("", tmp_path / "copy")
    assert manifest.read(tmp_path / "copy").id == made["id"]


def test_a_finished_run_is_extended_on_another_machine(
    machine: Callable[[str], Machine], url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a local one is: the same id, each step once; refused where its state was not kept, or nothing is to do."""
    settings = {"keep_state": True, "schedule": "constant", "save_every": None}
    machine("a").train(steps=4, **settings)
    with pytest.raises(InputError, match="it has done its 4 steps"):
        machine("b").train(steps=4, resume=True, **settings)
    with pytest.raises(InputError, match="lr was"):
        machine("b").train(steps=6, resume=True, lr=1e-3, **{**settings, "save_every": 1})
    assert Store(url).whole()
    made = machine("c").train(steps=6, resume=True, **settings)
    assert "goes on after step 4 of 6" in capsys.readouterr().err
    Store(url).get("", tmp_path / "copy")
    assert checkpoint.verify(tmp_path / "copy") == []
    rows = (tmp_path / "copy" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert Store(url).partial.names() == []
    for more in ({"steps": 4}, {"steps": 6, "resume": True}):
        local = machine("d").train(out=tmp_path / "local", **more, **settings)
    assert local["id"] == made["id"]
    machine("a").train(steps=7, resume=True, **{**settings, "keep_state": False})
    with pytest.raises(InputError, match="exists, without the state that --keep-state would have kept"):
        machine("a").train(steps=8, resume=True, **settings)


def test_an_extension_that_is_stopped_goes_on_from_its_own_checkpoint(
    machine: Callable[[str], Machine], url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("a").train(steps=2, keep_state=True, schedule="constant")
    machine("b").stopped(resume=True, schedule="constant")  # it saves step 4, of 6
    assert Store(url).whole()
    assert Store(url).partial.steps() == [4]
    with pytest.raises(InputError, match="exists"):
        machine("c").train(schedule="constant")
    machine("c").train(resume=True, schedule="constant")
    assert "goes on after step 4 of 6" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["memory"], indirect=True)
def test_whatever_the_store_refuses_the_old_output_or_the_new_is_there(
    machine: Callable[[str], Machine], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses the first file of the new output, then the second, and so on to the last removal."""
    old = machine("a").train(steps=2, keep_state=True, schedule="constant")["id"]
    store = Store(url)
    store.get("", tmp_path / "old")
    with monkeypatch.context() as patch:
        patch.setattr(remote, "finish", lambda url, out: None)
        new = machine("b").train(steps=4, resume=True, schedule="constant")["id"]
    spec = TrainSpec(**{**machine("b").fields, "resume": True, "steps": 4})
    shutil.copytree(spec.out, tmp_path / "new")
    allowed, seen, left = 0, [], 0
    calls = {name: getattr(store.fs, name) for name in ("put_file", "cp_file", "rm_file")}

    def counted(name: str, *words: Any) -> None:
        nonlocal left
        left -= 1
        with remote._refusals(url):
            if left < 0:
                raise OSError(28, "Insufficient storage")
        calls[name](*words)

    while not seen or seen[-1] != "done":
        store.put(tmp_path / "old")
        store.partial.remove()
        shutil.copytree(tmp_path / "new", spec.out, dirs_exist_ok=True)
        left = allowed
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(store.fs, name, lambda *words, name=name: counted(name, *words))
            try:
                remote.finish(url, spec.out)
                seen.append("done")
            except InputError:
                seen.append(whole(store.partial, remote.OUTPUT, tmp_path) or whole(store, "", tmp_path) or "lost")
        if seen[-1] != "done":
            shutil.rmtree(spec.out)  # that machine is gone; another finishes what it can
            remote.left(spec)
            assert whole(store, "", tmp_path) == seen[-1]
        allowed += 1
    assert {old, new} == set(seen) - {"done"}
    assert whole(store, "", tmp_path) == new


def whole(store: Store, name: str, tmp_path: Path) -> str | None:
    """The id of what is there whole, each file as its manifest says."""
    shutil.rmtree(tmp_path / "look", ignore_errors=True)
    if not store.whole(name):
        return None
    store.get(name, tmp_path / "look")
    return manifest.read(tmp_path / "look").id if not checkpoint.verify(tmp_path / "look") else None


def test_schemes_that_are_not_known_or_not_installed(machine: Callable[[str], Machine], monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="Protocol not known: nowhere"):
        machine("a").train(out="nowhere://x/y")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingPackage, match="needs fsspec") as caught:
        machine("a").train()
    assert caught.value.hint == "pip install 'mst-tools-core[remote]'"


def test_the_command_says_the_url(
    tiny_hf: Callable[..., Path], data: Path, tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, a real process, S3."""
    for name, value in {"AWS_ENDPOINT_URL": s3, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3").mkdir("other")
    words = ["--model", tiny_hf("llama", num_hidden_layers=2), "--data", data, "--engine", "fsdp", "--nproc", 2]
    words += ["--steps", 2, "--save-every", 1, "--global-batch", 4, "--cache", tmp_path, "--out", "s3://other/run"]
    done = subprocess.run(
        [str(Path(sys.executable).parent / "mst-train"), *map(str, words)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "s3://other/run\n"), done.stderr
    assert Store("s3://other/run").whole()

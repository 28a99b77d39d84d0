"""An --out in an object store (s3://bucket/path, or what else fsspec opens).

The run works in a directory of this machine below --cache, as any other. Each of its checkpoints is copied to
``URL.partial/checkpoints/step-N`` when it is whole, and at the end OUT to ``URL``; then both copies here are removed. A
store has no rename, so the manifest is written last and removed first: what has none is not whole. An output that is to
replace a whole one (--overwrite, more steps of a finished run) is first made whole as ``URL.partial/output`` and then
copied within the store: at every moment one of them is there. --resume fetches the newest whole checkpoint that is not
here; a finished run that kept its state is one. Nothing keeps two machines from working on one URL.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mst_core import checkpoint, console, files, manifest, resume
from mst_core.errors import InputError, MissingPackage, MstError
from mst_core.spec import Result

if TYPE_CHECKING:
    from mst_core.runspec import RunSpec


OUTPUT = "output"
"""Below URL.partial: what is to replace a whole output."""


class Store:
    """The directory ``url`` of a store. Raises InputError for what the store refuses, MissingPackage for a client."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise MissingPackage(f"{url} needs fsspec", hint="pip install 'mst-tools-core[remote]'") from error
        self.url = url.rstrip("/")
        try:
            with _refusals(url):
                self.fs, self.root = fsspec.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise MissingPackage(f"{url}: {error}", hint="pip install 'mst-tools-core[remote]'") from error
        except ValueError as error:
            raise InputError(str(error), where=url) from error

    @property
    def partial(self) -> Store:
        """Where the run that makes this directory keeps its checkpoints."""
        return Store(f"{self.url}.partial")

    def whole(self, name: str = "") -> bool:
        """Whether the directory ``name`` in it has a manifest."""
        return self.has(_join(name, manifest.NAME))

    def has(self, name: str) -> bool:
        """Whether there is a file ``name``."""
        with _refusals(self.url):
            return bool(self.fs.isfile(_join(self.root, name)))

    def names(self, name: str = "") -> list[str]:
        """Every file below ``name``, relative to it."""
        below = _join(self.root, name)
        with _refusals(self.url):
            found = self.fs.find(below)
        return sorted(path[path.index(below) + len(below) + 1 :] for path in found)

    def steps(self) -> list[int]:
        """The steps whose checkpoints are whole, oldest first."""
        ends = f"/{manifest.NAME}"
        held = [name.removesuffix(ends) for name in self.names(resume.FOLDER) if name.endswith(ends)]
        return sorted(int(name[5:]) for name in held if re.fullmatch(r"step-\d+", name))

    def put(self, directory: Path, name: str = "", only: Sequence[str] | None = None) -> None:
        """Copy the files of ``directory`` (``only`` those) to ``name``, its manifest last; of a whole directory the old
        manifest goes first, and what is no longer in it at the end."""
        wanted = files.listing(directory) if only is None else list(only)
        if only is None:
            self.remove(name, [manifest.NAME])
        with _refusals(self.url):
            for file in sorted(wanted, key=lambda file: file == manifest.NAME):
                if file == manifest.NAME:
                    self.remove(name, sorted(set(self.names(name)) - set(wanted)))
                self.fs.put_file(str(directory / file), _join(self.root, name, file))

    def get(self, name: str, directory: Path, only: Sequence[str] | None = None) -> None:
        """Copy what is in ``name`` (``only`` those files) to ``directory``."""
        with _refusals(self.url):
            for file in self.names(name) if only is None else only:
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                self.fs.get_file(_join(self.root, name, file), str(directory / file))

    def take(self, other: Store, name: str) -> None:
        """Become what the directory ``name`` of ``other`` is, the manifest last."""
        wanted = other.names(name)
        self.remove(only=[manifest.NAME])
        with _refusals(self.url):
            for file in sorted(wanted, key=lambda file: file == manifest.NAME):
                if file == manifest.NAME:
                    self.remove(only=sorted(set(self.names()) - set(wanted)))
                self._copy(_join(other.root, name, file), _join(self.root, file))

    def _copy(self, source: str, target: str) -> None:
        try:
            self.fs.cp_file(source, target)
        except NotImplementedError:  # of a client whose store cannot
            with tempfile.NamedTemporaryFile() as file:
                self.fs.get_file(source, file.name)
                self.fs.put_file(file.name, target)

    def remove(self, name: str = "", only: Sequence[str] | None = None) -> None:
        """Remove the files in ``name`` (``only`` those), all manifests first."""
        with _refusals(self.url):
            there = set(self.names(name))
            gone = there if only is None else there & set(only)
            for file in sorted(gone, key=lambda file: file.rpartition("/")[2] != manifest.NAME):
                self.fs.rm_file(_join(self.root, name, file))


def check_out(url: str, out: Path, overwrite: bool, going_on: bool) -> None:
    """Refuse a URL that a run may not write to. For plans; as checkpoint.check_out, and for a run that was stopped."""
    store = Store(url)
    if overwrite:
        return
    done = (out / manifest.NAME).exists() or store.partial.whole(OUTPUT)
    if store.whole() and not (going_on and (done or store.has(resume.RUN))):
        what = "exists" + (", without the state that --keep-state would have kept" if going_on else "")
        raise InputError(what, where=url, hint="--overwrite replaces it, or choose another --out")
    if going_on:
        return
    if steps := store.partial.steps():
        what = f"a run to it was stopped, and step {steps[-1]} is saved"
        raise InputError(what, where=url, hint="--resume goes on, --overwrite starts again")
    if done:
        what = f"a finished run to it, in {out if out.exists() else store.partial.url}, was not copied there"
        raise InputError(what, where=url, hint="--resume copies it, --overwrite starts again")


def fetch(url: str, staged: Path) -> None:
    """What a run to ``url`` that was stopped elsewhere, or is to be extended, goes on from: into ``staged``, its
    OUT.partial here."""
    out, store = Store(url), Store(url).partial
    found = [(step, store, f"{resume.FOLDER}/{resume.name_of(step)}") for step in store.steps()]
    if out.whole() and out.has(resume.RUN):
        with _refusals(url):
            told = json.loads(out.fs.cat_file(_join(out.root, resume.RUN)))
        found.append((told["step"], out, ""))
    for step, origin, name in sorted(found, key=lambda one: one[0], reverse=True):
        place = staged / resume.FOLDER / resume.name_of(step)
        if place.is_dir():
            return
        console.say(f"fetches {_join(origin.url, name)}")
        made = place.with_name(f"{place.name}.fetched")
        shutil.rmtree(made, ignore_errors=True)
        origin.get(name, made)
        made.rename(place)
        with_it = [file for file in origin.names() if file.startswith(resume.HISTORY)]
        origin.get("", staged, with_it)
        try:
            if not checkpoint.verify(place):
                return
        except MstError:
            continue  # the run names it, and passes it over


def publish(url: str, staged: Path, step: int) -> None:
    """Copy the checkpoint of ``step`` to the store, and remove there those that are no longer here."""
    store = Store(url).partial
    store.put(staged / resume.FOLDER / resume.name_of(step), f"{resume.FOLDER}/{resume.name_of(step)}")
    store.put(staged, only=[file for file in files.listing(staged) if file.startswith(resume.HISTORY)])
    kept = {number for number, _ in resume.steps_in(staged / resume.FOLDER)}
    for old in set(store.steps()) - kept:
        store.remove(f"{resume.FOLDER}/{resume.name_of(old)}")


def finish(url: str, out: Path) -> None:
    """Copy the output to the store, and remove what the run kept there and here."""
    store = Store(url)
    console.say(f"copies {out} to {url}")
    if store.whole():
        store.partial.put(out, OUTPUT)
        store.take(store.partial, OUTPUT)
    else:
        store.put(out)
    store.partial.remove()
    shutil.rmtree(out)


def left(spec: RunSpec) -> Result | None:
    """Copy what a finished run left here, or beside its place in the store, when the store refused it; None if nothing
    was left, or --overwrite."""
    if spec.remote is None or spec.overwrite:
        return None
    store, here = Store(spec.remote), (spec.out / manifest.NAME).exists()
    if not here and not store.partial.whole(OUTPUT):
        return None
    if spec.place.index:
        raise SystemExit(0)  # another process does it
    if here:
        made = manifest.read(spec.out)
        finish(spec.remote, spec.out)
    else:
        console.say(f"copies {store.partial.url}/{OUTPUT} to {spec.remote}")
        store.take(store.partial, OUTPUT)
        with tempfile.TemporaryDirectory() as folder:
            store.get("", Path(folder), [manifest.NAME])
            made = manifest.read(Path(folder))
        store.partial.remove()
    return Result(text=spec.remote, data={"out": spec.remote, "id": made.id})


def _join(*parts: str) -> str:
    return "/".join(part for part in parts if part)


@contextmanager
def _refusals(url: str) -> Iterator[None]:
    failures: tuple[Any, ...] = (OSError,)
    try:
        from botocore.exceptions import BotoCoreError

        failures = (OSError, BotoCoreError)
    except ImportError:
        pass
    try:
        yield
    except failures as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "what is here stays: --resume goes on when the store answers"
        raise InputError(f"the store refuses: {first}", where=url, hint=hint) from error

"""The chain of parents: who was made from whom, and whether two directories hold the same weights.

Each output keeps its ancestors' manifests in ``lineage/``, so the chain can be walked without the ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mst_core import manifest
from mst_core.checkpoint import LINEAGE
from mst_core.manifest import Manifest, Parent


def ancestors(directory: Path) -> dict[str, Manifest]:
    """The manifests kept in ``lineage/``, by id. Raises InputError if one was edited."""
    found = (manifest.parse(path.read_bytes(), path) for path in sorted((directory / LINEAGE).glob("*.json")))
    return {parent.id: parent for parent in found}


def walk(directory: Path) -> Iterator[tuple[int, Parent | None, Manifest | None, str]]:
    """(depth, the link, the manifest if it is kept, the id), the directory itself first, depth first."""
    start = manifest.identify(directory)
    known = ancestors(directory)

    def below(made: Manifest, depth: int) -> Iterator[tuple[int, Parent | None, Manifest | None, str]]:
        for parent in made.parents:
            kept = known.get(parent.id)
            yield depth, parent, kept, parent.id
            if kept is not None:
                yield from below(kept, depth + 1)

    yield 0, None, start, start.id
    yield from below(start, 1)


def same_weights(identity: str, weights: str | None, known: dict[str, Manifest]) -> set[str]:
    """Every id and weights digest that stands for the same weights: itself, and what lossless conversions tie to it."""
    names = {identity} | ({weights} if weights else set())
    made = known.get(identity)
    if made is not None:
        names |= {made.digests.weights} if made.digests.weights else set()
        for parent in made.parents:
            if parent.lossless:
                names |= same_weights(parent.id, parent.weights, known)
    return names


def adapts(adapter: Manifest, adapter_dir: Path, base: Manifest, base_dir: Path) -> bool | None:
    """Whether the adapter was trained on these very weights, in this or another layout, or on what they became when
    they were given the tokens whose rows it holds (``grown_from``).

    None when the adapter does not say what it was trained on (a plain PEFT directory).
    """
    parent = adapter.parent("base")
    if parent is None:
        return None
    known = ancestors(adapter_dir)
    trained_on = same_weights(parent.id, parent.weights, known)
    if origin := grown_from(adapter, known):
        trained_on |= same_weights(origin.id, origin.weights, known)
    given = same_weights(base.id, base.digests.weights, {base.id: base, **ancestors(base_dir)})
    return bool(trained_on & given)


def grown_from(adapter: Manifest, known: dict[str, Manifest]) -> Parent | None:
    """The base of before --add-tokens, if the adapter holds every row that was added to it."""
    parent, tokens = adapter.parent("base"), _added(adapter)
    grown = known.get(parent.id) if parent else None
    return grown.parent("base") if grown and tokens and _added(grown) == tokens else None


def _added(made: Manifest) -> list[str] | None:
    """The tokens of --add-tokens that it holds: its own rows, or a grown model's."""
    return made.made_by.settings.get("add_tokens") if made.made_by else None

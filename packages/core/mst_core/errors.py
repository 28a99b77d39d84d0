"""Every error a user can meet, and the exit code beside it.

    MstError                 1   a bug in mst: never raised on purpose
    +- SettingsError         2   a flag, a YAML key or two settings that contradict each other
    +- InputError            3   a directory, a tensor, a row or a plan that cannot be used
    |  +- RowError           3   one row of data: file, line, reason
    +- MissingPackage        4   something to install; the hint is the pip line
    +- RunError              5   NaN, a dead rank, an engine or a collective that gave up
    +- Stopped               6   stopped on request (SIGTERM, Ctrl-C)

An error says what is wrong, where (file, row, tensor, flag) and what to type next.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class MstError(Exception):
    """The base of all errors: ``what`` happened, ``where``, and a ``hint`` with the next command."""

    exit_code = 1

    def __init__(self, what: str, *, where: str | Path | None = None, hint: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.what if self.where is None else f"{self.where}: {self.what}"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (ranks, launchers): rebuild from the parts, not from the text.
        return (_rebuild, (type(self), self.what, self.where, self.hint))


def _rebuild(kind: type[MstError], what: str, where: str | None, hint: str | None) -> MstError:
    return kind(what, where=where, hint=hint)


class SettingsError(MstError):
    """A flag or a YAML key is wrong, or two settings contradict each other."""

    exit_code = 2


class InputError(MstError):
    """A checkpoint, a tensor, a file or a plan cannot be used as asked."""

    exit_code = 3


class RowError(InputError):
    """One row of data cannot be used. ``where`` is ``file:line``."""


class MissingPackage(MstError):
    """An optional package is not installed."""

    exit_code = 4


class RunError(MstError):
    """The run itself failed: a NaN, a rank or an engine that died, a collective that hung."""

    exit_code = 5


class Stopped(MstError):
    """The run was asked to stop and did so cleanly."""

    exit_code = 6


def many(errors: Iterable[MstError], *, what: str, hint: str | None = None, show: int = 20) -> MstError:
    """Join several errors of one kind into one that lists them, each on its line."""
    found = list(errors)
    lines = [f"  {error}" for error in found[:show]]
    if len(found) > show:
        lines.append(f"  ... and {len(found) - show} more")
    return type(found[0])("\n".join([what, *lines]), hint=hint or found[0].hint)

"""What a person sees while a tool works. Everything goes to stderr; stdout is for results (cli.py).

On a terminal progress is a live bar (rich); elsewhere it is a plain line every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_EVERY_S = 5.0
"""Seconds between two progress lines where stderr is not a terminal."""


def say(text: str) -> None:
    """One line for the user."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def warn(text: str) -> None:
    """One line that should not be overlooked."""
    say(f"warning: {text}")


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> None:
    """A small table. Without a header the first column holds names."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = None if sys.stderr.isatty() else 120
    drawn = Table(title=title, title_justify="left", show_header=bool(header), box=box.SIMPLE_HEAD if header else None)
    rows = [list(map(str, row)) for row in rows]
    for index in range(len(header) or max((len(row) for row in rows), default=0)):
        drawn.add_column(header[index] if header else "", overflow="fold", no_wrap=False)
    for row in rows:
        drawn.add_row(*row)
    Console(file=sys.stderr, width=width, highlight=False, markup=False).print(drawn)


class Bar(Protocol):
    """Progress of one piece of work."""

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""

    def note(self, text: str) -> None:
        """A short text beside the bar, replacing the last one."""


@contextmanager
def progress(title: str, total: float, unit: str = "") -> Iterator[Bar]:
    """Progress towards ``total`` units ("B", "step", "row"), with a rate."""
    if not sys.stderr.isatty():
        plain = _PlainBar(title, total, unit)
        yield plain
        plain.finish()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as live:
        yield _RichBar(live, live.add_task(title, total=total, amount="", note=""), total, unit)


class _RichBar:
    def __init__(self, live: Progress, task: TaskID, total: float, unit: str) -> None:
        self._live, self._task, self._total, self._unit = live, task, total, unit
        self._done, self._start = 0.0, time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        amount_text = _amount(self._done, self._total, self._unit, time.monotonic() - self._start)
        self._live.update(self._task, advance=amount, amount=amount_text)

    def note(self, text: str) -> None:
        self._live.update(self._task, note=text)


class _PlainBar:
    def __init__(self, title: str, total: float, unit: str) -> None:
        self._title, self._total, self._unit = title, total, unit
        self._done, self._note = 0.0, ""
        self._start = self._last = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._done += amount
        if time.monotonic() - self._last >= PLAIN_EVERY_S:
            self._line()

    def note(self, text: str) -> None:
        self._note = text

    def finish(self) -> None:
        if self._total:
            self._line()

    def _line(self) -> None:
        self._last = time.monotonic()
        amount = _amount(self._done, self._total, self._unit, self._last - self._start)
        say(f"{self._title}: {amount}" + (f", {self._note}" if self._note else ""))


def _amount(done: float, total: float, unit: str, seconds: float) -> str:
    rate = done / seconds if seconds > 0 else 0.0
    if unit == "B":
        return f"{size(done)} of {size(total)}, {size(rate)}/s"
    return f"{done:g} of {total:g} {unit}s, {rate:.3g}/s" if unit else f"{done:g} of {total:g}"


def size(count: float) -> str:
    """Bytes for a person: 1.5 GB (powers of 1000, as disks and files are sold)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"

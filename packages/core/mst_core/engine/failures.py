"""How ranks end: what each leaves in a folder of its node, and the one error that the run ends with.

    log-N     what rank N wrote to stdout and stderr (the launching process repeats it on its own stderr)
    error-N   the MstError that it raised, pickled; bug-N: the traceback of anything else
    hung-N    the collective in which it waited longer than --timeout. It then stays until ``known`` is there
    stack-N   where it stands, written by faulthandler when it is sent SIGUSR1
    known     the error about a hung collective: which ranks waited, for whom, and where that one stands

On several nodes the launching processes tell one another through the TCPStore of their rendezvous. Ranks that another
launcher started have no such folder: see asking.py.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import NoReturn

from mst_core import cluster, console, resume
from mst_core.checkpoint import partial
from mst_core.errors import MstError, RunError, Stopped

WAITED = re.compile(r"Timed out waiting|Wait timeout|[Tt]imed out after|Connection timed out|timed out", re.IGNORECASE)
"""What torch says of a collective, or of a rendezvous, that nobody came to."""
ECHO = re.compile(
    r"closed by peer|[Cc]onnection (closed|reset|refused)|Broken pipe|remote process exited|ncclRemoteError|"
    r"failed to (recv|connect)|DistNetworkError"
)
"""What a rank says when another one is gone."""
SHOWN_LINES, SHOWN_RANKS = 10, 8
PATIENCE = 15.0
"""Seconds that a rank, or a node, waits for the others' word."""


# --- in a rank ---------------------------------------------------------------------------------------------------


def enter(folder: Path) -> None:
    """Send what this rank writes to its log, and be ready to say where it stands."""
    number = cluster.rank()
    log = (folder / f"log-{number}").open("wb", buffering=0)
    log.write(f"rank {number}, process {os.getpid()} on {socket.gethostname()}\n".encode())
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    stack = os.open(folder / f"stack-{number}", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    _put(folder, "pid", str(os.getpid()).encode())


@contextmanager
def leaving(folder: Path) -> Iterator[None]:
    """Of whatever ends the rank inside, say why, and end it."""
    try:
        yield
    except BaseException as error:  # Ctrl-C and SystemExit end a rank as well
        _leave(folder, error)
        raise


def _leave(folder: Path, error: BaseException) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        error = Stopped("interrupted")
    waited = waited_in(error)
    if waited is not None:
        _put(folder, "hung", pickle.dumps(waited))
        end = time.monotonic() + PATIENCE
        while not (folder / "known").exists() and time.monotonic() < end:
            time.sleep(0.1)
    elif isinstance(error, MstError):
        _put(folder, "error", pickle.dumps(error))
    else:
        _put(folder, "bug", "".join(traceback.format_exception(error)).encode())
        if ECHO.search(str(error)):
            time.sleep(1.0)  # torch tells of the rank that ended first: let it be the one that is gone
    sys.stdout.flush()
    sys.stderr.flush()
    code = RunError.exit_code if waited else getattr(error, "exit_code", MstError.exit_code)
    # Not sys.exit: leaving process groups in good order would wait for ranks that are not coming.
    os._exit(code)


def _put(folder: Path, kind: str, content: bytes) -> None:
    temporary = folder / f".{cluster.rank()}"
    temporary.write_bytes(content)
    temporary.rename(folder / f"{kind}-{cluster.rank()}")


def waited_in(error: BaseException) -> str | None:
    """``all_reduce (mst_core/engine/ranks.py:41, in summed)``, if ``error`` is a collective's that nobody came to."""
    if not isinstance(error, RuntimeError) or isinstance(error, MstError) or not WAITED.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    name = next((frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")), None)
    outside = [frame for frame in frames if "/torch/" not in frame.filename]
    if not outside:
        return None
    last = outside[-1]
    return f"{name or last.line} ({_short(last.filename)}:{last.lineno}, in {last.name})"


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-3:])


# --- in the process that started the ranks -----------------------------------------------------------------------


def stand(folder: Path, seconds: float = 2.0) -> dict[int, str]:
    """Of each rank here that waits for nobody and still runs: where it stands."""
    said = {int(path.name.partition("-")[2]) for kind in ("hung", "error", "bug") for path in folder.glob(f"{kind}-*")}
    asked: dict[int, str] = {}
    for path in folder.glob("pid-*"):
        number, pid = int(path.name.partition("-")[2]), int(path.read_text())
        state = _state(pid)
        if number in said or state is None:
            continue
        if state in "Tt":
            asked[number] = f"is stopped (process {pid}, by a signal or a debugger)"
        else:
            os.kill(pid, signal.SIGUSR1)
            asked[number] = "does not say where it stands"
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all((folder / f"stack-{number}").stat().st_size for number in asked):
        time.sleep(0.1)
    time.sleep(0.2)  # it is written frame by frame
    return {number: _innermost(folder / f"stack-{number}") or otherwise for number, otherwise in asked.items()}


def _state(pid: int) -> str | None:
    """The letter of a process's state; None if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0].replace("Z", "") or None
    except OSError:
        return None


def _innermost(stack: Path) -> str | None:
    """Where the main thread stands, by faulthandler's words: the innermost frame, and the innermost outside torch."""
    for thread in stack.read_text(errors="replace").split("\n\n"):
        frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', thread)
        if any(name == "_rank" for _, _, name in frames):
            return standing([FrameSummary(path, int(line), name) for path, line, name in reversed(frames)])
    return None


def standing(frames: Sequence[FrameSummary]) -> str:
    """Where a thread stands: the innermost of ``frames`` (as traceback has them, outermost first) outside torch."""
    found = next((frame for frame in reversed(frames) if "/torch/" not in frame.filename), frames[-1])
    return f"stands in {found.name} ({_short(found.filename)}:{found.lineno})"


def explain(waiting: Mapping[int, str], standing: Mapping[int, str], timeout: float) -> RunError:
    """The error about a hung collective: who waited where, and who did not come."""
    places: dict[str, list[int]] = {}
    for number, where in sorted(waiting.items()):
        places.setdefault(where, []).append(number)
    waits = [f"{_ranks(numbers)} waited {timeout:g} s in {where}" for where, numbers in places.items()]
    missing = [f"rank {number}, which {where}" for number, where in sorted(standing.items())]
    what = "; ".join(waits) + (f", for {'; '.join(missing)}" if missing else "")
    return RunError(what, hint="where a rank was only slow, a longer --timeout lets the others wait")


def _ranks(numbers: list[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"


def waiting(folder: Path) -> dict[int, str]:
    """The ranks here that waited too long, and in what."""
    return {int(path.name.partition("-")[2]): pickle.loads(path.read_bytes()) for path in folder.glob("hung-*")}


def reason(folder: Path, codes: Mapping[int, int]) -> MstError:
    """What ended the run: a hung collective, a rank's MstError, else the rank that was killed, else the first bug.

    A rank that ends takes the others with it: their complaints (a closed connection) come as bugs, and being ended by
    the launcher as Stopped. ``codes``: the exit codes of the ranks that failed.
    """
    if (folder / "known").exists():
        known: MstError = pickle.loads((folder / "known").read_bytes())
        return known
    found: list[MstError] = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("error-*"))]
    reasons = [error for error in found if not isinstance(error, Stopped)]
    if reasons:
        return min(reasons, key=lambda error: isinstance(error, RunError))
    if not found and set(codes.values()) == {-signal.SIGTERM}:  # asked to stop before the ranks could say so
        return Stopped("stopped by SIGTERM before the first step")
    for number, code in sorted(codes.items()):
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            hint = "the machine may have run out of memory: fewer rows in --micro-batch, or more ranks"
            return RunError(f"rank {number} was killed by {name}; the others were stopped", hint=hint)
    bugs = sorted(folder.glob("bug-*"), key=lambda path: path.stat().st_mtime_ns)
    for path in sorted(bugs, key=lambda path: bool(ECHO.search(_last(path)))):
        console.say(path.read_text(encoding="utf-8"))
        number_of = path.name.partition("-")[2]
        return RunError(f"rank {number_of} failed: {_last(path)}", hint="its traceback stands above")
    if found:
        return found[0]
    number, code = next(iter(sorted(codes.items())))
    return RunError(f"rank {number} ended with code {code}; the others were stopped")


def is_echo(folder: Path) -> bool:
    """Whether all that ranks here complain of is that somebody else is gone."""
    bugs = list(folder.glob("bug-*"))
    if (folder / "known").exists() or list(folder.glob("error-*")):
        return False
    return bool(bugs) and all(ECHO.search(_last(path)) for path in bugs)


def _last(bug: Path) -> str:
    return bug.read_text(encoding="utf-8").strip().splitlines()[-1]


def show(folder: Path, out: Path | None) -> None:
    """The last lines of each rank's log. All of them are kept in OUT.partial/logs where that is kept."""
    logs = sorted(folder.glob("log-*"), key=lambda path: int(path.name[4:]))
    for log in logs[:SHOWN_RANKS]:
        head, *lines = log.read_text(errors="replace").splitlines() or [log.name]
        console.say(f"{head}: {'its last lines' if lines else 'it wrote nothing'}")
        for line in lines[-SHOWN_LINES:]:
            console.say(f"  | {line}")
    if len(logs) > SHOWN_RANKS:
        console.say(f"and {len(logs) - SHOWN_RANKS} more ranks")
    if out is not None and partial(out).is_dir():
        keep = partial(out) / "logs"
        keep.mkdir(exist_ok=True)
        for log in logs:
            number = int(log.name[4:])
            shutil.copyfile(log, kept := keep / f"rank-{number:05d}.log")
            if (bug := folder / f"bug-{number}").exists():
                kept.write_text(kept.read_text(errors="replace") + bug.read_text())
        console.say(f"the whole logs are in {keep}")


def with_checkpoint(error: MstError, out: Path | None) -> MstError:
    """``error``, its hint naming the step that a run which failed has saved."""
    step = resume.stopped_at(out) if out is not None and isinstance(error, RunError) else None
    if step is None:
        return error
    hint = f"step {step} is saved, --resume goes on from it" + (f"; {error.hint}" if error.hint else "")
    return type(error)(error.what, where=error.where, hint=hint)


def echo(folder: Path, seen: dict[Path, int]) -> None:
    """Repeat on stderr what ranks wrote since the last call, in whole lines; ``seen`` holds how far that was."""
    for log in sorted(folder.glob("log-*")):
        with log.open("rb") as file:
            file.seek(seen.get(log, 0))
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole:
            continue
        new = whole if log in seen else whole.partition(b"\n")[2]  # the first line is for the log alone
        seen[log] = seen.get(log, 0) + len(whole)
        if new:
            sys.stderr.write(new.decode(errors="replace"))
            sys.stderr.flush()


def end(folder: Path) -> None:
    """End the ranks here. SIGTERM would wait for what a stopped or a hung one does not do."""
    for path in folder.glob("pid-*"):
        if _state(pid := int(path.read_text())):
            os.kill(pid, signal.SIGKILL)

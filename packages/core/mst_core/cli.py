"""Run a tool's command: parse, plan, ``--dry-run``, work, and catch errors once.

stdout carries the result and nothing else; the exit codes are those of errors.py.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mst_core import cluster, console
from mst_core.errors import InputError, MissingPackage, MstError, SettingsError, Stopped
from mst_core.spec import Plan, Result, Settings, Spec
from mst_core.version import VERSION

Command = tuple[type[Settings], Callable[[Any], Plan] | str, str]
"""(settings, plan, work). Plan and work may be "module:function": imported when they are needed."""


def run(
    commands: Mapping[str, Command],
    *,
    prog: str,
    description: str,
    default: str | None = None,
    argv: list[str] | None = None,
) -> NoReturn:
    """Run one of ``commands`` (``default`` when the first word names none) and exit."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        stop_on_sigterm()
        code = _run(commands, prog, description, default, argv)
    except MstError as error:
        if not (isinstance(error, SettingsError) and cluster.silent()):
            _report(prog, error)
        code = error.exit_code
    except KeyboardInterrupt:
        _report(prog, Stopped("interrupted; nothing was written"))
        code = Stopped.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR):
            code = _bug(prog, error)
        else:
            _report(prog, InputError(error.strerror or str(error), where=error.filename))
            code = InputError.exit_code
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        code = _bug(prog, error)
    sys.stdout.flush()
    sys.exit(code)


def stop_on_sigterm() -> None:
    """From now on SIGTERM raises Stopped, so that a work in progress is cleared away as after any other error."""

    def stop(number: int, frame: Any) -> NoReturn:
        raise Stopped("stopped by SIGTERM; nothing was written")

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


def load(name: str) -> Callable[..., Any]:
    """The function "module:function". A package of somebody else that is missing becomes MissingPackage."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("mst_"):
            raise
        raise MissingPackage(f"the package {missing} is needed here", hint=f"pip install {missing}") from error


def _run(commands: Mapping[str, Command], prog: str, description: str, default: str | None, argv: list[str]) -> int:
    if argv[:1] == ["--version"]:
        sys.stdout.write(f"{prog} {VERSION}\n")
        return 0
    name = argv[0] if argv and argv[0] in commands else default
    if name is None:
        if not argv or argv[0] in ("-h", "--help"):
            sys.stdout.write(_overview(commands, prog, description))
            return 0
        raise SettingsError(f"{argv[0]}: no such command", hint=f"one of: {', '.join(commands)}")
    words = argv[1:] if argv and argv[0] == name else argv
    spec_type, plan, work = commands[name]
    shown = prog if name == default else f"{prog} {name}"
    spec = spec_type.parse(words, prog=shown, description=spec_type.__doc__ if name != default else description)
    planned: Plan = (load(plan) if isinstance(plan, str) else plan)(spec)
    if isinstance(spec, Spec) and spec.dry_run:
        if spec.json_output:
            sys.stdout.write(json.dumps(planned.model_dump(mode="json"), ensure_ascii=False) + "\n")
        else:
            console.table(planned.title, planned.rows())
        return 0
    result: Result = planned.instead(shown, words) or load(work)(spec, planned)
    sys.stdout.write((json.dumps(result.data, ensure_ascii=False) if spec.json_output else result.text) + "\n")
    return int(result.data.get("exit_code", 0))


def _overview(commands: Mapping[str, Command], prog: str, description: str) -> str:
    width = max(map(len, commands))
    lines = [f"usage: {prog} COMMAND ...", "", description, ""]
    lines += [f"  {name:<{width}}  {(spec.__doc__ or '').splitlines()[0]}" for name, (spec, _, _) in commands.items()]
    return "\n".join([*lines, "", f"{prog} COMMAND --help tells more.", ""])


def _report(prog: str, error: MstError) -> None:
    console.say(f"{prog}: error: {error}")
    if error.hint:
        console.say(f"  hint: {error.hint}")
    if os.environ.get("MST_DEBUG"):
        traceback.print_exc()


def _bug(prog: str, error: BaseException) -> int:
    console.say(f"{prog}: internal error: {type(error).__name__}: {error}")
    if os.environ.get("MST_DEBUG"):
        traceback.print_exc()
    else:
        console.say("  hint: this is a bug in mst; run again with MST_DEBUG=1 for the traceback")
    return MstError.exit_code

"""The base of every tool's settings: one pydantic model is the flags, the YAML file and the Python API.

``Spec.parse`` reads flags over ``--config`` and reports every mistake at once, each with its flag or its place
in the file, and a suggestion where a name is close to one that exists.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from mst_core.errors import SettingsError


class Settings(BaseSettings):
    """What every command has. Subclasses add their own; a field is a flag is a YAML key."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        populate_by_name=True,
        cli_kebab_case=True,
        cli_implicit_flags="toggle",
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="YAML file with the same names as the flags")
    json_output: bool = Field(
        False, description="print the result as JSON", validation_alias=AliasChoices("json", "json_output")
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, YAML and Python only: no environment variable is an interface."""
        return (init_settings,)

    @classmethod
    def parse(cls, argv: list[str], *, prog: str = "mst", description: str | None = None) -> Self:
        """The settings of a command line. Raises SettingsError with every mistake found."""
        mistakes: list[str] = []
        flags = _read_flags(cls, argv, prog, description, mistakes)
        file = _read_yaml(cls, flags.get("config"), mistakes)
        try:
            spec = cls(**{**file, **flags})
        except ValidationError as error:
            mistakes += [_sentence(cls, problem, from_file=file.keys() - flags.keys()) for problem in error.errors()]
        if mistakes:
            raise SettingsError(
                mistakes[0] if len(mistakes) == 1 else "\n".join(["several settings are wrong:", *mistakes]),
                hint=f"{prog} --help lists every flag",
            )
        return spec

    def effective(self, *skip: str) -> dict[str, Any]:
        """The settings that can change bytes, as JSON values: no paths, no switches of the command itself."""
        never = {"config", "overwrite", "dry_run", "json_output", "model", "data", "eval_data", "out", "adapter"}
        return self.model_dump(mode="json", exclude=never | set(skip))


class Spec(Settings):
    """What every command that writes a directory has."""

    overwrite: bool = Field(False, description="replace an existing output once the new one is whole")
    dry_run: bool = Field(False, description="print the plan and stop")


class Plan(BaseModel):
    """What a tool is about to do. ``--dry-run`` prints its rows, ``--dry-run --json`` its fields."""

    title: str

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, one line each."""
        return [(name, str(value)) for name, value in self.model_dump(mode="json").items() if name != "title"]

    def instead(self, prog: str, words: list[str]) -> Result | None:
        """What to print instead of working; ``words`` is what stood behind ``prog``. None: work."""
        return None


class Result(BaseModel):
    """What a tool did: ``text`` for a person or a pipe, ``data`` for ``--json``. Both go to stdout."""

    text: str
    data: dict[str, Any] = {}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise SettingsError(message, hint=f"{self.prog} --help lists every flag")


class _Help(argparse.HelpFormatter):
    """Short metavars: ``--data PATH`` instead of the Python type."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=100)


def parser(spec: type[Settings], prog: str, description: str | None) -> argparse.ArgumentParser:
    """The argparse parser of a spec, before pydantic-settings adds its flags."""
    return _Parser(prog=prog, description=description, allow_abbrev=False, formatter_class=_Help)


def _read_flags(
    spec: type[Settings], argv: list[str], prog: str, description: str | None, mistakes: list[str]
) -> dict[str, Any]:
    unknown: list[str] = []

    def parse_args(root: argparse.ArgumentParser, args: list[str]) -> argparse.Namespace:
        namespace, left = root.parse_known_args(args)
        unknown.extend(left)
        return namespace

    def add_argument(group: Any, *names: str, **options: Any) -> Any:
        metavar = options.get("metavar")
        if metavar:
            options["metavar"] = _metavar(metavar)
        options["help"] = re.sub(r" \(default: (None|False|\(\))\)", "", options.get("help") or "")
        return group.add_argument(*names, **options)

    source: CliSettingsSource[argparse.ArgumentParser] = CliSettingsSource(
        spec,
        cli_prog_name=prog,
        root_parser=parser(spec, prog, description),
        parse_args_method=parse_args,
        add_argument_method=add_argument,
        formatter_class=_Help,
    )
    source = source(args=argv)
    flags = {_field(spec, name) or name: value for name, value in source().items()}
    expects_value = False
    for word in unknown:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            mistakes.append(f"--{name}: no such flag{_did_you_mean(name, _flags(spec), '--')}")
            expects_value = "=" not in word
        elif not expects_value:
            mistakes.append(f"{word}: unexpected argument")
        else:
            expects_value = False
    return flags


def _read_yaml(spec: type[Settings], path: str | Path | None, mistakes: list[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        mistakes.append(f"--config: {path}: {error.strerror}")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mistakes.append(f"--config: {path} is not YAML: {' '.join(str(error).split())}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        mistakes.append(f"--config: {path} must hold names and values, not a {type(content).__name__}")
        return {}
    found: dict[str, Any] = {}
    for key, value in content.items():
        field = _field(spec, str(key).replace("-", "_"))
        if field is None or field == "config":
            mistakes.append(f"{path}: {key}: no such setting{_did_you_mean(str(key), _flags(spec))}")
        else:
            found[field] = value
    return found


def _names(spec: type[Settings]) -> Iterable[tuple[str, str]]:
    """(every name a setting goes by, its field)."""
    for field, info in spec.model_fields.items():
        alias = info.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias or field]
        for name in {field, *(choice for choice in choices if isinstance(choice, str))}:
            yield name, field


def _flags(spec: type[Settings]) -> list[str]:
    return sorted(name.replace("_", "-") for name, _ in _names(spec))


def _field(spec: type[Settings], name: str) -> str | None:
    return dict(_names(spec)).get(name.replace("-", "_"))


def _flag(spec: type[Settings], field: str) -> str:
    """The name a user knows a field by: its first alias."""
    info = spec.model_fields.get(field)
    alias = info.validation_alias if info else None
    first = alias.choices[0] if isinstance(alias, AliasChoices) else alias or field
    return str(first).replace("_", "-")


def _did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.6)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _metavar(kind: str) -> str:
    """``tuple[Path,...]`` -> PATH, ``{fp32,bf16}`` and lists of it stay, ``int`` -> INT."""
    if "{" in kind and "dict[" not in kind:
        return kind[kind.index("{") : kind.rindex("}") + 1]
    for word in ("Path", "int", "float", "str"):
        if word in kind:
            return word.upper()
    return "{" + kind + "}"


def _sentence(spec: type[Settings], problem: Any, from_file: set[str]) -> str:
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return str(message)
    head, *rest = (str(part) for part in problem["loc"])
    field = _field(spec, head) or head
    place = _flag(spec, field) if field in from_file else f"--{_flag(spec, field)}"
    if problem["type"] == "missing":
        return f"{place}: required"
    message = message[0].lower() + message[1:]
    given = f", not {problem['input']!r}" if not isinstance(problem["input"], dict | list) else ""
    return f"{'.'.join([place, *rest[:1]] if rest and rest[0].isdigit() else [place])}: {message}{given}"

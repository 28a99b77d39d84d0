"""The tools of a conversation and the calls in it, as chat templates want them.

tools        a list of {"type": "function", "function": {"name", "description", "parameters"}}, of the functions
             alone, or either as JSON text
tool_calls   a list of {"type": "function", "function": {"name", "arguments"}} or of {"name", "arguments"};
             arguments are an object, or its JSON text
"""

from __future__ import annotations

from typing import Any

from mst_core.data import records
from mst_core.data.records import Row, kind
from mst_core.errors import RowError


def tools(row: Row) -> tuple[dict[str, Any], ...]:
    """The field ``tools`` of a row; nothing where it is absent or empty. Raises RowError."""
    value = _json(row, "tools", row.data.get("tools") or [])
    if not isinstance(value, list):
        raise RowError(f"tools is {kind(value)}, not a list", where=row.where)
    return tuple(_function(row, f"tools[{index}]", tool) for index, tool in enumerate(value))


def calls(row: Row, place: str, value: Any) -> list[dict[str, Any]]:
    """The field ``tool_calls`` of a message. Raises RowError."""
    if not isinstance(value, list) or not value:
        raise RowError(
            f"{place} must be a list of calls, not {kind(value) if value != [] else 'an empty one'}", where=row.where
        )
    made = []
    for index, call in enumerate(value):
        at = f"{place}[{index}]"
        found = _function(row, at, call)
        function = found["function"]
        if function.keys() - {"name", "arguments"}:
            extra = ", ".join(sorted(function.keys() - {"name", "arguments"}))
            raise RowError(f"{at} has {extra}; a call has a name and arguments", where=row.where)
        arguments = _json(row, f"{at}.arguments", function.get("arguments", {}))
        if not isinstance(arguments, dict):
            raise RowError(f"{at}.arguments is {kind(arguments)}, not an object", where=row.where)
        made.append({**found, "function": {"name": function["name"], "arguments": arguments}})
    return made


def called(row: Row, place: str, text: str) -> list[dict[str, Any]]:
    """The calls in the value of a ShareGPT function_call: one, or a list, as JSON."""
    value = _json(row, place, text)
    return calls(row, place, value if isinstance(value, list) else [value])


def _function(row: Row, place: str, value: Any) -> dict[str, Any]:
    """{"type": "function", "function": {...}} of what may be the function alone."""
    if not isinstance(value, dict):
        raise RowError(f"{place} is {kind(value)}, not an object", where=row.where)
    wrapped = value if "function" in value else {"type": "function", "function": value}
    if wrapped.get("type", "function") != "function" or wrapped.keys() - {"id", "type", "function"}:
        raise RowError(f"{place} is not of the form type, function", where=row.where)
    function = wrapped["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError(f"{place} has no name", where=row.where)
    return {**wrapped, "type": "function"}


def _json(row: Row, place: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return records.parse(value)
    except ValueError as error:
        raise RowError(f"{place} {error}", where=row.where) from None

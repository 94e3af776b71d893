"""The only writer of TOML: a resolved run with the origin of each value beside it."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from steelyard.spec.run import Run


def dumps(run: Run, comment: Callable[[str], str] | None = None) -> str:
    """The run as TOML that `load` reads back to an equal run. `comment(key)` is written behind each value."""
    import tomlkit

    def item(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            written: Any = tomlkit.inline_table()
            written.update(value)
        else:
            written = tomlkit.item(value)
        return written.comment(comment(key)) if comment else written

    document = tomlkit.document()
    for name, value in as_config(run).items():
        if isinstance(value, dict):
            table = tomlkit.table()
            for key, inner in value.items():
                table.add(key, item(f"{name}.{key}", inner))
            document.add(name, table)
        else:
            document.add(name, item(name, value))
    return tomlkit.dumps(document)


def as_config(run: Run) -> dict[str, Any]:
    """The run as plain nested values with run-file keys: the `config` of a record. Unset values are left out."""
    return _plain(run)


def _plain(section: BaseModel) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if value is not None:
            values[key] = (
                _plain(value) if isinstance(value, BaseModel) else list(value) if isinstance(value, tuple) else value
            )
    return values

"""Options that override a training config, and configs for measuring."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model

from config import Config
from runtime.cli import Options

C = TypeVar("C", bound=Config)


def optional_fields(source: type[Options], *names: str, title: str, none: str) -> Any:
    """Make a section of options from fields of `source`: same type, bounds and help, default None.

    `none` describes None. The result is typed Any, as mypy knows no computed base classes.
    """
    fields: dict[str, Any] = {}
    for name in names:
        field = source.model_fields[name]
        kind: Any = field.annotation
        help_text = re.sub(r" \((none|default): .*", "", field.description or "")
        described = Field(description=f"{help_text} (none: {none})")
        fields[name] = (Annotated[(kind | None, *field.metadata, described)], None)
    return create_model("Overrides", __base__=Options, __doc__=title, **fields)


def given(options: Options, section: type[Options]) -> dict[str, Any]:
    """Return the options of a section that are not None."""
    return options.model_dump(include=set(section.model_fields), exclude_none=True)


def without_end(config: C) -> C:
    """Return the config without an end, at a learning rate that hardly moves the weights."""
    names = [name for name in type(config).model_fields if name.endswith("lr")]
    rates = {name: 1e-6 for name in names if getattr(config, name)}
    return config.model_copy(update={"max_steps": 10**9, "max_minutes": None, **rates})


def to_flags(values: Mapping[str, Any]) -> list[str]:
    """Return options as flags of train.py; None is left out."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            flags += [f"--{name}", str(value)]
    return flags

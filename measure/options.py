"""Options that override those of a training config, taken from their declaration in config.py."""

from typing import Annotated, Any

from pydantic import Field, create_model

from runtime.cli import Options


def optional_fields(
    source: type[Options], *names: str, title: str, none: str = "as the config says"
) -> Any:
    """Make a section of options from fields of `source`: same type, bounds and help, default None.

    `none` says what None means. The result is typed Any, as mypy knows no computed base classes.
    """
    fields: dict[str, Any] = {}
    for name in names:
        field = source.model_fields[name]
        kind: Any = field.annotation
        if field.metadata:
            kind = Annotated[(kind, *field.metadata)]
        help_text = (field.description or "").partition(" (none:")[0]
        fields[name] = (kind | None, Field(None, description=f"{help_text} (none: {none})"))
    return create_model("Overrides", __base__=Options, __doc__=title, **fields)


def given(options: Options, section: type[Options]) -> dict[str, Any]:
    """Return the options of a section that are not None."""
    values = {name: getattr(options, name) for name in section.model_fields}
    return {name: value for name, value in values.items() if value is not None}

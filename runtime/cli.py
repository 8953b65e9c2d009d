"""Options classes to command lines: flags, YAML files and `--help` are generated from a class,
mistakes become one line each.

An options class is a pydantic model, made of sections; a field's docstring is its help.
`parse_command_line` merges defaults < YAML file (and the files it names as its `base:`) < flags,
and validates the result once. Nothing here imports torch, so `--help` and mistakes answer at once.
"""

import argparse
import contextlib
import difflib
import io
import os
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from runtime.errors import UserError, reported
from runtime.signals import end_with
from runtime.world import launch

CONFIG_DIR = (
    Path(__file__).resolve().parent.parent / "configs"
)  # where a config's name is looked up

Positive = Annotated[int, Field(ge=1)]
ZeroIsOff = Annotated[int, Field(ge=0)]


def _not_empty(name: str) -> str:
    if not name:
        raise PydanticCustomError("string_too_short", "String should have at least 1 character")
    return name


# Of a file or folder: "" would be the folder that the command was typed in. pydantic's min_length
# refuses paths that are no UTF-8.
Name = Annotated[str, AfterValidator(_not_empty)]


class ConfigError(UserError):
    """Mistakes in the options, one line each."""


class ContradictionError(ValueError):
    """Options that exclude each other: pairs of (option to blame, message). Validators raise it,
    `load` makes it a ConfigError.
    """

    def __init__(self, problems: list[tuple[str, str]]):
        super().__init__(problems)  # alone: so it can be sent to another process
        self.problems = problems

    def __str__(self) -> str:
        return "; ".join(message for _, message in self.problems)


class Options(BaseModel):
    """Base of every section of options. A field's docstring is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


O = TypeVar("O", bound=Options)


def _title(section: type[Options]) -> str:
    """What a section is called: its docstring, which `python -OO` leaves out."""
    return (
        section.__doc__ or section.__name__.removesuffix("Config").removesuffix("Options").lower()
    )


def sections(options: type[Options]) -> list[type[Options]]:
    """The classes that declare fields of `options`, in the order in which `--help` shows them."""
    return [c for c in reversed(options.__mro__) if Options in c.__bases__]


def parse_command_line(
    options: type[O],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    positional: str | None = None,
    config_file: bool = False,
    elsewhere: Mapping[str, str] | None = None,
) -> O:
    """Options from the command line (default: sys.argv), as `parse` reads them.

    Mistakes are printed, one line each, and end the process with status 2; `--print_config` prints
    the options and ends it too. `positional`: the field that is given without a flag, or several,
    with spaces between. `elsewhere`: for names that are no options here, what to say of them.
    """
    reconfigure_output()
    given = sys.argv[1:] if argv is None else argv
    with reported("stdout"):
        _check_working_directory()
        values, origin, print_config = _parse(
            options, given, description, positional, config_file, elsewhere
        )
        if print_config:
            print(to_yaml(values, origin=origin), end="")
    if print_config:
        raise SystemExit(0)
    end_with()  # a ladder that started this run
    return values


def _check_working_directory() -> None:
    """Raises UserError in a folder that is gone: PyTorch cannot even be imported there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UserError("the working directory has been deleted; cd to one that is there") from None


def parse(
    options: type[O],
    argv: Sequence[str],
    *,
    description: str = "",
    positional: str | None = None,
    config_file: bool = False,
) -> O:
    """Options from command-line arguments: the field `positional` without a flag, and `--config
    FILE` if config_file.

    Raises ConfigError with one line for each mistake.
    """
    return _parse(options, argv, description, positional, config_file)[0]


def _parse(
    options: type[O],
    argv: Sequence[str],
    description: str,
    positional: str | None,
    config_file: bool,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[O, dict[str, str], bool]:
    """The options, the place that each one given came from, and whether `--print_config` was given."""
    flags, mistakes = _parse_flags(
        options, argv, description, positional, config_file, elsewhere or {}
    )
    print_config = bool(flags.pop("print_config", False))
    try:
        values, origin = _load(options, flags, flags.pop("config", None) if config_file else None)
    except ConfigError as error:
        raise ConfigError("\n".join([*mistakes, str(error)])) from None
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return values, origin, print_config


def reconfigure_output() -> None:
    """Let stdout replace what its encoding lacks: a model writes any character, a folder's name may
    be no text at all, and a redirected stdout may be ASCII.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def load(options: type[O], values: Mapping[str, Any], config: str | None = None) -> O:
    """Merge `values` over the YAML file `config` and its bases, convert and validate.

    Raises ConfigError with one line for each problem: where the value came from, what is allowed,
    the nearest name.
    """
    return _load(options, values, config)[0]


def _load(
    options: type[O], values: Mapping[str, Any], config: str | None
) -> tuple[O, dict[str, str]]:
    merged, origin = read_yaml(find_config(config)) if config is not None else ({}, {})
    merged |= values
    origin |= {key: f"--{key}" for key in values}
    # in a file `resume:` unsets an option; `--resume "$RUN"` with an empty RUN is a mistake, which
    # would begin a new run
    empty = [
        f"--{key}: is empty; give a value, or leave it out"
        for key, value in values.items()
        if value == "" and _is_optional_text(options.model_fields.get(key))
    ]
    merged = {
        key: _none_or_same(options.model_fields.get(key), value) for key, value in merged.items()
    }
    # what validators may need to know beside the values
    context = {
        "config": config and Path(config).stem,
        "world_size": launch().world_size,
        "given": {key for key, value in merged.items() if value is not None},
    }
    try:
        valid = options.model_validate(merged, context=context)
    except ValidationError as error:
        raise ConfigError("\n".join([*empty, *_error_lines(options, error, origin)])) from None
    if empty:
        raise ConfigError("\n".join(empty))
    return valid, origin


def to_yaml(
    options: Options,
    changed: Mapping[str, Any] | None = None,
    origin: Mapping[str, str] | None = None,
) -> str:
    """The options, with the values `changed`, as a YAML file, section by section; each with where
    it came from, given `origin`.
    """
    values = options.model_dump(mode="json") | dict(changed or {})
    lines: list[str] = []
    for section in sections(type(options)):
        lines += ["", f"# {_title(section)}"]
        for name in section.model_fields:
            style = None if isinstance(values[name], list) else False  # None: a list in one line
            line = yaml.safe_dump(
                {name: values[name]}, default_flow_style=style, width=sys.maxsize
            ).rstrip("\n")
            if origin is not None:
                place = (
                    origin.get(name, "default")
                    .removesuffix(f": {name}")
                    .removeprefix(f"{CONFIG_DIR.parent}{os.sep}")
                )
                line = f"{line:<32}  # {' '.join(place.split())}"
            lines.append(line)
    return "\n".join(lines[1:]) + "\n"


# ---- YAML files


def find_config(name: str, folder: Path | None = None) -> Path:
    """The file that `--config name` or (with the naming file's `folder`) `base: name` means. Raises
    ConfigError.
    """
    for place in (folder or Path(), CONFIG_DIR):
        for path in (place / name, place / f"{name}.yaml"):
            with contextlib.suppress(OSError):  # a name too long to be a file's
                if path.is_file():
                    return path
    known = sorted(
        path.relative_to(CONFIG_DIR).with_suffix("").as_posix()
        for path in CONFIG_DIR.rglob("*.yaml")
    )
    hint = (
        did_you_mean(name.removesuffix(".yaml"), known)
        or f"; configs/ has {', '.join(n for n in known if '/' not in n)}"
    )
    raise ConfigError(f"{name or '(empty)'}: no such config file, here or in configs/{hint}")


def read_yaml(path: Path, chain: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of a config file merged over its `base:` files, and the place that each value came
    from.

    Scalars are read as strings: the field's own type converts them. Raises ConfigError.
    """
    resolved = path.resolve()
    if resolved in chain:
        names = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
        raise ConfigError(f"{path}: base: goes round in a circle: {names}")
    values = read_yaml_mapping(path)
    base = values.pop("base", None)
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if base is not None:
        if not isinstance(base, str) or not base:
            raise ConfigError(f"{path}: base: must name one config file")
        try:
            base_path = find_config(base, path.parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: base: {error}") from None
        merged, origin = read_yaml(base_path, (*chain, resolved))
    return merged | values, origin | {key: f"{path}: {key}" for key in values}


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """What one config file says, without its `base:` merged in. Raises ConfigError."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_StringLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if values is None or values == "":
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold lines of the form `option: value`, nothing else")
    return values


class _StringLoader(yaml.BaseLoader):
    """Leaves every scalar a string, and refuses what is no text and a key that stands twice.

    U+DC80 to U+DCFF are allowed: Python (surrogateescape) has them for the bytes of a path that is
    not UTF-8, and a run's config.yaml may hold such a path.
    """

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        text = str(super().construct_scalar(node))
        if not text.isprintable() and any(
            "\ud800" <= c <= "\udfff" and not "\udc80" <= c <= "\udcff" for c in text
        ):
            raise yaml.constructor.ConstructorError(
                None, None, "an escape that is half a character", node.start_mark
            )
        if "\0" in text:
            raise yaml.constructor.ConstructorError(
                None, None, "an escape that is no text: NUL", node.start_mark
            )
        return text

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = []
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} stands twice", key_node.start_mark
                )
            seen.append(key)
        return super().construct_mapping(node, deep)


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        if "expected" in message:
            message += "; a value that begins with - is written --option=VALUE"
        if "ignored explicit argument" in message:
            message = f"{message.partition(':')[0]}: takes no value"
        raise ConfigError(message)


class _Listed(argparse.Action):
    """Values separated by spaces, by commas, or by the flag given again: all become one text with
    commas.
    """

    def __call__(
        self,
        parser: Any,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(
            namespace,
            self.dest,
            ",".join([*filter(None, [getattr(namespace, self.dest, None)]), *values]),
        )


def _parse_flags(
    options: type[Options],
    argv: Sequence[str],
    description: str,
    positional: str | None,
    config_file: bool,
    elsewhere: Mapping[str, str],
) -> tuple[dict[str, Any], list[str]]:
    """The options given on the command line, as strings (booleans as bool), and a line for each
    unknown one.
    """
    columns = os.environ.get("COLUMNS", "")
    width = min(120, int(columns)) if columns.isdecimal() else 120
    usage = f"%(prog)s {positional or ''} {'[--config FILE]' if config_file else ''} [--option VALUE ...]"
    parser = _Parser(
        usage=" ".join(usage.split()),
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=34, width=width
        ),
    )
    if config_file:
        parser.add_argument(
            "--config", metavar="FILE", help="YAML file with options: a path, or a name in configs/"
        )
        parser.add_argument(
            "--print_config",
            action="store_true",
            help="print every option and where its value came from, and end",
        )
    for section in sections(options):
        group = parser.add_argument_group(_title(section))
        for name, field in section.model_fields.items():
            _add_argument(group, name, field, name in (positional or "").split())
    known, unknown = parser.parse_known_args(_without_commas(options, argv))
    if "--" in unknown:  # what follows is no option, whatever it looks like
        unknown = unknown[: unknown.index("--") + 1]
    # a value after an unknown flag belongs to that flag: it is not a second mistake
    mistakes = [
        _unknown_argument(options, argument, positional, config_file, elsewhere)
        for argument, before in zip(unknown, ["", *unknown], strict=False)
        if argument.startswith("--") or not before.startswith("--")
    ]
    return vars(known), mistakes


def _without_commas(options: type[Options], argv: Sequence[str]) -> list[str]:
    """The arguments, with `--betas 0.9,0.95`, as other programs take it, written as `--betas 0.9
    0.95`.
    """
    several = {
        f"--{name}": len(get_args(kind))
        for name, field in options.model_fields.items()
        if get_origin(kind := _value_type(field)) is tuple and get_args(kind)[-1] is not Ellipsis
    }
    words: list[str] = []
    for word in argv:
        flag, equals, value = word.partition("=")
        flag, value = (flag, value) if equals else (words[-1] if words else "", word)
        values = value.split(",")
        if len(values) == several.get(flag):
            words += [flag] * bool(equals) + values
        else:
            words.append(word)
    return words


def _add_argument(
    group: argparse._ArgumentGroup, name: str, field: FieldInfo, positional: bool
) -> None:
    help_text = (field.description or "").replace("%", "%%")
    kind = _value_type(field)
    if positional:
        group.add_argument(name, help=help_text, nargs="*" if get_origin(kind) is tuple else None)
        return
    help_text += f" [{show(field.default)}]"
    if kind is bool:
        group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=help_text)
    elif get_origin(kind) is tuple:
        if get_args(kind)[-1] is Ellipsis:  # any number, separated by commas or spaces
            group.add_argument(f"--{name}", nargs="+", action=_Listed, metavar="X", help=help_text)
        else:
            group.add_argument(f"--{name}", nargs=len(get_args(kind)), metavar="X", help=help_text)
    else:
        choices = get_args(kind)
        metavar = "|".join(choices) if choices else {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(f"--{name}", metavar=metavar, help=help_text)


def _unknown_argument(
    options: type[Options],
    argument: str,
    positional: str | None,
    config_file: bool,
    elsewhere: Mapping[str, str],
) -> str:
    if not argument.startswith("--") or argument == "--":
        return f"{argument}: not understood; options are written --name VALUE, yes/no options --name or --no-name"
    name = argument.partition("=")[0]
    if said := elsewhere.get(name.removeprefix("--").removeprefix("no-")):
        return f"{name}: {said}"
    positionals = (positional or "").split()
    if name.removeprefix("--") in positionals:
        return f"{name}: is given without a flag, see --help"
    names = [f"--{name}" for name in options.model_fields if name not in positionals] + [
        "--config",
        "--print_config",
    ] * config_file
    switches = [
        f"--no-{name}" for name, field in options.model_fields.items() if _value_type(field) is bool
    ]
    return (
        f"{name}: unknown option{did_you_mean(name, names + switches) or '; --help lists them all'}"
    )


# ---- conversions and messages


def _value_type(field: FieldInfo) -> Any:
    """The field's type without Optional and without bounds."""
    kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]
    kind = kinds[0] if NoneType in get_args(field.annotation) else field.annotation
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _none_or_same(field: FieldInfo | None, value: Any) -> Any:
    """None where the field may be unset and the text says so."""
    optional = field is not None and NoneType in get_args(field.annotation)
    return (
        None
        if optional and isinstance(value, str) and value.lower() in ("", "none", "null", "~")
        else value
    )


def _is_optional_text(field: FieldInfo | None) -> bool:
    return (
        field is not None and NoneType in get_args(field.annotation) and _value_type(field) is str
    )


def show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, if one is near."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


# a value as a message shows it: a file's may be large, and with aliases in aliases larger than any
# memory
SHOWN = reprlib.Repr()
SHOWN.maxlevel, SHOWN.maxstring, SHOWN.maxother = 2, 200, 200


def _error_lines(
    options: type[Options], error: ValidationError, origin: Mapping[str, str]
) -> list[str]:
    """One line for each problem that pydantic found."""
    lines = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ContradictionError):
            lines += [
                f"{origin[name]}: {text}" if name in origin else text
                for name, text in cause.problems
            ]
            continue
        name = str(problem["loc"][0])
        where = origin.get(name, name)
        if problem["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown option{did_you_mean(name, list(options.model_fields))}")
            continue
        kind = _value_type(options.model_fields[name])
        if get_origin(kind) is tuple and kind.__args__[-1] is Ellipsis:
            kind = kind.__args__[0]
        elif get_origin(kind) is tuple and (
            len(problem["loc"]) == 1 or problem["type"] in ("missing", "too_long")
        ):
            lines.append(
                f"{where}: takes {len(get_args(kind))} values, not {SHOWN.repr(problem['input'])}"
            )
            continue
        message = problem["msg"][0].lower() + problem["msg"][1:].partition(", unable to")[0]
        message = re.sub(
            r"\d{7,}",
            lambda bound: f"{int(bound[0]):,}" if len(bound[0]) < 16 else f"{float(bound[0]):g}",
            message,
        )
        hint = ""
        if problem["type"] == "literal_error":
            hint = did_you_mean(str(problem["input"]), get_args(kind))
        lines.append(f"{where}: {message}, not {SHOWN.repr(problem['input'])}{hint}")
    return lines

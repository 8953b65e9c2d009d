"""Turn an options class into a command line: flags, YAML files, `--help`, one line per mistake.

An options class is a pydantic model, made of sections; a field's docstring is its help.
`parse` merges defaults < YAML file (and the files it names as its `base:`) < flags, and
validates the result once. Nothing here imports torch, so `--help` and mistakes answer at once.
"""

import argparse
import difflib
import functools
import os
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, with_config
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from runtime.errors import UserError
from runtime.launch import launch

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"  # the folder of `--config NAME`

Positive = Annotated[int, Field(ge=1)]
ZeroIsOff = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]  # path; "" would be the working directory
Device = Literal["auto", "cuda", "mps", "cpu"]


class ConfigError(UserError):
    """Mistakes in the options, one line each."""


class Options(BaseModel):
    """Base of every section of options. A field's docstring is its help.

    A field may carry marks, objects in its annotation such as FIXED in
    `n_layer: Annotated[int, FIXED] = 12`. They say how checkpoints and the ladder treat it.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        str_min_length=0,  # pydantic then checks every text, and refuses one that is not Unicode
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Take over the docstrings of a plain dataclass whose fields a section inherits."""
        for base in cls.__bases__:
            if is_dataclass(base) and not issubclass(base, Options):
                plain = TypeAdapter(with_config(use_attribute_docstrings=True)(base))
                for name, field in plain.json_schema()["properties"].items():
                    cls.model_fields[name].description = field["description"]

    def mistakes(self, given: Collection[str], world_size: int) -> Iterable[tuple[str, str]]:
        """Return mistakes that values have together: the option to blame, and a message for each.

        `load` makes them a ConfigError. `given`: the options with a value from flags or files.
        """
        return ()

    def with_options(self, **changes: Any) -> Self:
        """Return these options with some changed. The new values are not validated."""
        return self.model_copy(update=changes)

    @classmethod
    def marks(cls, name: str, mark: object) -> list[Any]:
        """Return a field's marks that are equal to `mark`, or instances if `mark` is a class."""
        return [m for m in cls.model_fields[name].metadata if m == mark or type(m) is mark]

    @classmethod
    def names_marked(cls, *marks: object) -> tuple[str, ...]:
        """Return the names of the fields that carry one of the marks, or an instance of a class."""
        return tuple(n for n in cls.model_fields if any(cls.marks(n, mark) for mark in marks))

    @classmethod
    def other_names(cls) -> Mapping[str, str]:
        """Return names that other programs have for these options, and the text to write here."""
        return {}


O = TypeVar("O", bound=Options)


def sections(options: type[Options]) -> list[type[Options]]:
    """Return the classes that declare fields of `options`, in the order of `--help`."""
    return [c for c in reversed(options.__mro__) if issubclass(c, Options) and c.__annotations__]


def parse(
    options: type[O],
    argv: Sequence[str],
    *,
    positional: str = "",
    config_file: bool = False,
    elsewhere: Mapping[str, str] = {},
    others: type[Options] = Options,
) -> O:
    """Read options from command-line arguments.

    `positional`: fields given without a flag, separated by spaces. `config_file`: take
    `--config FILE` and `--print_config` too; a field `config` gets the name of the file.
    `elsewhere`: messages for names that are no options here. `others`: also take this class's
    flags; `options` must allow extra fields and gets them unconverted, in `model_extra`. Raises
    ConfigError with one line for each mistake, and SystemExit after `--help` and `--print_config`.
    """
    declared, positionals = [*sections(options), *sections(others)], positional.split()
    parser, names = _make_parser(declared, positionals, config_file)
    known, unknown = parser.parse_known_args(argv)
    flags = vars(known)
    for name, value in flags.items():
        if isinstance(value, list) and name not in positionals:
            flags[name] = ",".join(value).split(",")  # commas are as good as spaces
    print_config = flags.pop("print_config", False)
    config = flags.get("config") if config_file else None
    if "config" not in options.model_fields:
        flags.pop("config", None)
    renamed = {n: f"unknown option; here it is --{t}" for n, t in options.other_names().items()}
    mistakes = _unknown_arguments(unknown, names, {**renamed, **elsewhere})
    try:
        values = load(options, flags, config)
    except ConfigError as error:
        mistakes.append(str(error))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if print_config:
        print(to_yaml(values, origin=_merge(flags, config)[1]), end="", flush=True)
        raise SystemExit(0)
    return values


def load(
    options: type[O],
    values: Mapping[str, Any],
    config: str | None = None,
    world_size: int | None = None,
) -> O:
    """Merge `values` over the YAML file `config` and its bases, convert and validate.

    `world_size`: the ranks to validate for (default: this run's). Raises ConfigError with one line
    for each problem: the value's origin, the allowed values, the nearest name.
    """
    given, origin = _merge(values, config)
    for name, field in options.model_fields.items():
        if name in given and NoneType in get_args(field.annotation):
            # `resume:` in a file unsets an option; `--resume "$RUN"` with an empty RUN is a mistake
            text = str(given[name]).lower()
            if text in ("none", "null", "~") or (text == "" and name not in values):
                given[name] = None
    named = {name for name, value in given.items() if value is not None}
    if "run_name" in options.model_fields and "run_name" not in named:
        given["run_name"] = Path(config).stem if config else "train"  # run_name's help promises it
    try:
        loaded = options.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(_error_lines(options, error, origin))) from None
    mistakes = loaded.mistakes(named, world_size or launch().world_size)
    if lines := [f"{origin[name]}: {text}" if name in origin else text for name, text in mistakes]:
        raise ConfigError("\n".join(lines))
    return loaded


def _merge(values: Mapping[str, Any], config: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge `values` over a config file; return the result and the origin of each value."""
    of_values = {name: f"--{name}" for name in values}
    if config is None:
        return {**values}, of_values
    in_file, origin = read_yaml(find_config(config))
    return {**in_file, **values}, origin | of_values


def to_yaml(options: Options, origin: Mapping[str, str] | None = None) -> str:
    """Return the options as a YAML file, section by section.

    With `origin`, each line ends with a comment on the value's origin.
    """
    values = options.model_dump(mode="json")
    lines: list[str] = []
    for section in sections(type(options)):
        lines += ["", f"# {section.__doc__}"]
        for name in [name for name in section.model_fields if name in values]:
            value = values.pop(name)
            style = None if isinstance(value, list) else False  # None: a list in one line
            line = yaml.safe_dump(
                {name: value}, default_flow_style=style, width=sys.maxsize
            ).rstrip("\n")
            if origin is not None:
                place = origin.get(name, "default").removesuffix(f": {name}")
                place = place.removeprefix(f"{CONFIG_DIR.parent}{os.sep}")
                line = f"{line:<32}  # {place}"
            lines.append(line)
    return "\n".join(lines[1:]) + "\n"


# ---- YAML files


def find_config(
    name: str, folder: Path = Path(), also: Callable[[], Sequence[str]] = tuple
) -> Path:
    """Return the file that `--config name`, or `base: name` in a file in `folder`, means.

    `also`: returns names that are allowed in place of a file. Raises ConfigError, which names the
    nearest.
    """
    for place in (folder, CONFIG_DIR):
        for path in (place / name, place / f"{name}.yaml"):
            if os.path.isfile(path):  # False also for a name that is too long, or has a NUL
                return path
    paths = sorted(CONFIG_DIR.rglob("*.yaml"))
    known = [path.relative_to(CONFIG_DIR).with_suffix("").as_posix() for path in paths]
    near = did_you_mean(name.removesuffix(".yaml"), [*also(), *known])
    raise ConfigError(f"{name or '(empty)'}: no such config file, here or in configs/{near}")


def read_yaml(path: Path, *above: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge a config file over its `base:` files; return the values and the origin of each.

    Scalars are read as strings: the field's own type converts them. `above`: the files that
    have this one as their base. Raises ConfigError.
    """
    if path.resolve() in above:
        names = " -> ".join(file.name for file in (*above, path))
        raise ConfigError(f"{path}: circular base: {names}")
    values = read_yaml_mapping(path)
    base = values.pop("base", None)
    origin = {name: f"{path}: {name}" for name in values}
    if base is None:
        return values, origin
    try:
        base_file = find_config(str(base), path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: base: {error}") from None
    base_values, base_origin = read_yaml(base_file, *above, path.resolve())
    return base_values | values, base_origin | origin


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read one config file, without its `base:` merged in. Raises ConfigError."""
    try:
        values = _parse_yaml(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold lines of the form `option: value`, nothing else")
    return dict(values)


@functools.cache  # a ladder reads the same few files hundreds of times
def _parse_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_StringLoader)


class _StringLoader(yaml.BaseLoader):
    """Leave every scalar a string, and refuse a key that is set twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = []
        for key, _ in node.value:
            if key.value in keys:
                message = f"{key.value!r} is set twice"
                raise yaml.constructor.ConstructorError(None, None, message, key.start_mark)
            keys.append(key.value)
        return super().construct_mapping(node, deep)


# ---- flags


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        option, _, problem = message.partition(": ")
        if problem.startswith("ignored explicit argument"):  # --compile=False
            message = f"{option}: takes no value; type {option.replace('/', ' or ')} alone"
        raise ConfigError(message)


def _make_parser(
    declared: Sequence[type[Options]], positionals: Sequence[str], config_file: bool
) -> tuple[argparse.ArgumentParser, list[str]]:
    """Return a parser for the options of some sections, and all ways to write their flags."""
    parser = _Parser(
        usage=" ".join(["%(prog)s", *positionals, "[--option VALUE ...]"]),
        description=sys.modules["__main__"].__doc__,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names: list[str] = []
    if config_file:
        names += ["--config", "--print_config"]
        parser.add_argument("--config", metavar="FILE", help="YAML file: a path, or in configs/")
        parser.add_argument(
            "--print_config", action="store_true", help="print all options, and end"
        )
    for section in declared:
        group = parser.add_argument_group(section.__doc__)
        for name, field in section.model_fields.items():
            if f"--{name}" not in names:  # two classes may have an option of the same name
                names += _add_argument(group, name, field, name in positionals)
    return parser, names


def _add_argument(
    group: argparse._ArgumentGroup, name: str, field: FieldInfo, positional: bool
) -> Sequence[str]:
    """Add a field's flag; returns the ways to write it."""
    kind = _value_type(field)
    is_list = get_origin(kind) is tuple
    given: dict[str, Any] = {"help": (field.description or "").replace("%", "%%")}
    if positional:
        return group.add_argument(name, nargs="*" if is_list else None, **given).option_strings
    given["help"] += f" [{show(field.default)}]"
    if kind is bool:
        given["action"] = argparse.BooleanOptionalAction
    elif is_list:
        # If a list has no fixed length, each flag adds values to it.
        any_number = get_args(kind)[-1] is Ellipsis
        given |= {"nargs": "+", "metavar": "X", "action": "extend" if any_number else "store"}
    elif choices := get_args(kind):
        given["metavar"] = "|".join(choices)
    else:
        given["metavar"] = {int: "N", float: "X", str: "TEXT"}[kind]
    return group.add_argument(f"--{name}", **given).option_strings


def _unknown_arguments(
    unknown: Sequence[str], names: Sequence[str], elsewhere: Mapping[str, str]
) -> list[str]:
    """Return a message for each mistake. A value after an unknown flag belongs to that flag."""
    mistakes, after_flag = list[str](), False
    for argument in unknown:
        is_flag = argument.startswith("--")
        if is_flag:
            flag = argument.partition("=")[0]
            near = did_you_mean(flag, names) or "; --help lists them all"
            name = flag.removeprefix("--").removeprefix("no-")
            mistakes.append(f"{flag}: {elsewhere.get(name, f'unknown option{near}')}")
        elif not after_flag:
            of_file = ", a YAML file of options --config FILE" if "--config" in names else ""
            mistakes.append(
                f"{argument}: not understood; options are written --name VALUE, "
                f"yes/no options --name or --no-name{of_file}"
            )
        after_flag = is_flag
    return mistakes


# ---- types and messages


def _value_type(field: FieldInfo) -> Any:
    """Return the field's type without Optional and without bounds."""
    kind = field.annotation
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def show(value: Any) -> str:
    """Return an option's value as `--help` and messages show it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or nothing."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _error_lines(
    options: type[Options], error: ValidationError, origin: Mapping[str, str]
) -> list[str]:
    """Return one line for each problem that pydantic found."""
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0])
        lines.append(f"{origin.get(name, name)}: {_message(options, name, problem)}")
    return lines


def _message(options: type[Options], name: str, problem: ErrorDetails) -> str:
    """Return the message for a problem with the value of an option."""
    kind = problem["type"]
    if kind == "extra_forbidden":
        text = options.other_names().get(name)
        near = did_you_mean(name, list(options.model_fields))
        return f"unknown option; here it is {text}" if text else f"unknown option{near}"
    message = problem["msg"][0].lower() + problem["msg"][1:].partition(", unable to")[0]
    field = options.model_fields[name]
    if kind == "missing":  # one value of a tuple
        message = f"takes {len(get_args(_value_type(field)))} values"
    message += f", not {reprlib.repr(problem['input'])}"
    if kind == "tuple_type":
        message += f"; write it like {[*field.default]}"
    if kind == "literal_error":
        allowed = re.findall("'(.*?)'", problem["ctx"]["expected"])
        message += did_you_mean(str(problem["input"]), allowed)
    return message

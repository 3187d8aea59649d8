"""Framework for commands: the fields of a settings dataclass define a command's options, help, validation and
`--config` file. The field `max_num_seqs: int = flag("…", 64, ge=1)` becomes the option `--max-num-seqs`.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from operator import ge, gt, le
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup, TyperOption

from twofold.errors import ConfigurationError, require
from twofold.hardware.suggestions import read_yaml

MAPPING = "FILE|JSON"  # metavar of flags for a mapping, which a `--config` file may contain in place

S = TypeVar("S", bound="Settings")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line option of a settings field."""

    help: str
    names: tuple[str, ...] = ()  # replace the name derived from the field
    metavar: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    env: str | None = None
    parse: Callable[[str, str], object] | None = None  # converts (text, flag name) to the value
    choices: Mapping[str, object] = field(default_factory=dict)  # registry entries by value; empty: any value
    positional: bool = False

    def field(self, default: object = None, unset: str | None = None) -> Any:  # noqa: ANN401  (as the class declares)
        """Return a dataclass field with this command-line flag. The flag is required if `default` is Ellipsis."""
        # The help shows `unset` as the default.
        return field(default=MISSING if default is ... else default, metadata={"flag": self, "unset": unset})


def flag(help: str, default: object = None, unset: str | None = None, **how: Any) -> Any:  # noqa: A002, ANN401
    """Return a dataclass field for a command-line flag."""
    return Flag(help, **how).field(default, unset)


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class for the settings of a command. Subclasses become frozen dataclasses."""

    PANEL: ClassVar[str] = "Options"  # title of the panel that has the class's options in the help

    def __init_subclass__(cls, *, panel: str | None = None) -> None:
        super().__init_subclass__()
        cls.PANEL = panel or cls.PANEL
        dataclass(frozen=True, kw_only=True)(cls)


class _UntypedHelp:
    def get_help_option(self, ctx: typer.Context) -> TyperOption | None:
        option: TyperOption | None = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option


class Command(_UntypedHelp, TyperCommand):  # type: ignore[misc]
    """Typer command whose help text lists the option `--help` without a value type."""


class Group(_UntypedHelp, TyperGroup):  # type: ignore[misc]
    """Typer command group whose help text lists the option `--help` without a value type."""


def group(text: str, commands: Mapping[str, Callable[..., object]]) -> typer.Typer:
    """Create a Typer application with the given help and commands."""
    app = typer.Typer(cls=Group, help=text, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # keeps a group of one command a group
    for name, run in commands.items():
        app.command(name, cls=Command)(run)
    return app


def command(run: Callable[[S], T]) -> Callable[..., T]:
    """Turn a function that takes one settings object into a Typer command with an option for each setting."""
    hints = get_type_hints(run)
    (parameter,) = hints.keys() - {"return"}
    kind: type[S] = hints[parameter]
    flags = flags_of(kind)

    @wraps(run)
    def with_options(**given: Any) -> T:  # noqa: ANN401  (values as Typer parses them)
        del given["config"]
        return run(settings_of(kind, given))

    parameters = [*(_parameter(kind, field, flags[field.name]) for field in fields(kind)), _CONFIG]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {each.name: each.annotation for each in parameters}
    return with_options


def settings_of(kind: type[S], given: Mapping[str, Any]) -> S:
    """Return settings from values by field name; None selects the default. Raises TypeError for an unknown name, and
    ConfigurationError for an invalid value.
    """
    flags, hints = flags_of(kind), get_type_hints(kind)
    for name in given.keys() - flags.keys():
        close = get_close_matches(name, flags, 1)
        raise TypeError(f"unexpected keyword argument {name!r}{f'; did you mean {close[0]}?' if close else ''}")
    present = {name: value for name, value in given.items() if value is not None}
    return kind(**{name: _checked(name, flags[name], hints[name], value) for name, value in present.items()})


def flags_of(kind: type[Settings]) -> dict[str, Flag]:
    """Return the flags of a settings class by field name."""
    return {each.name: each.metadata["flag"] for each in fields(kind)}


def flag_name(field: str) -> str:
    """Return the option of a field: `--max-num-seqs` for `max_num_seqs`."""
    return f"--{field.replace('_', '-')}"


def shown_name(name: str, flag: Flag) -> str:
    """Return a field's name for error messages: `--max-num-seqs`, or `MODEL` for a positional argument."""
    return flag.metavar if flag.positional and flag.metavar else flag_name(name)


def refuse(settings: Settings, names: str, why: str) -> None:
    """Raise ConfigurationError if any of the named fields is set."""
    flags = flags_of(type(settings))
    for name in names.split():
        value = getattr(settings, name)
        require(value is None or value is False or value == (), f"{shown_name(name, flags[name])} {why}")


def owner_of(kind: type[Settings], field: str) -> type[Settings]:
    """Return the settings class that declares a field."""
    return next(each for each in kind.__mro__ if field in inspect.get_annotations(each))


def help_text(kind: type[Settings], name: str) -> str:
    """Return the help of a field with its default, without its choices."""
    (field,) = (each for each in fields(kind) if each.name == name)
    flag, default = field.metadata["flag"], field.metadata["unset"]
    if default is None and field.default not in (MISSING, None, False, "", ()):
        default = "yes" if field.default is True else f"{field.default}"
    return flag.help if default is None else f"{flag.help} [default: {default}]"


def full_help(kind: type[Settings], name: str) -> str:
    """Return the help of a field with its default and a line for each choice."""
    choices = [f"{choice}: {summary(entry)}" for choice, entry in flags_of(kind)[name].choices.items()]
    text = help_text(kind, name)
    return "\n".join([text, "\n\b", *choices]) if choices else text  # Typer keeps the lines of a paragraph after \b


def summary(entry: object) -> str:
    """Return a one-sentence description of a registry entry for the help of a flag."""
    text = entry if isinstance(entry, str) else getattr(entry, "help", None)
    if isinstance(text, str):
        return text
    target = getattr(entry, "func", entry)
    # A class compiled by mypyc has no docstring.
    paragraph = (inspect.getdoc(target) or _source_docstring(target)).partition("\n\n")[0]
    return re.split(r"(?<=\.)\s", " ".join(paragraph.split()))[0]


def _source_docstring(entry: object) -> str:
    module, name = getattr(entry, "__module__", ""), getattr(entry, "__name__", "")
    compiled = getattr(sys.modules.get(module), "__file__", None)
    source = Path(compiled or "").with_name(f"{module.rpartition('.')[2]}.py")
    if not compiled or not source.is_file():
        return ""
    classes = (node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    return next((ast.get_docstring(node) or "" for node in classes if node.name == name), "")


def _parameter(kind: type[Settings], field: "Field[Any]", flag: Flag) -> inspect.Parameter:
    hint = get_type_hints(kind)[field.name]
    switch = bool in {hint, *get_args(hint)}
    required = field.default is MISSING
    typed: Any = hint
    if flag.parse is not None:
        typed = str
    elif get_origin(hint) is tuple:
        typed = list[get_args(hint)[0]]  # type: ignore[misc]  # a type made at run time
    name = flag_name(field.name)
    names = flag.names or ((f"{name}/--no-{name[2:]}",) if switch else ())
    shared: dict[str, Any] = {
        "help": escape(full_help(kind, field.name)),
        "metavar": "" if switch else flag.metavar,
        "envvar": flag.env,
        "show_envvar": flag.env is not None,
        "show_default": False,
        "autocompletion": _completes(flag.choices) if flag.choices else None,
    }
    panel = owner_of(kind, field.name).PANEL
    info = typer.Argument(**shared) if flag.positional else typer.Option(*names, **shared, rich_help_panel=panel)
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[typed if required else typed | None, info],
    )


def _completes(choices: Mapping[str, object]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [name for name in choices if name.startswith(incomplete)]

    return complete


def _checked(name: str, flag: Flag, hint: Any, value: Any) -> Any:  # noqa: ANN401  (of the field's type)
    """Convert a value to the type of its field. Raises ConfigurationError if the value is invalid."""
    shown, kinds = shown_name(name, flag), get_args(hint) or (hint,)
    if flag.parse is not None and isinstance(value, str):
        return flag.parse(value, shown)
    if get_origin(hint) is tuple:
        return tuple(map(get_args(hint)[0], [value] if isinstance(value, str | Path) else value))
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if str in kinds and isinstance(value, int | Path):  # a count, or a cluster file
        value = str(value)
    if flag.choices and value not in flag.choices:
        raise ConfigurationError(f"{shown} {value!r} is unknown: choose one of {', '.join(flag.choices)}")
    if not isinstance(value, bool) and isinstance(value, Real):  # also numpy's
        value = int(value) if isinstance(value, Integral) else float(value)
        _check_range(shown, flag, value)
    allowed = tuple(each for each in (get_origin(kind) or kind for kind in kinds) if isinstance(each, type))
    if not isinstance(value, (*allowed, int) if float in allowed else allowed):
        names = " or ".join(sorted(each.__name__ for each in allowed if each is not NoneType))
        raise ConfigurationError(f"{shown} {value!r} has another type: give {names}")
    return value


def _check_range(name: str, flag: Flag, value: float) -> None:
    """Raise ConfigurationError for a number that is out of range, or NaN."""
    limits = (("at least", flag.ge, ge), ("more than", flag.gt, gt), ("at most", flag.le, le))
    given = [(words, bound, holds) for words, bound, holds in limits if bound is not None]
    if not all(holds(value, bound) for _, bound, holds in given):
        bounds = " and ".join(f"{words} {bound:g}" for words, bound, _ in given)
        raise ConfigurationError(f"{name} {value:g} is out of range: give {bounds}")


def _read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Load a `--config` file, whose values replace the defaults of flags. The command line overrides the file."""
    if path is None:
        return None
    names = {each.name: each for each in ctx.command.params if each.name != "config"}
    given: dict[str, object] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in names:
            close = get_close_matches(name, names, 1)
            hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
            raise ConfigurationError(f"--config {path}: {key} is no flag of twofold {ctx.info_name}{hint}")
        if isinstance(value, dict) and names[name].metavar == MAPPING:
            value = [json.dumps(value)]  # noqa: PLW2901  (as on the command line)
        if isinstance(value, dict) or value is None:
            raise ConfigurationError(f"--config {path}: {key} needs a value, as on the command line")
        given[name] = _as_typed(value)
    ctx.default_map = given
    return path


def _as_typed(value: object) -> object:
    if isinstance(value, list):
        return [str(each) for each in value]
    return value if isinstance(value, bool) else str(value)


def _mapping(path: Path) -> dict[object, object]:
    found = read_yaml("--config", path)
    if not isinstance(found, dict):
        raise ConfigurationError(f"--config {path} is not a mapping of flags: write lines as in `port: 8000`")
    return found


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML file of flags, as in `max-num-seqs: 64`; flags of the command line override it.",
            is_eager=True,
            callback=_read_config,
            show_default=False,
        ),
    ],
)

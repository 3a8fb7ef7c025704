"""A command line from the fields of a dataclass: `flag` makes a field, `parse` reads the arguments.

    @dataclass(frozen=True)
    class Config:
        batch_size: int = flag(64, "samples per step", "-b")

    Config(**parse(Config, "what it does", ["-b", "8"]))
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, get_args, get_type_hints

from common.errors import UsageError


def flag(default: Any, help: str, *short: str, choices: Sequence[str] = (), group: str = "run") -> Any:
    """A field of the command line. Its help goes on with the default, where there is one."""
    metadata = {"help": help, "short": short, "choices": choices, "group": group}
    return dataclasses.field(default=default, metadata=metadata)


def parse(cls: Any, doc: str | None, arguments: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all fields. `defaults` replace those of the fields; `-` and `_` in names are the same.

    Raises UsageError for arguments that are no flags, or of another type.
    """
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    hints, groups = get_type_hints(cls), {}  # type: ignore[var-annotated]
    for field in dataclasses.fields(cls):
        name = field.metadata["group"]
        groups[name] = groups.get(name) or parser.add_argument_group(name)
        _add(groups[name], field, hints[field.name], defaults.get(field.name, field.default))
    return vars(parser.parse_args([underscored(argument) for argument in arguments]))


def underscored(argument: str) -> str:
    """`--a-b=c-d` -> `--a_b=c-d`."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(**options)
        # argparse takes -1 for a value, but -1e-3 and -inf for flags: then nobody says what is wrong with them.
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; the command line; {self.prog} --help lists the flags")


def _add(group: Any, field: dataclasses.Field[Any], hint: Any, default: Any) -> None:
    """Add one field to the parser, by its type."""
    options: dict[str, Any] = {"default": default, "dest": field.name}
    inner = [part for part in get_args(hint) if part is not type(None)]
    kind = hint if isinstance(hint, type) and not get_args(hint) else inner[0]
    if get_args(kind):  # tuple[int, ...] | None
        inner, kind = list(get_args(kind)), get_args(kind)[0]
    if "tuple" in str(hint):
        options["nargs"] = "+" if Ellipsis in inner or len(inner) == 1 else len(inner)
        options["action"] = _Tuple
        kind = inner[0]
    if kind is bool:
        options["action"] = "store_true"
    else:
        options["type"] = kind
        options["metavar"] = None if field.metadata["choices"] else field.name.rsplit("_", 1)[-1].upper()
    if field.metadata["choices"]:
        options["choices"] = field.metadata["choices"]
    options["help"] = field.metadata["help"] + _shown(default)
    group.add_argument(*field.metadata["short"], f"--{field.name}", **options)


class _Tuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _shown(default: Any) -> str:
    if default is None or default is False or default == ():
        return ""
    return f" [{' '.join(map(str, default)) if isinstance(default, tuple) else default}]"

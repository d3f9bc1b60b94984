"""Fields: options of a command from a settings type; name, type, default, help and choices are those of its
fields."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, replace
from inspect import Parameter
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from critical_neurons.cli.options import read_pairs
from critical_neurons.core.settings import Plain, list_settings
from critical_neurons.errors import InvalidSettingError

NO_TEXT = {"Bounds": object, "Plan": object, "Scores": object}
"""Types of fields that cannot be given as text. Where fields are declared they are not imported, for speed."""


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace parameters of a settings type, such as `solver: Solver`, by one option per field.

    `Paper | Exact` gets one more option, named like the parameter, to choose between them; `Budget | None` is None if
    none of its options is given.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {name: group for name, each in signature.parameters.items() if (group := _read_group(each))}
    made = {name: group.make_parameters() for name, group in groups.items()}
    expanded = [new for name, each in signature.parameters.items() for new in made.get(name, [each])]
    taken = {each.name for parameters in made.values() for each in parameters}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        own = {name: value for name, value in given.items() if name not in taken}
        command(**own, **{name: group.build(given) for name, group in groups.items()})

    by_name = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in expanded]
    run.__signature__ = signature.replace(parameters=by_name)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in expanded}
    return run


@dataclass(frozen=True)
class _Option:
    """An option for a `field` of the `owners`. `within` is the settings type that is made of it, if the field can be
    one: `Lagrangian` for a loss weight."""

    name: str
    type: Any
    default: Any
    text: str
    field: str
    owners: tuple[type[Plain], ...]
    within: type[Plain] | None = None

    @property
    def flag(self) -> str:
        return _make_flag(self.name)

    def make_parameter(self) -> Parameter:
        flags = f"{self.flag}/--no-{self.flag[2:]}" if self.default is True else self.flag
        kind = self.type if self.default is not None else self.type | None
        annotation = Annotated[kind, typer.Option(flags, help=self.text)]  # type: ignore[valid-type]
        return Parameter(self.name, Parameter.KEYWORD_ONLY, default=self.default, annotation=annotation)

    def read(self, value: Any) -> Any:
        if self.within is not None:
            return self.within.from_dict({self.name: value})
        return read_pairs(self.flag, value) if self.type == list[str] else value


@dataclass(frozen=True)
class _Group:
    """The options of one parameter of a command: of one settings type, or of several to choose from."""

    name: str
    kinds: Mapping[str, type[Plain]]
    optional: bool

    @functools.cached_property
    def options(self) -> list[_Option]:
        """Each option once, with all types that have it."""
        found: dict[str, _Option] = {}
        for kind in self.kinds.values():
            for option in _list_options(kind):
                known = found.get(option.name)
                found[option.name] = replace(known, owners=(*known.owners, kind)) if known else option
        return list(found.values())

    def make_parameters(self) -> list[Parameter]:
        if len(self.kinds) == 1:
            return [option.make_parameter() for option in self.options]
        names = tuple(self.kinds)
        choice = Annotated[Literal[names], typer.Option(help=describe_choice(self.kinds))]  # type: ignore[valid-type]
        parameters = [Parameter(self.name, Parameter.KEYWORD_ONLY, default=names[0], annotation=choice)]
        for option in self.options:
            everywhere = len(option.owners) == len(self.kinds)
            text = option.text if everywhere else f"{option.text} With {self._name_owners(option)}."
            parameters.append(replace(option, text=text).make_parameter())
        return parameters

    def build(self, given: Mapping[str, Any]) -> Plain | None:
        """The settings from the given options, with defaults for the rest."""
        name = given[self.name] if len(self.kinds) > 1 else next(iter(self.kinds))
        by_field: dict[str, _Option] = {}
        for option in self.options:
            if given[option.name] in (option.default, []):
                continue
            if self.kinds[name] not in option.owners:
                raise InvalidSettingError(
                    f"{option.flag}: no setting of --{self.name} {name}. It goes with {self._name_owners(option)}."
                )
            if option.field in by_field:
                raise InvalidSettingError(
                    f"{option.flag}: takes the place of {by_field[option.field].flag}. Leave out one of them."
                )
            by_field[option.field] = option
        if self.optional and not by_field:
            return None
        return self.kinds[name](**{field: option.read(given[option.name]) for field, option in by_field.items()})

    def _name_owners(self, option: _Option) -> str:
        owners = [name for name, kind in self.kinds.items() if kind in option.owners]
        return f"--{self.name} {' or '.join(owners)}"


def name_option(field: Field[Any]) -> str:
    return _make_flag(field.metadata["option"] or field.name)


def describe_choice(kinds: Mapping[str, Any]) -> str:
    """A help text that explains each type by its summary."""
    return "; ".join(f"{name}: {kind.summary}" for name, kind in kinds.items()) + "."


def _read_group(parameter: Parameter) -> _Group | None:
    parts = _split(parameter.annotation)
    kinds = {getattr(part, "name", part.__name__): part for part in parts if _is_settings(part)}
    return _Group(parameter.name, kinds, optional=type(None) in parts) if kinds else None


def _list_options(kind: type[Plain]) -> list[_Option]:
    """If a field can itself be a settings type, the options of that type follow."""
    hints = get_type_hints(kind, localns=NO_TEXT)
    options: list[_Option] = []
    for each in list_settings(kind):
        parts = _split(hints[each.name])
        default = None if each.default is MISSING else each.default
        name, text = each.metadata["option"] or each.name, each.metadata["help"]
        options.append(_Option(name, _find_type(parts), default, text, each.name, (kind,)))
        for part in filter(_is_settings, parts):
            inner = _list_options(part)
            options += [replace(one, field=each.name, owners=(kind,), within=part) for one in inner]
    return options


def _make_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _split(hint: Any) -> tuple[Any, ...]:
    """The types of a union."""
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def _is_settings(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Plain)


def _find_type(parts: tuple[Any, ...]) -> Any:
    """The type of an option; for a mapping, a list of texts name=value."""
    texts = (bool, int, float, str)
    return next((part for part in parts if part in texts or get_origin(part) is Literal), list[str])

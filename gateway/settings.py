"""The effective settings: TOML file < environment `MOONGATE_SECTION__KEY` < command-line flags."""

import difflib
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast, get_origin, get_type_hints

import msgspec

from gateway.settings_schema import (
    ENV_PREFIX,
    Admin,
    Auth,
    Index,
    Key,
    Limits,
    ModelSettings,
    Mooncake,
    PromptSettings,
    Routing,
    Section,
    Server,
    Settings,
    Timeouts,
    Workers,
    keys,
    plain,
)

__all__ = [
    "Admin",
    "Auth",
    "Index",
    "Key",
    "Limits",
    "ModelSettings",
    "Mooncake",
    "PromptSettings",
    "Routing",
    "Server",
    "Settings",
    "SettingsError",
    "Timeouts",
    "Workers",
    "keys",
    "load",
    "render",
]

Table = dict[str, Any]


class SettingsError(Exception):
    """A setting that can't be used. The message names the key, its source and what is allowed."""


def load(file: Path | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """The effective settings.

    `flags` maps dotted keys to values; None means not given. Raises SettingsError.
    """
    layers: list[Table] = []
    if file is not None:
        layers.append(_from_file(file))
    layers.append(_from_env(env))
    layers.append(_from_flags(flags))
    merged: Table = {}
    for layer in layers:
        _merge(merged, layer)
    settings = _convert(merged, Settings, "settings")
    _refuse_shared_aliases(settings.models)
    return settings


def _refuse_shared_aliases(models: Mapping[str, ModelSettings]) -> None:
    """A name must mean one model."""
    names = {name: name for name in models}
    for model, own in models.items():
        for alias in own.aliases:
            if alias in names:
                raise SettingsError(
                    f"models.{model}.aliases: {alias!r} is a name of {names[alias]!r} already"
                )
            names[alias] = model


def render(settings: Settings) -> str:
    """The effective settings as TOML that `load` accepts, with secrets masked."""
    lines: list[str] = []
    _render_table(settings.masked(), (), lines)
    return "\n".join(lines).strip() + "\n"


def _from_file(file: Path) -> Table:
    try:
        with file.open("rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror or 'cannot be read'}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: not valid TOML: {error}") from None
    _refuse_unknown(document, Settings, "", str(file))
    _convert(document, Settings, str(file))
    return document


# Kubernetes puts MOONGATE_SERVER_PORT=tcp://10.0.0.1:80 into every pod next to a service "moongate-server".
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")


def _from_env(env: Mapping[str, str]) -> Table:
    known = {key.env: key for key in keys() if key.env}
    flattened = {name.replace("__", "_"): name for name in known}
    layer: Table = {}
    for variable, text in sorted(env.items()):
        name = variable.upper()
        if not name.startswith(ENV_PREFIX):
            continue
        if "__" not in name:
            if name in flattened and not _SERVICE_LINK.match(text):
                raise SettingsError(f"{variable}: did you mean {flattened[name]}?")
            continue
        key = known.get(name)
        if key is None:
            parent = next((k for k in known.values() if _is_open(k) and name.startswith(k.env + "__")), None)
            if name.startswith(ENV_PREFIX + "MODELS__"):
                raise SettingsError(f"{variable}: models are set in the file: their names fit no variable")
            if parent is None:
                raise SettingsError(f"{variable}: no such setting{_nearest(name, known)}")
            path = [*parent.name.split("."), name.removeprefix(parent.env + "__").lower()]
            _put(layer, path, _json_or_text(text))
        else:
            _put(layer, key.name.split("."), _parse(text, key, variable))
    return layer


def _from_flags(flags: Mapping[str, Any]) -> Table:
    layer: Table = {}
    for name, value in flags.items():
        if value is not None:
            _put(layer, name.split("."), value)
    _refuse_unknown(layer, Settings, "", "flags")
    return layer


def _parse(text: str, key: Key, variable: str) -> Any:
    """The text of an environment variable as the value of `key`; lists and tables may be JSON."""
    kind = plain(key.type)
    value: Any = text
    if get_origin(kind) is list:
        value = (
            _json_or_text(text)
            if text.lstrip().startswith("[")
            else [item.strip() for item in text.split(",") if item.strip()]
        )
    elif get_origin(kind) is dict:
        value = _json_or_text(text)
    try:
        return msgspec.convert(value, key.type, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{variable}: {_reason(error)}; allowed: {key.allowed}") from None


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refuse_unknown(document: Table, struct: type[Section], prefix: str, source: str) -> None:
    fields = get_type_hints(struct)
    for name, value in document.items():
        if name not in fields:
            hint = _nearest(prefix + name, {key.name for key in keys()})
            if not prefix and isinstance(value, dict) and difflib.get_close_matches(name, fields, 1):
                hint = f"; nearest: {difflib.get_close_matches(name, fields, 1)[0]}"
            raise SettingsError(f"{source}: no such setting: {prefix}{name}{hint}")
        form, table = fields[name], _table(value)
        if table is None:
            continue
        if isinstance(form, type) and issubclass(form, Section):
            _refuse_unknown(table, form, f"{prefix}{name}.", source)
        elif form == dict[str, ModelSettings]:
            for model, options in table.items():
                _refuse_unknown(_table(options) or {}, ModelSettings, f"{prefix}{name}.{model}.", source)


def _table(value: Any) -> Table | None:
    return cast(Table, value) if isinstance(value, dict) else None


def _nearest(name: str, known: Collection[str]) -> str:
    """A hint at the known name that was probably meant: same last part elsewhere, else the closest."""
    separator = "__" if "__" in name else "."
    last = name.rsplit(separator, 1)[-1]
    alike = difflib.get_close_matches(name, known, 1, cutoff=0.75)
    elsewhere = [k for k in known if k.rsplit(separator, 1)[-1] == last]
    found = alike or elsewhere or difflib.get_close_matches(name, known, 1, cutoff=0.4)
    return f"; nearest: {found[0]}" if found else ""


_AT = re.compile(r"^(.*?)(?: - at (?:`key` in )?`(?:key in )?\$\.?(.*)`)?$", re.DOTALL)


def _convert(document: Mapping[str, Any], struct: type[Settings], source: str) -> Settings:
    try:
        return msgspec.convert(document, struct)
    except msgspec.ValidationError as error:
        path = _path(error)
        key = next((k for k in keys() if _covers(k.name, path)), None)
        allowed = f"; allowed: {key.allowed}" if key else ""
        raise SettingsError(f"{source}: {path or 'document'}: {_reason(error)}{allowed}") from None


def _path(error: msgspec.ValidationError) -> str:
    match = _AT.match(str(error))
    return (match.group(2) or "") if match else ""


def _reason(error: msgspec.ValidationError) -> str:
    """What was wrong, without the value: it may be a secret."""
    match = _AT.match(str(error))
    text = match.group(1) if match else str(error)
    return re.sub(r"^Invalid enum value .*", "not one of the allowed values", text.replace("`", ""))


def _covers(name: str, path: str) -> bool:
    """Whether the setting `name` is what the path of an error points at (`models[...].x`, `urls[0]`)."""
    path = path.replace("[...]", ".*")
    return path == name or path.startswith((name + ".", name + "["))


def _merge(into: Table, layer: Table) -> None:
    for name, value in layer.items():
        old, new = _table(into.get(name)), _table(value)
        if old is not None and new is not None:
            merged = dict(old)
            _merge(merged, new)
            into[name] = merged
        else:
            into[name] = value


def _put(layer: Table, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        layer = layer.setdefault(name, {})
    layer[path[-1]] = value


def _is_open(key: Key) -> bool:
    return get_origin(plain(key.type)) is dict


def _render_table(table: Table, path: tuple[str, ...], lines: list[str]) -> None:
    inner = {name: below for name, value in table.items() if (below := _table(value)) is not None}
    values = {name: value for name, value in table.items() if name not in inner}
    if path and (values or not table):
        lines += ["", f"[{'.'.join(_bare(part) for part in path)}]"]
    lines += [f"{_bare(name)} = {_literal(value)}" for name, value in values.items()]
    for name, below in inner.items():
        _render_table(below, (*path, name), lines)


def _bare(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(text: str) -> str:
    # JSON strings are TOML basic strings except for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _literal(value: Any) -> str:
    table = _table(value)
    if table is not None:
        return "{" + ", ".join(f"{_bare(name)} = {_literal(item)}" for name, item in table.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_literal(item) for item in cast(list[Any], value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, (int, float)) else _text(str(value))

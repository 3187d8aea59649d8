"""Files of the catalog: TOML with a table per accelerator, machine, link, tier or model.

An entry is kept as it was written until all files are read, because a later one may change a field of it.

The catalog: accelerators, machines, links, tiers and models by name, from data files with a source for each.
"""

import datetime as dt
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.hf_config import read_model
from twofold.hardware.specs import Accelerator, Link, Machine, Model, StorageTier
from twofold.hardware.suggestions import explain_validation, suggestion, unknown_name

T = TypeVar("T", bound=msgspec.Struct)

KINDS: dict[str, type[msgspec.Struct]] = {
    "accelerators": Accelerator,
    "machines": Machine,
    "links": Link,
    "tiers": StorageTier,
    "models": Model,
}


class CatalogEntry(msgspec.Struct, frozen=True):
    """The fields of one table, and the place that people find it at."""

    where: str
    fields: dict[str, object]

    def changed_by(self, later: "CatalogEntry") -> "CatalogEntry":
        """This entry with the fields of a later one, which names its file as source unless it states one."""
        source = f"{later.where}; the rest: {self.fields.get('source')}"
        return CatalogEntry(later.where, {**self.fields, "source": source, **later.fields})

    def refuse(self, field: str, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self.where}: field {field}: {reason}")


Sections = Mapping[str, Mapping[str, CatalogEntry]]


def read_file(path: Path) -> Sections:
    """The entries of a user's file; raises ConfigurationError for what cannot be read or is not of the catalog."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigurationError(f"catalog {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"catalog {path} is not a text file in UTF-8") from error
    return read_text(text, str(path))


def read_text(text: str, name: str) -> Sections:
    """The entries of a file with this content; `name` is what the file is called in complaints."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"catalog {name} is not TOML: {error}") from error
    for section in raw:
        if section not in KINDS:
            raise ConfigurationError(f"catalog {name}: {unknown_name('section', section, KINDS)}")
    return {section: _entries(section, raw.get(section, {}), name) for section in KINDS}


def merge_sections(earlier: Sections, later: Sections) -> Sections:
    """Both; an entry of the later file changes the fields it names of an earlier one with its name."""
    return {
        section: {
            **earlier[section],
            **{
                name: earlier[section][name].changed_by(entry) if name in earlier[section] else entry
                for name, entry in later[section].items()
            },
        }
        for section in KINDS
    }


def build_entry(name: str, entry: CatalogEntry, kind: type[T]) -> T:
    """The value that an entry describes; raises ConfigurationError with file, entry and field if it describes none."""
    known = [field for field in kind.__struct_fields__ if field != "name"]
    for field in entry.fields:
        if field not in known:
            raise entry.refuse(field, f"there is no such field{suggestion(field, known)}")
    try:
        return msgspec.convert({"name": name, **entry.fields}, kind)
    except msgspec.ValidationError as error:
        place, what = explain_validation(error)
        if not place:  # a field that is not there has no place of its own: the reason names it
            raise ConfigurationError(f"{entry.where}: {what}") from error
        raise entry.refuse(place, what) from error


def _entries(section: str, tables: object, name: str) -> dict[str, CatalogEntry]:
    """The tables of one section."""
    place = f"catalog {name}"
    if not isinstance(tables, dict):
        raise ConfigurationError(
            f"{place}: {section} must hold a table for each name, as in [{section}.mine]"
        )
    entries = {}
    for key, fields in tables.items():
        entry = CatalogEntry(f"{place}: {section}.{key}", fields if isinstance(fields, dict) else {})
        if not isinstance(fields, dict):
            raise ConfigurationError(f"{entry.where} must be a table of fields, as in [{section}.mine]")
        entries[key] = CatalogEntry(
            entry.where, {field: _plain(entry, field, value) for field, value in fields.items()}
        )
    return entries


def _plain(entry: CatalogEntry, field: str, value: object) -> object:
    """A value as TOML has it, made what was meant: 80e9 is an integer, and 2024-06-01 may be written bare."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise entry.refuse(field, f"{value} is not a number to reckon with")
        return int(value) if value.is_integer() else value
    return value.isoformat() if isinstance(value, dt.date) else value


ENVIRONMENT: Final = "TWOFOLD_CATALOG"
_FAMILY: Final = "dgx-"


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known by name. Names that are not known raise ConfigurationError with the nearest and all of them."""

    accelerators: dict[str, Accelerator]
    machines: dict[str, Machine]
    links: dict[str, Link]
    tiers: dict[str, StorageTier]
    models: dict[str, Model]

    def accelerator(self, name: str) -> Accelerator:
        try:
            return self.accelerators[name]
        except KeyError:
            raise unknown_name("accelerator", name, self.accelerators) from None

    def machine(self, name: str) -> Machine:
        """A machine by its name, or `dgx-x` by the name `x`."""
        for full in (name, f"{_FAMILY}{name}"):
            if full in self.machines:
                return self.machines[full]
        short = (full.removeprefix(_FAMILY) for full in self.machines)
        raise unknown_name("machine", name, self.machines, also=short)

    def link(self, name: str) -> Link:
        try:
            return self.links[name]
        except KeyError:
            raise unknown_name("link", name, self.links) from None

    def tier(self, name: str) -> StorageTier:
        try:
            return self.tiers[name]
        except KeyError:
            raise unknown_name("tier", name, self.tiers) from None

    def model(self, name: str) -> Model:
        """A model by its name, or of a directory that holds a Hugging Face config.json.

        Raises ModelError for a directory that cannot be understood.
        """
        if name in self.models:
            return self.models[name]
        directory = Path(name).expanduser()
        if name and directory.is_dir():
            return read_model(directory)
        owner, slash, last = name.rpartition("/")
        if slash:  # a path, or a name as model hubs write it: the last part is what may be near
            hint = suggestion(last, self.models)
            raise ConfigurationError(
                f"model {owner}/{last} is neither a directory with a config.json nor a name of the catalog{hint}"
            )
        raise unknown_name("model", name, self.models)


def load_catalog(extra: Sequence[Path] = ()) -> Catalog:
    """The catalog of the package, changed and extended by files: those of the environment variable
    TWOFOLD_CATALOG, then `extra`, in order. A table of a later file may name only the fields that it changes.

    Raises ConfigurationError with file, entry and field for a file that cannot be read or understood.
    """
    sections = _package()
    for path in (*_environment(), *extra):
        sections = merge_sections(sections, read_file(path))
    accelerators = {
        name: build_entry(name, entry, Accelerator) for name, entry in sections["accelerators"].items()
    }
    return Catalog(
        accelerators=accelerators,
        machines={
            name: build_entry(name, _equipped(entry, sections["accelerators"]), Machine)
            for name, entry in sections["machines"].items()
        },
        links={name: build_entry(name, entry, Link) for name, entry in sections["links"].items()},
        tiers={name: build_entry(name, entry, StorageTier) for name, entry in sections["tiers"].items()},
        models={
            name: _checked(build_entry(name, entry, Model), entry)
            for name, entry in sections["models"].items()
        },
    )


@cache
def _package() -> Sections:
    """The entries of the files that come with the package."""
    folder = files("twofold.hardware").joinpath("data")
    sections: Sections = {section: {} for section in KINDS}
    for section in KINDS:
        name = f"{section}.toml"
        sections = merge_sections(
            sections, read_text(folder.joinpath(name).read_text(encoding="utf-8"), name)
        )
    return sections


def _environment() -> list[Path]:
    return [Path(part) for part in os.environ.get(ENVIRONMENT, "").split(os.pathsep) if part]


def _equipped(entry: CatalogEntry, accelerators: Mapping[str, CatalogEntry]) -> CatalogEntry:
    """A machine's entry with its accelerator in place of the accelerator's name."""
    name = entry.fields.get("accelerator")
    if name is None:
        return entry
    if not isinstance(name, str):
        raise entry.refuse("accelerator", "it must be the name of an accelerator")
    if name not in accelerators:
        raise entry.refuse("accelerator", str(unknown_name("accelerator", name, accelerators)))
    return CatalogEntry(
        entry.where, {**entry.fields, "accelerator": {"name": name, **accelerators[name].fields}}
    )


def _checked(model: Model, entry: CatalogEntry) -> Model:
    """The model, if its figures can all be true at once."""
    if model.heads % model.kv_heads:
        raise entry.refuse("kv_heads", f"{model.heads} heads cannot share {model.kv_heads} KV heads evenly")
    if model.active_parameters > model.parameters:
        raise entry.refuse("active_parameters", "there cannot be more of them than parameters")
    return model

"""Catalog of accelerators, machines, links, storage tiers and models."""

import datetime as dt
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from twofold.errors import ConfigurationError
from twofold.hardware.hf_config import read_model
from twofold.hardware.specs import Accelerator, Link, Machine, Model, StorageTier
from twofold.hardware.suggestions import explain_validation, parse_toml, read_text, suggestion, unknown_name

T = TypeVar("T", bound=msgspec.Struct)

SECTION_TYPES: dict[str, type[msgspec.Struct]] = {
    "accelerators": Accelerator,
    "machines": Machine,
    "links": Link,
    "tiers": StorageTier,
    "models": Model,
}


class CatalogEntry(msgspec.Struct, frozen=True):
    """Fields of one TOML table, with their location for error messages."""

    where: str
    fields: dict[str, object]

    def overridden_by(self, later: "CatalogEntry") -> "CatalogEntry":
        """Return a copy of this entry, updated with the fields that `later` sets."""
        # The source of an entry that does not state its own.
        source = f"{later.where}; the rest: {self.fields.get('source')}"
        return CatalogEntry(later.where, {**self.fields, "source": source, **later.fields})

    def error(self, field: str, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self.where}: field {field}: {reason}")


Sections = Mapping[str, Mapping[str, CatalogEntry]]


def parse_entries(text: str, name: str) -> Sections:
    """Parse the entries of a catalog file. `name` identifies the file in errors."""
    raw = parse_toml("catalog", text, name)
    for section in raw:
        if section not in SECTION_TYPES:
            raise ConfigurationError(f"catalog {name}: {unknown_name('section', section, SECTION_TYPES)}")
    return {section: _entries(section, raw.get(section, {}), name) for section in SECTION_TYPES}


def merge_sections(earlier: Sections, later: Sections) -> Sections:
    """Merge the entries of two catalog files; the fields in `later` take precedence."""
    return {
        section: {
            **earlier[section],
            **{
                name: earlier[section][name].overridden_by(entry) if name in earlier[section] else entry
                for name, entry in later[section].items()
            },
        }
        for section in SECTION_TYPES
    }


def build_entry(name: str, entry: CatalogEntry, kind: type[T]) -> T:
    """Convert an entry to the type `kind`. Raises ConfigurationError with file, entry and field if it is invalid."""
    known = [field for field in kind.__struct_fields__ if field != "name"]
    for field in entry.fields:
        if field not in known:
            raise entry.error(field, f"unknown field{suggestion(field, known)}")
    try:
        return msgspec.convert({"name": name, **entry.fields}, kind)
    except msgspec.ValidationError as error:
        place, what = explain_validation(error)
        if not place:  # missing fields are named in the reason
            raise ConfigurationError(f"{entry.where}: {what}") from error
        raise entry.error(place, what) from error


def _entries(section: str, tables: object, name: str) -> dict[str, CatalogEntry]:
    """Return the entries in one section of a parsed catalog file."""
    place = f"catalog {name}"
    if not isinstance(tables, dict):
        raise ConfigurationError(f"{place}: {section} must hold a table for each name, as in [{section}.mine]")
    entries = {}
    for key, fields in tables.items():
        entry = CatalogEntry(f"{place}: {section}.{key}", fields if isinstance(fields, dict) else {})
        if not isinstance(fields, dict):
            raise ConfigurationError(f"{entry.where} must be a table of fields, as in [{section}.mine]")
        entries[key] = CatalogEntry(
            entry.where, {field: _normalized(entry, field, value) for field, value in fields.items()}
        )
    return entries


def _normalized(entry: CatalogEntry, field: str, value: object) -> object:
    """Normalize a TOML value: a whole float such as 80e9 becomes an integer, and a date becomes text."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise entry.error(field, f"must be finite, not {value}")
        return int(value) if value.is_integer() else value
    return value.isoformat() if isinstance(value, dt.date) else value


ENVIRONMENT: Final = "TWOFOLD_CATALOG"
_FAMILY: Final = "dgx-"


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """All catalog entries by name. Lookups raise ConfigurationError for unknown names."""

    accelerators: dict[str, Accelerator]
    machines: dict[str, Machine]
    links: dict[str, Link]
    tiers: dict[str, StorageTier]
    models: dict[str, Model]

    def accelerator(self, name: str) -> Accelerator:
        return _find("accelerator", name, self.accelerators)

    def machine(self, name: str) -> Machine:
        """Look up a machine by name. The prefix `dgx-` may be omitted."""
        for full in (name, f"{_FAMILY}{name}"):
            if full in self.machines:
                return self.machines[full]
        short = (full.removeprefix(_FAMILY) for full in self.machines)
        raise unknown_name("machine", name, self.machines, also=short)

    def link(self, name: str) -> Link:
        return _find("link", name, self.links)

    def tier(self, name: str) -> StorageTier:
        return _find("tier", name, self.tiers)

    def model(self, name: str) -> Model:
        """Look up a model by name, or read the Hugging Face directory `name`. Raises ModelError if unsupported."""
        if name in self.models:
            return self.models[name]
        directory = Path(name).expanduser()
        if name and directory.is_dir():
            return read_model(directory)
        if "/" in name:  # a path or hub name: suggest by its last part
            hint = suggestion(name.rpartition("/")[2], self.models)
            raise ConfigurationError(
                f"model {name} is neither a directory with a config.json nor a name of the catalog{hint}"
            )
        raise unknown_name("model", name, self.models)


def _find(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise unknown_name(kind, name, known)
    return known[name]


def load_catalog(extra: Sequence[Path | str] = ()) -> Catalog:
    """Load the package's catalog and the files in TWOFOLD_CATALOG and `extra`. Raises ConfigurationError if invalid."""
    sections = _package_sections()
    installed = filter(None, os.environ.get(ENVIRONMENT, "").split(os.pathsep))
    for path in map(Path, (*installed, *extra)):  # later files override single fields
        sections = merge_sections(sections, parse_entries(read_text("catalog", path), str(path)))
    accelerators = {name: build_entry(name, entry, Accelerator) for name, entry in sections["accelerators"].items()}
    return Catalog(
        accelerators=accelerators,
        machines={
            name: build_entry(name, _with_accelerator(entry, sections["accelerators"]), Machine)
            for name, entry in sections["machines"].items()
        },
        links={name: build_entry(name, entry, Link) for name, entry in sections["links"].items()},
        tiers={name: build_entry(name, entry, StorageTier) for name, entry in sections["tiers"].items()},
        models={name: _validated(build_entry(name, entry, Model), entry) for name, entry in sections["models"].items()},
    )


@cache
def _package_sections() -> Sections:
    """Return the catalog entries in the package's data files."""
    folder = files("twofold.hardware").joinpath("data")
    sections: Sections = {section: {} for section in SECTION_TYPES}
    for section in SECTION_TYPES:
        name = f"{section}.toml"
        sections = merge_sections(sections, parse_entries(folder.joinpath(name).read_text(encoding="utf-8"), name))
    return sections


def _with_accelerator(entry: CatalogEntry, accelerators: Mapping[str, CatalogEntry]) -> CatalogEntry:
    """Insert the fields of a machine's accelerator into the entry of the machine."""
    name = entry.fields.get("accelerator")
    if name is None:
        return entry
    if not isinstance(name, str):
        raise entry.error("accelerator", "it must be the name of an accelerator")
    if name not in accelerators:
        raise entry.error("accelerator", str(unknown_name("accelerator", name, accelerators)))
    return CatalogEntry(entry.where, {**entry.fields, "accelerator": {"name": name, **accelerators[name].fields}})


def _validated(model: Model, entry: CatalogEntry) -> Model:
    """Return the model. Raises ConfigurationError for contradictory numbers of heads or of parameters."""
    if model.heads % model.kv_heads:
        raise entry.error("kv_heads", f"{model.heads} heads cannot share {model.kv_heads} KV heads evenly")
    if model.active_parameters > model.parameters:
        raise entry.error("active_parameters", "must be at most the number of parameters")
    if model.expert_parameters > model.parameters:
        raise entry.error("expert_parameters", "must be at most the number of parameters")
    return model

"""User-facing errors for unknown names and invalid values."""

import difflib
import re
from collections.abc import Iterable

import msgspec

from twofold.errors import ConfigurationError

_PLACE = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<place>.*)`)?", re.DOTALL)


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean h100?)`, or an empty string if no known name is similar."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" (did you mean {by_lower[found[0]]}?)" if found else ""


def unknown_name(kind: str, name: str, known: Iterable[str], *, also: Iterable[str] = ()) -> ConfigurationError:
    """Create the error for a name that is not in `known`; `also` are accepted aliases that the error does not list."""
    names = sorted(known)
    hint = suggestion(name, (*names, *also))
    return ConfigurationError(f"unknown {kind} {name!r}{hint}; choose from {', '.join(names)}")


def explain_validation(error: msgspec.ValidationError) -> tuple[str, str]:
    """Split a validation error into (place, reason); place is empty for the whole value."""
    found = _PLACE.fullmatch(str(error))
    place, what = (found["place"] or "", found["what"]) if found else ("", str(error))
    what = what.replace("`", "").replace("Object ", "").replace("object", "table")
    return place, what[:1].lower() + what[1:]

"""Pages with figures of the evidence: the Evidence page, and marked figures of the README."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from evidence_entry import Entry, Record, Records

README, PAGE = Path("README.md"), Path("docs/evidence.md")
_MARKED = re.compile(r"<!-- evidence (?P<name>[\w-]+)\.(?P<figure>[\w-]+) -->(?P<shown>.*?)<!-- / -->", re.DOTALL)
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_UNIT = (
    r"×|%|[µmn]?s|seconds?|minutes?|hours?|points|digits|times|[kKMGT]i?B|bytes|[kM]?W|[GM]bit/s"
    r"|(?:tokens?|requests?|simulations|streams|plans|rows)(?:/s)?"
)
_WORD = r"(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty|hundred|thousand)"
# A number with a unit, a decimal or a thousand; or a number word with a unit.
_FIGURE = re.compile(
    rf"(?<![\w.,/-])(?:{_NUMBER}[\s-]?(?:{_UNIT})(?!\w)|\d+(?:,\d{{3}})+(?:\.\d+)?|\d+\.\d+(?![\w.]*\w))"
    rf"|\b(?i:{_WORD})\s(?:seconds|minutes|hours|times|digits|percent)\b"
)
_NO_PROSE = (
    re.compile(r"^( *)(`{3,}).*?^\1\2`*$", re.DOTALL | re.MULTILINE),
    _MARKED,
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"`[^`\n]+`"),
    re.compile(r"(?<=\])\([^)\s]*\)"),  # the target of a link
)
_HEAD = (
    "# Evidence\n\n"
    "Each claim has a command, and each figure comes from the command's last run. `make evidence` runs the commands, "
    "records their results in [`evidence.json`](evidence.json), and writes this page and the "
    "marked figures of the README. `make docs` fails if a figure differs from its record. Other pages explain the "
    "results; their further tables have a command, machine and date each.\n\n"
)

_FURTHER = """## Further runs

- Answers under faults, on your service: `twofold torture URL` ([Test a service under faults](torture.md)).
- Predictions from a measured profile against AIPerf's measurements: `python bench/vllm/loop.py`
  ([Measure your hardware](characterize.md)).
- Golden values of other simulators and papers: `tests/golden`; the same tokens over every path: `tests/serving`.
"""


class PageError(Exception):
    """A figure that a page asks for has no record."""


def write(entries: Sequence[Entry], records: Records, root: Path) -> None:
    """Write the Evidence page, and the marked figures of the README. Raises PageError for an unknown figure."""
    (root / README).write_text(readme((root / README).read_text(), records))
    (root / PAGE).write_text(page(entries, records))


def readme(text: str, records: Records) -> str:
    """Return a text with the marked figures as recorded. Raises PageError for a figure without a record."""

    def shown(found: re.Match[str]) -> str:
        figure = _figure(records, found["name"], found["figure"])
        inner = f"\n```\n{figure.rstrip()}\n```\n" if "\n" in figure else figure
        return f"<!-- evidence {found['name']}.{found['figure']} -->{inner}<!-- / -->"

    return _MARKED.sub(shown, text)


def page(entries: Sequence[Entry], records: Records) -> str:
    """Return the Evidence page. Raises PageError for a figure without a record."""
    places: dict[str, str] = {}
    rows = ["| claim | command | result | measured |", "| --- | --- | --- | --- |"]
    for entry in entries:
        if entry.name not in records:
            rows.append(f"| {entry.claim} | `{entry.command}` | no result recorded yet | |")
            continue
        record = records[entry.name]
        letter = places.setdefault(_place(record), chr(ord("A") + len(places)))
        command = f"`{record.command}`" + (f" (short for {entry.form})" if entry.form else "")
        busy = f"load average {record.load:.0f}" if (record.load or 0.0) > record.machine.cores / 2 else ""
        note = "".join(f"; {each}" for each in (busy, record.note) if each)
        result = f"{summary(entry, record)} ([explained]({entry.page}))"
        rows.append(f"| {entry.claim} | {command} | {result} | {record.date}, {letter}{note} |")
    machines = [f"- {letter}: {place}" for place, letter in places.items()]
    return _HEAD + "\n".join([*rows, "", "## Machines and versions", "", *machines, "", _FURTHER])


def _place(record: Record) -> str:
    """Return machine and versions of a record, without the commit, which the JSON has."""
    system = f", {record.machine.os}" if record.machine.os else ""
    versions = ", ".join(f"{name} {version.partition(' ')[0]}" for name, version in record.versions.items())
    return f"{record.machine}{system}; {versions}"


def summary(entry: Entry, record: Record) -> str:
    try:
        return entry.summary.format(**{name: _line(str(figure)) for name, figure in record.figures.items()})
    except KeyError as error:
        raise PageError(f"{entry.name} has no recorded figure {error}: run `make evidence ONLY={entry.name}`") from None


def problems(entries: Sequence[Entry], allowed: Mapping[str, str], records: Records, root: Path) -> Iterator[str]:
    """Yield a sentence for each figure of the pages that differs from its record, or has none."""
    text = (root / README).read_text()
    yield from _changed(text, records)
    yield from _outdated(entries, records, root)
    yield from _unrecorded(_prose(entries, text), allowed)


def _changed(text: str, records: Records) -> Iterator[str]:
    """Yield the marked figures of the README that differ from their records."""
    for found in _MARKED.finditer(text):
        where = f"{README}:{_line_of(text, found.start())}: {found['name']}.{found['figure']}"
        try:
            wanted = _MARKED.fullmatch(readme(found[0], records))
        except PageError as error:
            yield f"{where}: {error}"
            continue
        if wanted is not None and wanted[0] != found[0]:
            yield f"{where} is {_short(found['shown'])}, and recorded as {_short(wanted['shown'])}"
        if text[: found.start()].rpartition("\n")[2].strip(" >") == "" and "\n" not in found["shown"]:
            yield f"{where}: a line that begins with a mark is no Markdown: put a word before it"


def _outdated(entries: Sequence[Entry], records: Records, root: Path) -> Iterator[str]:
    """Yield differences between the entries, their records and the Evidence page."""
    try:
        if (root / PAGE).read_text() != page(entries, records):
            yield f"{PAGE} differs from the recorded results: `python tools/evidence.py write` writes it"
    except PageError as error:
        yield str(error)
    for entry in entries:
        if entry.name in records and records[entry.name].command != entry.command:
            yield f"{entry.name} was recorded with another command: run `make evidence ONLY={entry.name}`"
    for name in sorted(set(records) - {entry.name for entry in entries}):
        yield f"{name} is recorded, but no entry has this name"


def _prose(entries: Sequence[Entry], text: str) -> dict[str, str]:
    """Return the texts in which each number must be marked or allowed, by their place."""
    prose = {str(README): text, str(PAGE): _HEAD}
    for entry in entries:
        prose[f"entry {entry.name}"] = "\n".join((entry.claim, re.sub(r"{.*?}", "", entry.summary), entry.form))
    return prose


def _unrecorded(prose: Mapping[str, str], allowed: Mapping[str, str]) -> Iterator[str]:
    for where, source in prose.items():
        for number, figure in unmarked(source, allowed):
            line = f":{number}" if where.endswith(".md") else ""
            yield f"{where}{line}: {figure!r} is not recorded: mark a recorded figure, or give a reason in ALLOWED"
    for snippet in allowed:
        if not any(_flexible(snippet).search(source) for source in prose.values()):
            yield f"ALLOWED has {snippet!r}, which no page contains"


def unmarked(text: str, allowed: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each figure in the prose that is neither marked nor allowed."""
    for pattern in (*_NO_PROSE, *map(_flexible, allowed)):
        text = pattern.sub(lambda found: re.sub(r"\S", " ", found[0]), text)
    for found in _FIGURE.finditer(text):
        yield _line_of(text, found.start()), found[0]


def _figure(records: Records, name: str, figure: str) -> str:
    record = _record(records, name)
    known = {"machine": str(record.machine), "date": record.date, **record.figures}
    if figure not in known:
        raise PageError(f"{name} has no recorded figure {figure!r}, but {', '.join(known)}")
    return str(known[figure])


def _record(records: Records, name: str) -> Record:
    if name not in records:
        raise PageError(f"{name} has no recorded result: run `make evidence ONLY={name}`")
    return records[name]


def _flexible(snippet: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(map(re.escape, snippet.split())))


def _line(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _short(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else f"{text[:59]}…")


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1

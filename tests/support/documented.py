"""Commands and Python snippets of Markdown pages."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
_SHORT = re.compile(r"<!-- short: (.*) -->")
_PROGRAMS = {"twofold", "python", "make", "pip", "curl", "docker", "kubectl", "helm", "ray", "vllm"}
_FEW = {"python", "make", "twofold"}  # programs that prose names with arguments


@dataclass(frozen=True, slots=True)
class Statement:
    """A shell command, a `for` loop, or a Python snippet of a page.

    `short` has the flags that make its `bench`, `plan` or `simulate` quick enough for a test. In the page, the comment
    `<!-- short: FLAGS -->` stands above the block. A statement is `inline` if it stands in a sentence.
    """

    page: Path
    text: str
    short: str = ""
    inline: bool = False
    python: bool = False

    @property
    def program(self) -> str:
        """Name of the program, after assignments of environment variables."""
        return Path(next(_words_of_program(self.text), "")).name

    @property
    def benchmark(self) -> bool:
        """Whether the statement runs a script of `bench`."""
        return self.program == "python" and bool(re.search(r"python bench/\S+\.py", self.text))

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each `twofold` command, without those after a pipe, a semicolon or an ampersand."""
        if not self.python:
            for line in self.text.splitlines():
                if line.lstrip().startswith("twofold "):
                    yield _words(line)


def _words_of_program(text: str) -> Iterator[str]:
    return (word for word in text.split() if not re.match(r"\w+=|sudo$", word))


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    ends = [place for place, word in enumerate(words) if word in {"|", ";", "&&", "&"}]
    return words[: ends[0]] if ends else words


def runs(statement: Statement) -> bool:
    """Whether a test can run a statement: code blocks, and inline commands that have all their arguments."""
    if not statement.inline or statement.python:
        return True
    words = next(statement.commands(), [])
    complete = not {"…", "..."} & set(words) and not re.search(r"\w\|\w", statement.text)
    given = words[3:] if words[1:2] and words[1] in {"calibrate", "model", "pools", "trace"} else words[2:]
    return complete and bool(given) and (not given[0].startswith("-") or given == ["--help"])


class Page:
    """A Markdown page and its statements."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def statements(self) -> list[Statement]:
        return statements(self.path)


PAGES = [Page(path) for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]


def statements(page: Path) -> list[Statement]:
    """Return the commands of a page in their order: of code blocks without a language or `sh`, and in sentences."""
    found: list[Statement] = []
    short = ""
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (note := _SHORT.match(token.content)):
            short = note[1]
            continue
        if token.type == "code_block" or (token.type == "fence" and token.info in {"", "sh"}):
            found += [Statement(page, text, short) for text in _split(token.content)]
        elif token.type == "fence" and token.info == "python":
            found.append(Statement(page, token.content, python=True))
        elif token.type == "inline":
            found += [Statement(page, text, short, inline=True) for text in _inline(token)]
            continue  # the comment applies until the next block
        if token.type != "paragraph_open":
            short = ""
    return found


def yaml_blocks(page: Path) -> list[str]:
    """Return the YAML blocks of a page."""
    return [token.content for token in MarkdownIt().parse(page.read_text(encoding="utf-8")) if token.info == "yaml"]


def _inline(token: Token) -> Iterator[str]:
    for child in token.children or ():
        text = " ".join(child.content.split())
        if child.type == "code_inline" and text.partition(" ")[0] in _FEW and " " in text:
            yield text


def _split(block: str) -> Iterator[str]:
    """Yield the statements of a block: lines, with continuations joined, and loops as a whole."""
    loop: list[str] = []
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if loop or line.startswith("for "):
            loop.append(line)
            if line == "done":
                yield "\n".join(loop)
                loop = []
        elif not line.startswith(" ") and Statement(Path(), line).program in _PROGRAMS:
            yield line

"""Commands in the code blocks of Markdown pages."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

_SHORT = re.compile(r"<!-- short: (.*) -->")


@dataclass(frozen=True, slots=True)
class CommandBlock:
    """Block of shell commands in a Markdown file.

    `short` has the flags that make its `twofold` commands quick enough for a test. In the page, the comment
    `<!-- short: FLAGS -->` stands above the block.
    """

    page: Path
    text: str
    short: str

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each `twofold` command in the block, without those after a pipe or a semicolon."""
        for line in self.text.replace("\\\n", " ").splitlines():
            if not line.lstrip().startswith("twofold "):
                continue
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
            lexer.whitespace_split, lexer.commenters = True, "#"
            words = list(lexer)
            ends = [place for place, word in enumerate(words) if word in {"|", ";", "&&", "&"}]
            yield words[: ends[0]] if ends else words

    def shortened(self) -> str:
        """Return the block with its `short` flags at the end of each `twofold` command."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return "\n".join(f"{line} {self.short}" if line.lstrip().startswith("twofold ") else line for line in lines)


def command_blocks(page: Path) -> list[CommandBlock]:
    """Return the code blocks of a page that have no language, or `sh`."""
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    notes = [_SHORT.match(token.content) if token.type == "html_block" else None for token in tokens]
    return [
        CommandBlock(page, token.content, note[1] if note else "")
        for note, token in zip([None, *notes], tokens, strict=False)
        if token.type == "code_block" or (token.type == "fence" and token.info in {"", "sh"})
    ]

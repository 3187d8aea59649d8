"""Check the wording of docstrings, comments, messages and Markdown.

    python tools/wording.py [--list] [PATH ...]

The check searches for:
- a clause as the subject of a sentence ("What was read is …")
- a chain of pronouns ("those that", "of what")
- an archaic adverb ("thereby")
- a program described like a person ("the worker says that it lives")

A match is only a hint: rewrite the whole sentence. The exit status is 1 if over 3% of the texts of one kind,
such as comments, match.
"""

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LIMIT = 0.03
_PHRASES = (
    # pronoun chains
    (
        r"\b(?i:those|that|these|ones?|all|any|each|none|nothing|anything|everybody|somebody)"
        r" (?:that|which|who|whose)\b"
    ),
    r"\b(?i:of|from|by|with|for|in|to|than|on|at|as) (?:what|whatever|whichever|whom)\b",
    r"\b(?i:nobody|somebody|who(?:so)?ever|whichever|whatever|wherever|how-manieth)\b",
    # a clause as the subject of a sentence that is no question
    r"(?:^|[.:;(] ?)(?:What|Who|Whoever|Whatever|Whichever|Which|How the)\b(?![^.:;)]*\?)",
    # archaic adverbs
    r"\b(?i:elsewhere|thereby|thereof|whereupon|whereby|beforehand|hitherto|any more)\b",
    # passive of saying, knowing, giving; programs that speak
    r"\b(?:is|are|was|were|be|been) (?:told|said|heard|asked|known|given|meant|wanted|had)\b",
    (
        r"\b(?:says?|said|tells?|hears?|asks?|knows?)"
        r" (?:that|what|how|which|who|when|where|whether|so|it|nothing)\b"
    ),
    r"\b(?:go|goes|going|went) by\b",
    r"\b(?:does|do|did|has|have) (?:so|likewise)\b",
)
ROUNDABOUT = re.compile("|".join(_PHRASES))
_WORD = re.compile(r"[A-Za-z]{2,}")


def texts(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield the comments, docstrings and other texts of a Python or Markdown file, as (kind, line number, text)."""
    if path.suffix == ".md":
        yield from _sentences(path.read_text())
    elif path.suffix == ".py":
        yield from _python(path)


def _sentences(text: str) -> Iterator[tuple[str, int, str]]:
    paragraph: list[str] = []
    fenced, start = False, 1
    for number, line in enumerate([*text.splitlines(), ""], 1):
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        if line.strip() and not fenced and not fence:
            start = start if paragraph else number
            paragraph.append(line.strip())
            continue
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`*])", " ".join(paragraph)):
            if len(_WORD.findall(sentence)) >= 4:
                yield "Markdown", start, sentence
        paragraph = []


def _python(path: Path) -> Iterator[tuple[str, int, str]]:
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]  # a docstring is an expression
            yield "docstrings", node.body[0].lineno, " ".join(text.split())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = " ".join(node.value.split())
            if len(_WORD.findall(text)) >= 5 and " " in text:
                yield "messages", node.lineno, text
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and len(_WORD.findall(token.string)) >= 4:
                yield "comments", token.start[0], token.string.lstrip("# ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each match")
    parser.add_argument("paths", nargs="*", type=Path, help="files (default: all that git tracks)")
    arguments = parser.parse_args()
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout
    total: Counter[str] = Counter()
    matched: Counter[str] = Counter()
    for path in arguments.paths or [Path(name) for name in listed.splitlines()]:
        for kind, line, text in texts(path):
            total[kind] += 1
            if ROUNDABOUT.search(text):
                matched[kind] += 1
                if arguments.list:
                    print(f"{path}:{line}: {text[:140]}")
    for kind in sorted(total):
        print(f"{kind}: {matched[kind]} of {total[kind]} roundabout ({matched[kind] / total[kind]:.1%})")
    return int(any(matched[kind] > LIMIT * total[kind] for kind in total))


if __name__ == "__main__":
    sys.exit(main())

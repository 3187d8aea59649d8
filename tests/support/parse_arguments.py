"""Run scripts up to the end of their argument parsing: `python -m support.parse_arguments`, with JSON on its input."""

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path


class ParsedError(BaseException):
    """Raised when a script has parsed its arguments."""


def main() -> None:
    """Read a list of [script, arguments…]; write for each None, the parser's error, or a missing module."""
    parse = argparse.ArgumentParser.parse_args

    def stopped(*given: object, **named: object) -> None:
        parse(*given, **named)  # type: ignore[call-overload]
        raise ParsedError

    argparse.ArgumentParser.parse_args = stopped  # type: ignore[method-assign, assignment]
    results = [_error(script, arguments) for script, *arguments in json.load(sys.stdin)]
    print(json.dumps(results))


def _error(script: str, arguments: list[str]) -> str | None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            runpy.run_path(script, run_name="__main__")
    except ParsedError:
        return None
    except SystemExit:
        return said.getvalue()
    except ModuleNotFoundError as error:
        return f"needs {error.name}"
    finally:
        sys.path.pop(0)
    return "parsed no arguments"


if __name__ == "__main__":
    main()

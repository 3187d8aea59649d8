"""Download the public traces and profiles that some tests and benchmarks use.

    python tools/data.py [--folder data] [--list tools/data.toml]

The list has path, address and SHA-256 of each file. Files that are present and unchanged are not downloaded again, and
files with another checksum are not kept. Exits with 1 when a file cannot be downloaded.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import pooch
from requests import RequestException

ROOT = Path(__file__).parent.parent


def download(listed: Path, folder: Path) -> list[str]:
    """Download the files of a list into a folder; return one message for each failure."""
    failures = []
    for file in tomllib.loads(listed.read_text())["file"]:
        target = folder / file["path"]
        try:
            pooch.retrieve(file["url"], f"sha256:{file['sha256']}", fname=target.name, path=target.parent)
        except (OSError, ValueError, RequestException) as error:
            failures.append(f"{file['path']}: {error}")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "data")
    parser.add_argument("--list", type=Path, default=ROOT / "tools" / "data.toml")
    arguments = parser.parse_args()
    failures = download(arguments.list, arguments.folder)
    for failure in failures:
        print(failure, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

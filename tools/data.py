"""Download the public traces and profiles that some tests and benchmarks use.

    python tools/data.py [--folder data] [--list tools/data.toml]

The list has the path, address and SHA-256 checksum of each file. Files that are present with the right checksum are not
downloaded again, and downloads with a wrong checksum are deleted. Exits with 1 if a file cannot be downloaded.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import pooch
from requests import RequestException

ROOT = Path(__file__).parent.parent


def download(listed: Path, folder: Path) -> list[str]:
    """Download the files of a list into a folder; return an error message for each failed file."""
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

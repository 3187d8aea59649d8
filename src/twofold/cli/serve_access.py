"""Who may use a service: API keys from flags and files, and what may be served without any."""

import ipaddress
import os
from pathlib import Path

from twofold.errors import ConfigurationError
from twofold.serving.gateway.keys import KeyRing
from twofold.serving.gateway.keys_file import read_keys

KEY_FLAG = "--api-key"
KEY_VARIABLE = "TWOFOLD_API_KEY"


def find_keys(secrets: list[str] | None, file: Path | None) -> KeyRing | None:
    """The keys, which from then on are nowhere to be read in this process; raises ConfigurationError."""
    keys = read_keys(secrets or [], file)
    os.environ.pop(KEY_VARIABLE, None)  # the workers would inherit it
    hide_secrets()
    return keys


def check_loopback(host: str, address: str) -> None:
    """Raises ConfigurationError where others than this machine could use a service that asks for no key."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ConfigurationError(
            f"--host {host} lets other machines in: ask for a key with --api-key or --api-keys, "
            "or say --allow-anonymous if nobody needs one"
        )


def hide_secrets() -> None:
    """Overwrite the keys in the command line and the environment that the system shows of this process.

    Linux reads both from the process's own memory. Where that may not be written, they stay: a file of keys is the
    way that never shows them.
    """
    try:
        with Path("/proc/self/stat").open("rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
        with Path("/proc/self/mem").open("r+b", buffering=0) as memory:
            # Fields 48 to 51 of proc(5), counted from the third: where arguments and environment begin and end.
            for start, end, hide in (
                (int(fields[45]), int(fields[46]), hide_arguments),
                (int(fields[47]), int(fields[48]), hide_variable),
            ):
                memory.seek(start)
                held = memory.read(end - start)
                memory.seek(start)
                memory.write(hide(held))
    except (OSError, ValueError, IndexError, OverflowError):
        return


def hide_arguments(held: bytes) -> bytes:
    """The same arguments, ended by zero bytes, with the values of `--api-key` as asterisks of their length."""
    flag = KEY_FLAG.encode()
    hidden: list[bytes] = []
    previous = b""
    for argument in held.split(b"\0"):
        if previous == flag:
            hidden.append(b"*" * len(argument))
        elif argument.startswith(flag + b"="):
            hidden.append(flag + b"=" + b"*" * (len(argument) - len(flag) - 1))
        else:
            hidden.append(argument)
        previous = argument
    return b"\0".join(hidden)


def hide_variable(held: bytes) -> bytes:
    """The same for the variable's value among `NAME=value` strings."""
    name = KEY_VARIABLE.encode() + b"="
    return b"\0".join(
        name + b"*" * (len(each) - len(name)) if each.startswith(name) else each for each in held.split(b"\0")
    )

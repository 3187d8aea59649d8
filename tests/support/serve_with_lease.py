"""Run `twofold serve` with hand-off leases of a given length: `serve_with_lease.py SECONDS FLAGS…`."""

import sys

import msgspec

from twofold.cli.main import main
from twofold.cli.serve import run as serve_run

if __name__ == "__main__":
    lease_s, service_config = float(sys.argv.pop(1)), serve_run.service_config
    serve_run.service_config = lambda settings: msgspec.structs.replace(service_config(settings), lease_s=lease_s)
    sys.argv.insert(1, "serve")
    main()

"""`twofold serve` with leases of so many seconds, which no flag sets: serve_with_lease.py SECONDS FLAGS…"""

import sys

import msgspec

from twofold.cli.serve import run as serve_run
from twofold.cli.main import main

if __name__ == "__main__":
    lease_s, service_of = float(sys.argv.pop(1)), serve_run.service_of
    serve_run.service_of = lambda flags: msgspec.structs.replace(service_of(flags), lease_s=lease_s)
    sys.argv.insert(1, "serve")
    main()

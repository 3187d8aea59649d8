"""Streams survive faults of workers; TWOFOLD_CHAOS_ROUNDS sets the number of faults."""

import asyncio
import os
import signal

import pytest

from support.api_client import all_blocks_free
from support.chaos import Chaos, Fault
from support.flags import ENGINE
from support.held import holdings, leaks
from support.running_service import ended, named, running_service
from support.transports import NIXL
from support.waiting import until

SPLIT = ("prefill", "decode")
PULLED = ("--handoff", "pull", "--kv-checksums")
SOON = ("--max-restart-delay", "1")  # without it, the back-off after many kills takes too long
# The KV of an average prompt (150 tokens) takes a second to transfer; all other work is fast.
SLOW_LINKS = """
model: opt-1.3b
router: jsq
handoff: layer-wise
performance: roofline
link_bytes_per_s: 3.0e+7
pools:
  - {machines: 2, machine: dgx-a100, tensor_parallel: 8, role: prefill}
  - {machines: 1, machine: dgx-a100, tensor_parallel: 8, role: decode}
"""


def check(process, url, roles, *, constrains=True, rounds=None):
    """Inject worker faults under load; check that streams are unchanged and no resources leak."""
    rounds = rounds or int(os.environ.get("TWOFOLD_CHAOS_ROUNDS", len(roles) * len(Fault)))
    chaos = Chaos(process, url, roles, constrains=constrains)
    asyncio.run(chaos.learn())
    before = holdings(process)
    asyncio.run(asyncio.wait_for(chaos.run(rounds), 600 + 120 * rounds))
    print(chaos.report())
    assert chaos.wrong == []
    assert chaos.valid or not constrains
    assert sum(chaos.faults.values()) == rounds
    assert asyncio.run(all_blocks_free(url))
    assert leaks(process, before) == {}, "(before, after)"


@pytest.mark.covers(engine="torch", model="llama", feature=("replay", "roles"))
@pytest.mark.parametrize(
    ("roles", "flags"),
    [
        (SPLIT, ("--prefill", "2", "--decode", "1")),
        (SPLIT, ("--prefill", "1", "--decode", "1", "--router", "splitwise")),
        (SPLIT, ("--prefill", "1", "--decode", "2", "--router", "append")),
        (("mixed",), ("--colocated", "2")),
        pytest.param(SPLIT, ("--prefill", "1", "--decode", "2", *PULLED, "--transport", "nixl"), marks=NIXL),
    ],
    ids=["split", "roles move", "append", "colocated", "pulled over nixl"],
)
def test_streams_survive_random_worker_faults(roles, flags, tiny_model_dir, tmp_path):
    log = tmp_path / "service.log"
    with running_service(tiny_model_dir("llama"), *ENGINE, *SOON, *flags, log=log) as (process, url):
        check(process, url, roles)


def test_a_worker_that_hangs_while_it_restarts_is_replaced(tiny_model_dir, tmp_path):
    flags, log = ("--prefill", "1", "--decode", "1"), tmp_path / "service.log"
    with running_service(tiny_model_dir("llama"), *ENGINE, *SOON, *flags, log=log) as (process, url):
        (killed,) = named(process, "decode.*")
        killed.kill()
        hanging = restarted(process, killed)
        hanging.send_signal(signal.SIGSTOP)
        assert ended([hanging])
        restarted(process, killed, hanging)
        assert asyncio.run(all_blocks_free(url))


def restarted(process, *earlier):
    """Wait for a process of the decode worker that is none of `earlier`."""
    found = until(lambda: [one for one in named(process, "decode.*") if one not in earlier], 60_000, 0.001)
    return found[0]


@pytest.mark.covers(engine="emulated", feature=("replay", "handoff", "layer-wise"))
def test_streams_survive_faults_during_slow_handoffs(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(SLOW_LINKS)
    log = tmp_path / "service.log"
    with running_service(None, "--engine", "emulated", "--cluster", str(file), *SOON, log=log) as (process, url):
        check(process, url, SPLIT, constrains=False)

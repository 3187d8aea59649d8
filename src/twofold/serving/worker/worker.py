"""The worker: drives one instance scheduler with a real clock, a real engine and real messages.

Four threads share it (see `WorkerState`):

    main      Iterations   next_batch → engine.run → complete → tokens to the controller
    inbox     Commands     applies messages at once; heartbeats and leases
    sender    Handoffs     writes computed layers into the leased blocks of peers, or offers them for reading
    receiver  Arrivals     reads what peers offer, and compares checksums
"""

import threading
import time
from collections.abc import Callable

from twofold.engine.base import KvLayout
from twofold.performance.measured import PrefillSpeed
from twofold.serving.mailbox import Inbox
from twofold.serving.messages import Peer, Registered, ToWorker
from twofold.serving.worker.arrivals import Arrivals
from twofold.serving.worker.commands import Commands
from twofold.serving.worker.handoffs import Handoffs, layers_at_once
from twofold.serving.worker.prober import LinkProber
from twofold.serving.worker.state import WorkerState


def work(
    state: WorkerState,
    run: Callable[[], None],
    layout: KvLayout,
    model: str,
    inbox: Inbox[ToWorker],
    lease_s: float,
    *,
    checksums: bool,
    prefill: PrefillSpeed | None,
    probes: bool,
) -> None:
    """Register with the controller, and then `run` batches until told to shut down.

    `prefill` is how fast it was measured to be, if it was. If it `probes`, it measures what its links carry.
    """
    if probes:
        LinkProber(state).start()
    peer = Peer(
        inbox=inbox.address, memory=state.peers.own_memory, host=state.peers.host, outside=inbox.outside
    )
    state.tether.start()
    status = state.scheduler.status()
    state.tell(
        Registered(
            peer=peer, role=state.role, model=model, status=status, prefill=prefill, now_s=time.monotonic()
        )
    )
    handoffs = Handoffs(state, checksums=checksums)
    state.sender.start(handoffs.write_layers, handoffs.offer, handoffs.over)
    arrivals = Arrivals(state, layers_at_once(layout))
    state.receiver.start(arrivals.receive, arrivals.ended)
    state.prefixes.start()
    receiver = threading.Thread(target=Commands(state, inbox, lease_s).run, name="inbox", daemon=True)
    receiver.start()
    run()
    receiver.join()
    state.sender.close()
    state.receiver.close()
    state.outbox.close()  # nobody acts on what it still has to say: peers end as well, and may have ended

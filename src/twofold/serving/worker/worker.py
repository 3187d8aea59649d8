"""The worker: drives one instance scheduler with a real clock, a real engine and real messages.

Three threads share it (see `WorkerState`):

    main      Iterations   next_batch → engine.run → complete → tokens to the controller
    inbox     Commands     applies messages at once; heartbeats and leases
    sender    Handoffs     writes computed layers into the leased blocks of peers
"""

import threading

from twofold.engine.base import Engine
from twofold.serving.mailbox import Inbox
from twofold.serving.messages import Peer, Registered, ToWorker
from twofold.serving.worker.commands import Commands
from twofold.serving.worker.handoffs import Handoffs
from twofold.serving.worker.iterations import Iterations
from twofold.serving.worker.state import WorkerState


def work(
    state: WorkerState,
    engine: Engine,
    model: str,
    eos_token_ids: frozenset[int],
    inbox: Inbox[ToWorker],
    lease_s: float,
) -> None:
    """Register with the controller and run batches until told to shut down."""
    peer = Peer(inbox=inbox.address, memory=state.peers.own_memory)
    state.tell(Registered(peer=peer, role=state.role, model=model, status=state.scheduler.status()))
    handoffs = Handoffs(state)
    state.sender.start(handoffs.write_layer, handoffs.over)
    receiver = threading.Thread(target=Commands(state, inbox, lease_s).run, name="inbox", daemon=True)
    receiver.start()
    Iterations(state, engine, eos_token_ids).run()
    receiver.join()
    state.sender.close()
    state.outbox.close(linger_s=1.0)

"""The messages that workers send to register and to report link measurements."""

from twofold.engine.base import KvLayout, LayerShape
from twofold.instance import Role
from twofold.performance.transfer import LinkSpeed, PrefillSpeed
from twofold.scheduling.instance.status import InstanceStatus
from twofold.serving.messages import LinkMeasured, Peer, Registered
from twofold.transport.base import MemoryDescriptor

# 4000 bytes of KV a token, 800 of them a layer.
LAYOUT = KvLayout(layers=(LayerShape(1, 100, 100),) * 5, block_size=16, dtype="float32", itemsize=4)
STATUS = InstanceStatus(
    waiting=0, running=0, arriving=0, handing_off=0, lease_queue=0, blocks_total=1, blocks_free=1, blocks_in_flight=0
)


def registered(instance: str, prefill: PrefillSpeed | None = None, host: str = "") -> Registered:
    memory = MemoryDescriptor(instance=instance, epoch=1, address="", num_blocks=1, layout=LAYOUT)
    peer = Peer(inbox="", memory=memory, host=host)
    return Registered(peer=peer, role=Role.PREFILL, model="m", status=STATUS, prefill=prefill)


def link(source: str, target: str, overhead_s: float = 0.001, bytes_per_s: float = 1e9) -> LinkMeasured:
    speed = LinkSpeed(overhead_s=overhead_s, bytes_per_s=bytes_per_s)
    return LinkMeasured(source=source, target=target, speed=speed)

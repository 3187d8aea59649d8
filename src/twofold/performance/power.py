"""Power model: watts of an instance by phase and batch size.

Splitwise (sections 3.6 and 3.7) measured that prefill approaches the accelerators' TDP as its batch grows, while decode
draws much less and hardly more for a larger batch. A power cap therefore slows prefill only. Assumptions:

- decode draws a share of TDP that grows with the use of memory bandwidth, and slightly with each sequence;
- the power of prefill grows linearly with its tokens, from that of decode to full TDP at saturation;
- the power that a machine provisions beyond its accelerators is drawn in full while a batch runs;
- an accelerator under a power cap draws its usual power up to the cap.

An instance on t of a machine's c accelerators draws t/c of the machine's power.
"""

from twofold.hardware.specs import Machine
from twofold.performance.base import InstancePower
from twofold.performance.coefficients import power_law


def instance_power(
    machine: Machine, tensor_parallel: int, *, memory_share: float, decode_share: float | None = None
) -> InstancePower:
    """Return the power model of an instance on `tensor_parallel` accelerators of a machine.

    `memory_share` is the share of memory bandwidth that decode of one sequence uses. `decode_share` is the measured
    share of TDP that such a decode draws; if None, it is estimated.
    """
    law = power_law()
    part = tensor_parallel / machine.count
    accelerators_w = machine.count * machine.accelerator.tdp_w
    estimated = law.decode + law.memory * min(memory_share, 1.0)
    return InstancePower(
        idle_w=part * machine.idle_w,
        overhead_w=part * max(machine.tdp_w - accelerators_w * machine.power_cap, 0.0),
        accelerators_w=part * accelerators_w,
        cap=machine.power_cap,
        decode_share=min(estimated if decode_share is None else decode_share, 1.0),
        sequence_share=law.sequence,
        saturation_tokens=law.saturation_tokens,
    )

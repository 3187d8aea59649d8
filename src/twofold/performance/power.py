"""Power model: watts of an instance by phase and batch size, after Splitwise (sections 3.6 and 3.7)."""

from twofold.hardware.specs import Machine
from twofold.performance.base import InstancePower
from twofold.performance.coefficients import power_law


# In Splitwise's measurements, the power of prefill approaches the accelerators' TDP as the batch grows. Decode draws
# much less, and larger decode batches hardly more. A power cap therefore slows only prefill. The power model assumes:
#
# - Decode draws a share of TDP that grows with the use of memory bandwidth, and slightly with each sequence.
# - The power of prefill grows linearly with the prompt tokens, from the power of decode to full TDP at saturation.
# - While a batch runs, the parts of the machine other than accelerators draw all power provisioned for them.
# - An accelerator under a power cap draws the power of an uncapped accelerator, but at most the cap.
# - An instance on t of the c accelerators of a machine draws t/c of the machine's power.
def instance_power(
    machine: Machine, tensor_parallel: int, *, memory_share: float, decode_share: float | None = None
) -> InstancePower:
    """Return the power model of an instance on `tensor_parallel` accelerators of a machine."""
    # `memory_share` is the use of memory bandwidth, and `decode_share` the share of TDP, when decoding one sequence.
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

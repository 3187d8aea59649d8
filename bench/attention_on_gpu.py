"""Measure iterations on a GPU with and without cuDNN's attention.

cuDNN builds a plan for each new shape, and contexts grow with every token. The benchmark times decode iterations of 1
and of 8 sequences with contexts that are new, and then with the same contexts again. MODEL is a model directory.
"""

import argparse
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from twofold.characterize.local import LocalTarget
from twofold.characterize.target import ProbeStream
from twofold.characterize.torch_engine import TorchStepper

DECODES = 40
APART = 200  # tokens between the first contexts of two measurements: more than a measurement decodes


def step_ms(target: LocalTarget, sequences: int, context: int) -> float:
    """Return the median time of a decode iteration in ms. The contexts begin at `context` tokens."""
    streams = [ProbeStream(prompt_tokens=context, output_tokens=DECODES)] * sequences
    times_s = target.run(streams)[0].token_times_s
    return median((after - before) * 1e3 for before, after in pairwise(times_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    stepper = TorchStepper(
        given.model, device=given.device, kv_cache_bytes=4 << 30, max_num_batched_tokens=2048, max_num_seqs=64
    )
    target = LocalTarget(stepper)
    step_ms(target, 8, APART // 2)  # kernels are loaded when they are first used
    for number in range(1, 5):
        with_cudnn, context = number % 2 == 0, number * APART
        torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
        new, again = ([step_ms(target, count, context + count) for count in (1, 8)] for _ in range(2))
        print(f"cuDNN {'on' if with_cudnn else 'off'}:")
        print(f"  new contexts {new[0]:.1f}, {new[1]:.1f} ms; the same again {again[0]:.1f}, {again[1]:.1f} ms")


if __name__ == "__main__":
    main()

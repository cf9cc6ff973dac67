"""`kvsim validate --quality`: what techniques cost in quality, and what drafts they accept."""

from pathlib import Path

import typer

from kvsim.commands.arguments import count
from kvsim.errors import InputError
from kvsim.files import check_target
from kvsim.techniques import parse

BATCH, PROMPT, GENERATE = "8", "1024", "64"  # windows of the text; one may give others


def measure_quality(
    model: str,
    device: str,
    techniques: list[str],
    batch: str | None,
    prompt: str | None,
    generate: str | None,
    gpu: str,
    text: str | None,
    out: str | None,
    json: bool,
) -> None:
    """Read a text under every technique; print the trace, and write it."""
    given = {"--batch": batch or BATCH, "--prompt": prompt or PROMPT}
    sizes = [count(*item) for item in (given | {"--generate": generate or GENERATE}).items()]
    if not all(1 <= size <= 10**6 for size in sizes):
        raise InputError("--batch, --prompt, --generate: expected whole numbers from 1 to 1000000")
    asked = [parse(item) for item in techniques]
    try:
        import torch
    except ImportError:
        raise InputError("validate needs PyTorch; pip install 'kvsim[validate]'") from None
    from kvsim.machines.deployment import Deployment
    from kvsim.machines.profiles import load_hardware, load_stack
    from kvsim.report import validate_quality as report
    from kvsim.report.json import print_json
    from kvsim.traces import attentionfile
    from kvsim.validate.machine import find_device
    from kvsim.validate.model.checkpoint import checksum, open_weights
    from kvsim.validate.model.decoder import Decoder
    from kvsim.validate.model.tokens import read_tokeniser
    from kvsim.validate.model.weights import load_weights
    from kvsim.validate.quality.measure import measure
    from kvsim.validate.quality.settings import (
        Reading,
        check_reading,
        rehearse_all,
        sort_out,
        usual,
    )
    from kvsim.validate.quality.text import read_text, windows

    if out is not None:
        check_target(out, "--out")
    where = find_device(device)
    sort_out(asked)
    read = read_text(text)
    arch, source = open_weights(model)
    machine = Deployment(arch.model, load_hardware(gpu), load_stack("kvsim"))  # KVPR's split
    reading = Reading(*sizes)
    able, refused = rehearse_all(arch, asked or usual(arch.model, reading.prompt), reading, machine)
    for error in refused:
        if asked:
            raise error
        typer.echo(f"left out: {error}", err=True)
    settings = sort_out(able)
    length = check_reading(arch, reading, bool(settings.drafts), where)
    tokeniser = read_tokeniser(source)
    tokens = tokeniser(read.content)
    tokeniser.check(tokens, arch.model.vocab)
    texts = windows(tokens, reading.windows, reading.length, tokeniser.start)
    typer.echo(f"loading {source.where}", err=True)
    weights = load_weights(arch, source, where, torch.float32)
    decoder = Decoder(arch, weights, length, deployment=machine)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu"
    about = {
        "model": model,
        "weights": checksum(source),
        "text": read.source,
        "settings": f"{name}, fp32, PyTorch {torch.__version__}; {reading.about}",
    }
    for step in measure(decoder, settings, reading, texts, about):
        if isinstance(step, str):
            typer.echo(step, err=True)
            continue
        if out is not None:
            attentionfile.write(Path(out), step)
        if json:
            print_json(attentionfile.record(step))
        else:
            report.print_trace(step)

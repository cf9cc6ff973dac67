"""Losses layer by layer: measured behind one pass of the prompt, added up, spent within bits."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pulp
import pytest

from kvsim.api.deployments import build_admission
from kvsim.errors import InfeasibleError, InputError
from kvsim.journal import Journal
from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.options import Inputs
from kvsim.planner.plan import make_plan
from kvsim.planner.question import Admission, PlanLimits, Workload
from kvsim.quality.layers import ADDING, Z_95, LayerLosses, assign, build, load, offered, write
from kvsim.techniques import Technique, parse
from kvsim.techniques.axes.base import Term
from kvsim.traces.attention import shipped_traces
from kvsim.validate.quality.measure import executed, keep_losses, measure_layers, packed
from kvsim.validate.quality.runs import Forced
from kvsim.validate.quality.settings import Reading
from tests.support.decoders import decoder, prompts
from tests.support.sampled import few

READING = Reading(windows=3, prompt=60, scored=6)
ABOUT = {"model": "llama", "weights": "random", "text": "random", "settings": "test"}


def admission(quality: str) -> Admission:
    """What a plan may consider with these files."""
    case = {"model": "llama2-7b", "gpu": "a6000", "quality": quality}
    return build_admission(Inputs("plan", case))


def made(layers: int = 3, seed: int = 0) -> LayerLosses:
    """Losses that fall with the width, most in the first layer."""
    random = np.random.default_rng(seed)
    alone = random.random((2, 2, layers, 4)) * np.array([1.0, 0.1])[None, :, None, None]
    alone[:, :, 0] *= 10
    uniform = 2 * alone.sum(axis=(0, 2))
    return LayerLosses(
        **ABOUT, date="2026-11-22", bits=(2, 4), group=64, alone=alone, uniform=uniform
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("bits", [2.0, 2.5, 3.0, 4.0])
def test_bits_are_spent_where_they_help_most(bits: float, seed: int) -> None:
    found = made(seed=seed)
    chosen = assign(found, bits)
    every = [np.array(x).reshape(2, 3) for x in product((0, 1), repeat=6)]
    width = np.array(found.bits)
    inside = [x for x in every if width[x].mean() <= bits + 1e-9]
    least = min(found.expected(x)[0] for x in inside)
    assert width[chosen].mean() <= bits + 1e-9
    assert found.expected(chosen)[0] == pytest.approx(least, rel=1e-6)


def texts() -> dict[str, pulp.LpProblem]:
    """Eighths, so that no CPU rounds them otherwise: one width per side and layer, and the mean."""
    alone = np.array([[[[8.0], [2.0]], [[1.0], [0.25]]], [[[0.5], [0.5]], [[0.125], [0.125]]]])
    return {"bits": build(replace(made(2), alone=alone), 2.5)[0]}


def test_the_programme_of_bits_is_the_golden_one(tmp_path: Path) -> None:
    texts()["bits"].writeLP(str(tmp_path / "bits.lp"))
    golden = Path(__file__).parent.parent / "planner" / "golden" / "bits.lp"
    assert (tmp_path / "bits.lp").read_text() == golden.read_text()


def test_a_plan_may_take_the_best_widths_at_every_mean() -> None:
    found = replace(made(), bits=(2, 4))
    some = offered(found)
    means = [
        np.mean([[term.settings["bits"], term.settings["value_bits"]] for term in each_layer(t)])
        for t in some
    ]
    losses = [e.loss for e in some.values()]
    assert means == sorted(means) and losses == sorted(losses, reverse=True)
    assert (means[0], means[-1]) == (2.0, 4.0) and len(some) > 4
    for technique, evidence in some.items():
        assert parse(str(technique)) == technique
        assert evidence.unit == "relative perplexity" and evidence.low < evidence.loss
    narrowest = found.expected(np.zeros((2, 3), dtype=np.int64))[0]
    assert losses[0] == pytest.approx(np.exp(narrowest) - 1)


def test_files_of_layers_and_of_runs_are_told_apart(tmp_path: Path) -> None:
    one, other = (str(tmp_path / name) for name in ("one.json", "other.json"))
    write(Path(one), made())
    write(Path(other), made(seed=1))
    runs = str(shipped_traces()["smollm2-135m"])
    found = admission(f"{runs},{one}")
    assert found.layered == offered(made()) and found.layered_for == "llama"
    assert found.runs is not None and {r.model for r in found.runs} == {"smollm2-135m"}
    assert admission(one).runs is None  # then what ships counts
    with pytest.raises(InputError, match=r"one\.json and .*other\.json both hold layers; give one"):
        admission(f"{one},{other}")


def limits_at(deployment: Deployment, loss: float) -> PlanLimits:
    h = deployment.hardware
    return PlanLimits(0.9 * h.gpu_memory, h.host_memory, tpot=0.1, loss=loss)


def each_layer(technique: Technique, layers: int = 3) -> list[Term]:
    """What each layer does."""
    ranges = [some for some in technique.layers for _ in range(some.first, (some.last or 0) + 1)]
    return [term for some in ranges for term in some.terms][:layers]


def test_a_budget_of_loss_is_spent_on_widths() -> None:
    d = Deployment(load_model("smollm2-135m"), load_hardware("rtx4090"), load_stack("vllm"))
    w = Workload(4096, 512)
    alone = made(30).alone / np.array([40.0, 800.0])[None, :, None, None]
    some = offered(replace(made(30), alone=alone, uniform=alone.sum(axis=(0, 2))))
    admitted = Admission((parse("full"),), layered=some, layered_for="smollm2-135m")
    rates = []
    for loss in few((0.0, 0.3, 3.0), (0.0, 3.0)):
        plan = make_plan(d, w, "throughput", limits_at(d, loss), admitted)
        assert plan.evidence.kind == ("expected" if loss else "lossless")
        assert plan.evidence.column <= loss
        rates.append(float(plan.choice.output_tok_s[0]))
    assert rates == sorted(rates) and rates[-1] > 1.3 * rates[0]
    tall = Deployment(load_model("llama3-8b"), d.hardware, d.stack)  # has more layers
    with pytest.raises(InputError, match="measured on smollm2-135m, which says nothing of llama3"):
        make_plan(tall, w, "throughput", limits_at(tall, 0.1), admitted)
    with pytest.raises(InputError, match="measured on other, which says nothing of smollm2-135m"):
        make_plan(d, w, "throughput", limits_at(d, 0.1), replace(admitted, layered_for="other"))


def test_too_few_bits_are_refused() -> None:
    with pytest.raises(InfeasibleError, match="expected at least 2, the narrowest width"):
        assign(made(), 1.5)


def test_losses_add_up_times_the_factor_of_uniform_runs() -> None:
    found = made()
    assert found.growth == pytest.approx((2.0, 1.0))
    all_narrow = np.zeros((2, 3), dtype=np.int64)
    mean, low, high = found.expected(all_narrow)
    assert mean == pytest.approx(found.uniform[0].mean()) and low < mean < high
    text = found.notation(np.array([[0, 0, 1], [1, 1, 0]]))
    assert text == (
        "0-1: grouped:bits=2,value_bits=4,group=64; 2: grouped:bits=4,value_bits=2,group=64"
    )
    assert len(parse(text).layers) == 2


def test_large_losses_add_up_to_more_as_uniform_runs_do() -> None:
    """Runs of all layers alike lose 1.5 times their sum to the power of 1.2; so does any plan."""
    found = made()
    sums = found.alone.sum(axis=(0, 2))
    whole = 1.5 * sums.mean(axis=-1, keepdims=True) ** 1.2
    found = replace(found, uniform=np.broadcast_to(whole, sums.shape).copy())
    assert found.growth == pytest.approx((1.5, 1.2))
    widths = np.array([[0, 1, 1], [1, 0, 1]])
    side, layer = np.indices(widths.shape)
    alone = found.alone[side, widths, layer].sum(axis=(0, 1)).mean()
    mean, low, high = found.expected(widths)
    assert mean == pytest.approx(1.5 * alone**1.2)
    windows = found.alone[side, widths, layer].sum(axis=(0, 1)) * mean / alone
    error = Z_95 * windows.std(ddof=1) / len(windows) ** 0.5
    off = np.hypot(error, ADDING * mean)  # uniform runs are as the power says
    assert (low, high) == pytest.approx((max(0.0, mean - off), mean + off))
    flat = replace(found, uniform=np.ones_like(found.uniform))
    assert flat.growth[1] == 1.0  # that all widths lose the same is noise
    nothing = replace(found, alone=0 * found.alone, uniform=0 * found.uniform)
    assert nothing.expected(widths) == (0.0, 0.0, 0.0)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    found, path = made(), tmp_path / "layers.json"
    write(path, found)
    again = load(path)
    assert (again.alone == found.alone).all() and again.bits == found.bits
    path.write_text('{"format": "kvsim layer losses 1", "model": "m"}')
    with pytest.raises(InputError, match="alone is missing"):
        load(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="kvsim layer losses 1"):
        load(path)


def test_a_kept_prompt_gives_what_reading_it_again_gives() -> None:
    """Runs behind one pass of the prompt, held against runs that read it themselves."""
    model, length = decoder("llama"), READING.length
    texts, layers = prompts(*[length] * READING.windows), model.arch.model.layers
    (found,) = [x for x in measure_layers(model, READING, texts, 8, ABOUT, (2, 4))
                if isinstance(x, LayerLosses)]  # fmt: skip
    truth = Forced(model, parse("full"), texts, READING.prompt)
    truth.complete()
    for technique, windows in (
        (packed(2, 2, 8, range(layers), layers), found.uniform[0]),
        (packed(2, 16, 8, range(1, 2), layers), found.alone[0, 0, 1]),
        (packed(16, 4, 8, range(layers - 1, layers), layers), found.alone[1, 1, layers - 1]),
    ):
        run = Forced(model, technique, texts, READING.prompt, truth.kept)
        run.complete()
        assert windows.mean() == pytest.approx(run.divergence, rel=1e-4)
    chosen = assign(found, 3.0)
    (measured,) = executed(model, READING, texts, [parse(found.notation(chosen))])
    _, low, high = found.expected(chosen)
    assert low <= measured.mean() <= high
    assert measured.mean() < found.uniform[0].mean() / 3


def test_a_measurement_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    model, out = decoder("llama"), tmp_path / "layers.json"
    texts = prompts(*[READING.length] * READING.windows)
    about = {"model": "llama", "sizes": [3, 60, 6]}
    first = keep_losses(out, about).resume()
    for i, _ in enumerate(measure_layers(model, READING, texts, 8, ABOUT, (2,), first)):
        if i == 3:
            break
    again = keep_losses(out, about).resume()
    assert len(again.done) == 3  # all layers, K and V of the first
    assert all((again.done[name][0] == own[0]).all() for name, own in first.done.items())
    again.done[f"2,2 bits in 0-{model.arch.model.layers - 1}"] = [np.full(3, 7.0)]
    (found,) = [x for x in measure_layers(model, READING, texts, 8, ABOUT, (2,), again)
                if isinstance(x, LayerLosses)]  # fmt: skip
    assert (found.uniform[0] == 7.0).all() and (found.alone[:, 0, 0] > 0).all()
    assert not keep_losses(out, about | {"model": "other"}).resume().done
    again.remove()
    assert not list(tmp_path.iterdir())


def test_a_journal_resumes_wherever_its_file_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def opened() -> Journal[int]:
        kept = Journal[int](path, {"numbers": 1, "of": "a"}, lambda n: {"n": n}, lambda r: r["n"])
        return kept.resume()

    first = opened()
    first.append("one", [1, 2])
    first.append("two", [])
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = opened()
        before = dict(again.done)
        again.append("three", [3])
        assert before == dict(list(first.done.items())[: len(before)])
        assert opened().done == before | {"three": [3]}


def test_a_journal_has_one_run_at_a_time(tmp_path: Path) -> None:
    about = {"model": "one"}
    first, other = (keep_losses(tmp_path / "out", about | more) for more in ({}, {"model": "b"}))
    with first.resume_locked():
        first.append("one", [np.ones(1)])
        with (
            pytest.raises(InputError, match="another kvsim process is writing"),
            other.resume_locked(),
        ):
            pass
    assert list(keep_losses(tmp_path / "out", about).resume().done) == ["one"]


def test_a_journal_that_cannot_be_removed_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    kept = keep_losses(tmp_path / "out", {"model": "one"}).resume()
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(InputError, match="Permission denied; the run is complete, remove this"):
        kept.remove()

"""What each layer does, where layers may differ: a programme over counts of layers per option.

Layers of one shape cost the same, so the time of a pass and the bytes of every memory are linear in
how many layers of each shape do what:

    n[o,k]   layers of shape k that do option o, whole numbers that add up to the layers there are
    T[q]     time of a pass: at least the work of every stream, and what layers take one by one

under the two memories. Options are the best settings of every technique that the table admits,
placements at their ends, and each with weights on the host. A loss of quality has no row: nothing
says that a part of the layers loses only its part, so what loses too much in all layers is no
option in some. The programme fixes what is discrete, and the engine then replays its layers.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby, product

import numpy as np

from kvsim import solver
from kvsim.engine.buffers import layer_weights
from kvsim.engine.roofline import seconds
from kvsim.engine.timeline import minimum_layer_seconds
from kvsim.errors import InfeasibleError, InputError
from kvsim.frozen import frozen
from kvsim.graph import Array, Point
from kvsim.models.model import LayerShape
from kvsim.planner.local_search import (
    UniformPlacements,
    placement_kinds,
    search_uniform,
)
from kvsim.planner.question import Question
from kvsim.planner.table import TableSearch
from kvsim.prediction.generate import Prediction
from kvsim.prediction.memory import decode_point, prefill_point, tier_bytes
from kvsim.techniques import parse
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.memory import layer_buffers
from kvsim.techniques.steps import layer_ops, tile_point
from kvsim.techniques.technique import Layers, Technique, compose

STREAMS = ("gpu", "h2d", "d2h", "cpu")
DRIVE_STREAMS = ("disk_read", "disk_write")  # where the machine has a drive
MOST_OPTIONS = 8  # settings of techniques, the best first, each with weights on the GPU and not
BATCH_FACTORS = (0.75, 1.0, 1.25, 1.6, 2.0)  # of the best uniform batch, where it may be chosen
REPAIRS = 4  # times that memory is lowered by what a replay lacks
REPAIR_MARGIN = 1.02
GAP, SECONDS = 1e-4, 2.0  # of the solver
STREAMED_NEEDS = {"offload": "offload", "place": "fastdecode"}
STREAMED_ENDS = ("full", "offload:host_share=1,parts=1", "place:cpu_share=1")


@frozen
class LayerCosts:
    """Time and memory of one layer for each option, by layer shape.

    An option is a technique with its settings. Axes: q passes (prefill, then one decoding round),
    r resources (the streams, then the layer's critical path), o options, k layer shapes.

    Attributes
    ----------
    seconds
        Time that a layer occupies each resource, (q, r, o, k). [s]
    gpu, host
        Peak memory of a layer, (o, k). [B]
    layers
        Number of layers of each shape, (k,).
    """

    seconds: Array
    gpu: Array
    host: Array
    layers: Array


def choose_layers(
    costs: LayerCosts, memory: tuple[float, float], rounds: float, head: Array
) -> Array:
    """Choose an option for every layer so that the generation is as fast as the memory allows.

    Solves the integer programme of :func:`build_layers`.

    Parameters
    ----------
    costs
        Time and memory of a layer for each option.
    memory
        Memory that layers may occupy on each GPU, and in host memory per GPU. [B]
    rounds
        Number of decoding rounds.
    head
        Time of each pass outside the layers, (q,). [s]

    Returns
    -------
    Array
        Number of layers by option and shape, (o, k).

    Raises
    ------
    InfeasibleError
        If no assignment fits in the memory.
    """
    problem = build_layers(costs, memory, rounds, head)
    if not solver.solve(problem, GAP, SECONDS).has_values:
        raise InfeasibleError("no division of the layers is within the limits of memory")
    found = np.zeros(costs.gpu.shape)
    for variable in problem.variables():
        if variable.name.startswith("n_"):
            _, option, shape = variable.name.split("_")
            found[int(option), int(shape)] = round(variable.value() or 0.0)
    return found


def build_layers(
    costs: LayerCosts, memory: tuple[float, float], rounds: float, head: Array
) -> solver.Problem:
    """Build the integer programme that :func:`choose_layers` solves.

    Its variables are the number of layers of each shape that use each option. It minimises the
    time of prefill plus that of all decoding rounds, in units of the largest entry of
    ``costs.seconds``. The parameters are those of :func:`choose_layers`.

    Returns
    -------
    solver.Problem
        The programme, not solved yet.
    """
    problem = solver.create_problem("layers")
    options, shapes = costs.gpu.shape
    unit = max(float(costs.seconds.max()), 1e-9)
    n = {
        (o, k): problem.add_variable(f"n_{o}_{k}", 0, int(costs.layers[k]), solver.INTEGER)
        for o, k in product(range(options), range(shapes))
    }
    passes = [problem.add_variable(f"T_{q}", 0) for q in range(len(costs.seconds))]
    for k in range(shapes):
        whole = solver.add_up(n[o, k] for o in range(options))
        problem.addConstraint(whole == int(costs.layers[k]), f"layers_{k}")
    for q, r in product(range(len(costs.seconds)), range(costs.seconds.shape[1])):
        work = solver.weigh([(x, float(costs.seconds[q, r][o]) / unit) for o, x in n.items()])
        problem.addConstraint(work - passes[q] <= -float(head[q]) / unit, f"work_{q}_{r}")
    for name, bytes_, room in (("gpu", costs.gpu, memory[0]), ("host", costs.host, memory[1])):
        scale = max(room, 1.0)
        used = solver.weigh([(x, float(bytes_[o]) / scale) for o, x in n.items()])
        problem.addConstraint(used <= room / scale, name)
    weights = [1.0, rounds][: len(passes)]
    problem.setObjective(solver.weigh(list(zip(passes, weights, strict=True))))
    return problem


class MixedLayers:
    """Search for plans in which layers differ in technique or placement.

    Parameters
    ----------
    question
        The planning problem.
    search
        Table of the techniques and settings that were evaluated for it.

    Attributes
    ----------
    solves
        Number of integer programmes solved so far.
    replays
        Number of assignments evaluated by the performance model so far.
    """

    def __init__(self, question: Question, search: TableSearch) -> None:
        self.q, self.search, self.solves, self.replays = question, search, 0, 0
        drive = DRIVE_STREAMS if question.deployment.hardware.disk_memory else ()
        self.streams = (*STREAMS, *drive)
        shapes: dict[LayerShape, int] = {}
        for block, count in question.deployment.shard.layout:
            for shape in block:
                shapes[shape] = shapes.get(shape, 0) + count
        self.shapes = shapes
        self.sequence = [s for block, n in question.deployment.shard.layout for s in block * n]

    def options(self) -> list[Technique]:
        """Return the techniques that a layer may use.

        These are the best settings of each technique within all limits but memory, at most
        ``MOST_OPTIONS`` in total. If offloading is admitted, each is also included with all
        weights in host memory. Techniques that are compositions, draft tokens, divide the batch or
        differ by layer are excluded.
        """
        table, limits = self.search.table, self.q.limits
        memoryless = {k: v for k, v in limits.finite().items() if not k.endswith("memory")}
        goal = table.columns[self.q.objective]
        best = [(row, name) for name in table.names
                if (row := self.search.best(memoryless, name)) is not None]  # fmt: skip
        found: dict[str, Technique] = {}
        names = {t.name for t in self.q.admission.candidates()}
        for text in STREAMED_ENDS:
            needed = STREAMED_NEEDS.get(text.partition(":")[0], "full")
            if needed in names:
                found[text] = parse(text)
        for row, _ in sorted(best, key=lambda x: float(goal[x[0]])):
            t = table.technique[row]
            if t.uniform and len(t.terms) == 1 and not t.drafts and t.parts[0].placement.tiles == 1:
                found.setdefault(str(t), t)
        some = [t for t in found.values() if not t.refuses(self.q.deployment)][:MOST_OPTIONS]
        if not names & {"offload", "flexgen", "kvpr"}:
            return some
        streamed = []
        for t in some:
            with suppress(InputError):
                moved = compose(*t.terms, *parse("place:weights_host=1").terms) if t.name not in (
                    "full", "offload", "place") else _with_streamed(t)  # fmt: skip
                streamed.append(moved)
        return [*some, *streamed]

    def better(self, batch: float) -> Iterator[Prediction]:
        """Yield the fastest feasible assignment of techniques to layers at several batch sizes.

        Each assignment comes from an integer programme and is then evaluated by the performance
        model. Batch sizes without an assignment that fits in memory are skipped.

        Parameters
        ----------
        batch
            Batch size of the best plan whose layers are all alike, which is multiplied by
            ``BATCH_FACTORS``; ignored if the question fixes the batch. [sequences]

        Yields
        ------
        Prediction
            Prediction for one batch size.
        """
        fixed = self.q.workload.batch
        batches = [float(fixed)] if fixed else [max(round(f * batch), 1) for f in BATCH_FACTORS]
        options = self.options()
        if not options:
            return
        for size in dict.fromkeys(batches):
            found = self._at(options, float(size))
            if found is not None:
                yield found

    def _at(self, options: list[Technique], batch: float) -> Prediction | None:
        """The best layers at a batch, as the engine says."""
        w, d, limits = self.q.workload, self.q.deployment, self.q.limits
        costs = self._costs(options, batch)
        base = w.predict(options[0], d, np.array([batch]))
        first = costs.layers @ costs.gpu[0], d.tp * costs.layers @ costs.host[0]
        beside = float(base.given_bytes[0]) - first[0], float(base.host_bytes[0]) - first[1]
        rounds = max(w.generate - 1, 0) / options[0].tokens_per_round
        took = np.array([float(base.prefill_s[0]), float(base.decode_s[0]) / max(rounds, 1)])
        own = np.einsum("qrk,k->qr", costs.seconds[:, :, 0], costs.layers).max(axis=1)
        head = np.maximum(took - own, 0.0)
        room = [limits.gpu_memory - beside[0], (limits.host_memory - beside[1]) / d.tp]
        for _ in range(REPAIRS):
            try:
                self.solves += 1
                counts = choose_layers(costs, (room[0], room[1]), rounds, head)
            except InfeasibleError:
                return None
            technique = self._technique(options, counts)
            self.replays += 1
            try:
                if technique.refuses(d):
                    return None
                found = w.predict(technique, d, np.array([batch]))
            except InputError:
                return None
            over = (
                float(found.given_bytes[0]) - limits.gpu_memory,
                (float(found.host_bytes[0]) - limits.host_memory) / d.tp,
            )
            if max(over) <= 0:
                return found
            room = [r - REPAIR_MARGIN * max(x, 0.0) for r, x in zip(room, over, strict=True)]
        return None

    def _technique(self, options: list[Technique], counts: Array) -> Technique:
        """Counts of layers as ranges of a model's layers, each option in one block of a shape."""
        left = {shape: [int(x) for x in counts[:, k]] for k, shape in enumerate(self.shapes)}
        chosen = []
        for shape in self.sequence:
            option = next(o for o, many in enumerate(left[shape]) if many > 0)
            left[shape][option] -= 1
            chosen.append(option)
        ranges, first = [], 0
        for option, some in groupby(chosen):
            count = len(list(some))
            ranges.append(Layers(options[option].terms, first, first + count - 1))
            first += count
        if len(ranges) == 1:
            return options[chosen[0]]
        return Technique(tuple(ranges))

    def _costs(self, options: list[Technique], batch: float) -> LayerCosts:
        w, d = self.q.workload, self.q.deployment
        points = [prefill_point(batch, w.prompt, w.generate)]
        if w.generate > 1:
            points.append(decode_point(batch, w.prompt, w.generate, w.generate / 2))
        last = decode_point(batch, w.prompt, w.generate, max(w.generate - 1.0, 0.0))
        shapes = list(self.shapes)
        times = np.zeros((len(points), len(self.streams) + 1, len(options), len(shapes)))
        gpu, host = np.zeros((2, len(options), len(shapes)))
        for (o, t), (k, shape) in product(enumerate(options), enumerate(shapes)):
            for q, point in enumerate(points):
                times[q, :, o, k] = self._resources(t, point, shape)
            own = t.parts[0]
            for point in (points[0], last):
                at = LayerPass(d, point, shape, own, tile_point(point, own))
                held = layer_buffers(at, layer_weights(d, shape))
                gpu[o, k] = max(gpu[o, k], float(np.max(tier_bytes(held, "gpu"))))
                host[o, k] = max(host[o, k], float(np.max(tier_bytes(held, "host"))))
        layers = np.array(list(self.shapes.values()), dtype=float)
        return LayerCosts(times, gpu, host, layers)

    def _resources(self, technique: Technique, point: Point, shape: LayerShape) -> Array:
        """Time of each stream in one layer, and what it takes if nothing delays it. (r,) [s]"""
        d, own = self.q.deployment, technique.parts[0]
        issued = layer_ops(LayerPass(d, tile_point(point, own), shape, own))
        found = np.zeros(len(self.streams) + 1)
        for op in issued:
            found[self.streams.index(op.stream)] += own.placement.tiles * float(
                np.max(seconds(op, d))
            )
        found[-1] = own.placement.tiles * float(np.max(minimum_layer_seconds(issued, d, seconds)))
        return found


def _with_streamed(technique: Technique) -> Technique:
    """A placement with all weights on the host."""
    s = technique.settings
    shares = [f"{k}={s[k]}" for k in ("host_share", "cpu_share") if k in s]
    said = ",".join([*shares, "weights_host=1"])
    return parse(f"place:{said}")


@frozen
class FoundPlacements:
    """Result of :func:`add_placements`.

    Attributes
    ----------
    uniform
        Placements with the same settings in all layers.
    solves
        Number of integer programmes solved for placements that differ by layer.
    replays
        Number of their solutions evaluated by the performance model.
    """

    uniform: UniformPlacements
    solves: int
    replays: int


def add_placements(question: Question, search: TableSearch) -> FoundPlacements:
    """Search for offloading placements, and add the best to a table of techniques.

    Placements may be the same in all layers or differ by layer.

    Parameters
    ----------
    question
        The planning problem. If it names an inference engine, nothing is added, because no engine
        supports such placements.
    search
        Table to which rows are added.

    Returns
    -------
    FoundPlacements
        The placements that are the same in all layers, and the effort of the search.
    """
    if question.admission.engine:
        return FoundPlacements(UniformPlacements(), 0, 0)
    uniform = UniformPlacements()
    if placement_kinds(question):
        uniform = search_uniform(question)
    for prediction in uniform.best:
        search.include(prediction)
    mixed = MixedLayers(question, search)
    if question.deployment.single_pass and len(search.table):
        row = search.best(question.limits.finite())
        batch = 1.0 if row is None else float(search.table.batch[row])
        for prediction in mixed.better(batch):
            search.include(prediction)
    return FoundPlacements(uniform, mixed.solves, mixed.replays)

"""Every kind of frozen answer."""

from tests.frozen.commands import CAPACITY, PLANS, SIMULATIONS
from tests.frozen.parts import PARTS
from tests.frozen.passes import PASSES
from tests.frozen.predictions import PREDICTIONS, REPRODUCED
from tests.frozen.programmes import FAMILIES, PROGRAMMES
from tests.frozen.runs import RUNS
from tests.frozen.store import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        PREDICTIONS, REPRODUCED, PASSES, PARTS, RUNS, PLANS, SIMULATIONS, CAPACITY, PROGRAMMES,
        FAMILIES,
    )
}  # fmt: skip

"""Every kind of frozen answer."""

from tests.frozen.answers import ANSWERS
from tests.frozen.commands import CAPACITY, PLANS, SIMULATIONS
from tests.frozen.passes import DEFAULTS, PASSES
from tests.frozen.predictions import PREDICTIONS, REPRODUCED
from tests.frozen.programmes import PROGRAMMES
from tests.frozen.runs import RUNS
from tests.frozen.store import Kind

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        PREDICTIONS, REPRODUCED, PASSES, DEFAULTS, RUNS, PLANS, SIMULATIONS, CAPACITY,
        PROGRAMMES, ANSWERS,
    )
}  # fmt: skip

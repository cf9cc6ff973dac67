"""What is asked of a capacity plan."""

from kvsim.frozen import frozen
from kvsim.limits import ENGINE_SHARE
from kvsim.planner.admit import Admission
from kvsim.planner.fleet.arrays import FleetLimits, Schedule
from kvsim.planner.fleet.certainty import Spread
from kvsim.planner.fleet.shortlist import Rentable
from kvsim.planner.fleet.targets import FleetTargets
from kvsim.planner.fleet.traffic import Traffic
from kvsim.planner.fleet.variants import Extras
from kvsim.serving.rules import Rules


@frozen
class CapacityQuestion:
    """What is asked.

    Attributes
    ----------
    largest_loss
        Relative loss of quality that may be known of a setting.
    utilisation
        Share of each GPU's memory that the engine uses.
    spread
        How far predictions have been off; what the ledger of errors has if None.
    extras
        Memories for prefix blocks besides the GPU's, and whether prefill and decode may be apart.
    """

    traffic: Traffic
    rentable: list[Rentable]
    admission: Admission
    targets: FleetTargets
    limits: FleetLimits
    rules: Rules
    spread: Spread | None = None
    largest_loss: float = 0.0
    utilisation: float = ENGINE_SHARE
    schedule: Schedule | None = None
    extras: Extras = Extras()

"""Where no plan is within the limits: what is in the way, and what would meet all of them."""

from kvsim.frozen import frozen
from kvsim.machines.deployment import Deployment
from kvsim.planner.alternatives import NoPlanError
from kvsim.report.json import Row, number
from kvsim.report.names import deployment as named
from kvsim.report.names import settings
from kvsim.report.plan import advice
from kvsim.report.plan_answer import unanswered
from kvsim.report.result import Result
from kvsim.report.table import Table, of, words


@frozen
class Unplanned(Result):
    """That nothing is within the limits, and what would be.

    Attributes
    ----------
    heading
        What was asked of which machine.
    """

    heading: str
    none: NoPlanError

    @property
    def fields(self) -> Row:
        """The command's own fields as ``--json`` has them."""
        return no_plan(self.none)

    @property
    def title(self) -> str:
        """The heading of the page."""
        return self.heading

    @property
    def tables(self) -> list[Table]:
        """The changes that meet every limit, with their figures."""
        columns = [words("change", lambda row: row["option"]),
                   words("technique", lambda row: row["technique"]), of("batch", 1),
                   of("ttft_s"), of("tpot_s"), of("output_tok_s"), of("gpu_bytes", 3),
                   of("host_bytes", 4)]  # fmt: skip
        return [Table(columns, self.rows, below=settings)] if self.rows else []


def unplanned(none: NoPlanError, deployment: Deployment, command: str = "") -> Unplanned:
    """The page of a plan that does not exist."""
    rows = [row["predicted"] | {"option": row["option"]} for row in map(advice, none.advice)
            if row["predicted"]]  # fmt: skip
    return Unplanned(command, unanswered(none), rows, named(deployment), none)


def no_plan(none: NoPlanError) -> Row:
    """What ``kvsim plan`` says where nothing is within the limits."""
    return {
        "answer": unanswered(none).row(),
        "choice": None,
        "reason": str(none),
        "relaxations": {k: number(v) for k, v in none.relaxations.items()},
        "advice": [advice(a) for a in none.advice],
    }

"""The range of every number that a user gives, in one table; errors and docs/limits.md print it."""

from kvsim.errors import InputError
from kvsim.frozen import frozen

ENGINE_SHARE = 0.9  # of GPU memory that serving engines use unless told otherwise


@frozen
class Range:
    """What a number may be.

    Attributes
    ----------
    least, most
        The smallest and largest value; a larger one is a typing error or more than a run can hold.
    unit
        What is counted or measured.
    whole
        Whether it must be a whole number.
    """

    least: float
    most: float
    unit: str
    whole: bool = True

    @property
    def words(self) -> str:
        """The range for a message, as ``a whole number from 1 to 8``."""
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {plain(self.least)} to {plain(self.most)}"

    def holds(self, value: float) -> bool:
        """Whether a value is in the range."""
        return self.least <= value <= self.most and (not self.whole or value == int(value))


RANGES = {
    "--batch": Range(1, 10**6, "sequences"),
    "--prompt": Range(1, 10**7, "tokens"),
    "--generate": Range(1, 10**7, "tokens"),
    "--max-seqs": Range(1, 2**16, "sequences"),
    "--max-tokens": Range(1, 10**7, "tokens"),
    "--block-tokens": Range(1, 2**16, "tokens"),
    "--hash-block-tokens": Range(1, 10**6, "tokens"),
    "--blocks": Range(0, 10**9, "KV blocks"),
    "--replicas": Range(1, 10**4, "replicas"),
    "--prefill-replicas": Range(1, 10**4, "replicas"),
    "--layers": Range(0, 1000, "layers"),
    "--fit-first": Range(5, 10**8, "requests"),
    "--seed": Range(0, 2**63 - 1, ""),
    "--draw-acceptance": Range(0, 2**63 - 1, "seed"),
    "--requests": Range(1, 10**8, "requests"),
    "--rate": Range(1e-6, 1e6, "requests/s, or a factor", whole=False),
    "--duration": Range(1e-3, 3.2e8, "s", whole=False),
    "--gpu-memory": Range(1e-3, 1e6, "GiB", whole=False),
    "--host-memory": Range(1e-3, 1e6, "GiB", whole=False),
    "--host-cache": Range(1e-3, 1e6, "GiB", whole=False),
    "--nvme-cache": Range(1e-3, 1e8, "GiB", whole=False),
    "--remote-cache": Range(1e-3, 1e9, "GiB", whole=False),
    "--cache-ttl": Range(1e-3, 1e9, "s", whole=False),
    "--cache-block": Range(1, 10**6, "tokens"),
    "--nvme-read": Range(1e-3, 1e3, "GB/s", whole=False),
    "--nvme-write": Range(1e-3, 1e3, "GB/s", whole=False),
    "--nic": Range(1e-3, 1e3, "GB/s", whole=False),
    "--abort-after": Range(1e-3, 1e9, "s", whole=False),
    "--ttft": Range(1e-6, 1e6, "s", whole=False),
    "--tpot": Range(1e-6, 1e6, "s", whole=False),
    "--max-loss": Range(0, 1, "", whole=False),
    "--max-error": Range(1e-6, 1e3, "", whole=False),
    "--bits": Range(2, 4, "bits", whole=False),
    "--percentile": Range(50, 99.99, "%", whole=False),
    "--headroom": Range(0, 1, "", whole=False),
    "--failures": Range(0, 1000, "replicas"),
    "--windows": Range(1, 10**4, ""),
    "--configurations": Range(1, 100, "kinds of replica"),
    "--max-gpus": Range(1, 10**6, "GPUs"),
    "--max-host": Range(1e-3, 1e9, "GiB", whole=False),
    "--max-power": Range(1e-3, 1e6, "kW", whole=False),
    "--gpu-memory-utilization": Range(0.01, 1, "", whole=False),
    "--spread": Range(1e-6, 10, "", whole=False),
    "--chars-per-token": Range(1e-2, 1e3, "characters", whole=False),
}
"""By option; what is not here is checked where it is used."""

MOST_POINTS = 5_000
"""Rows that one command prints; `kvsim sweep` takes more. [points]"""


def check(name: str, value: float, got: str = "") -> float:
    """A number of the user's, if it is in the range of its option.

    Parameters
    ----------
    name
        The option.
    got
        What the user typed, where it differs from the value.

    Raises
    ------
    InputError
        Naming the option, what was given, and the range.
    """
    allowed = RANGES.get(name)
    if allowed is not None and not allowed.holds(value):
        unit = f" [{allowed.unit}]" if allowed.unit else ""
        raise InputError(
            f"{name}: got {got[:40] or format(value, '.15g')}; expected {allowed.words}{unit}"
        )
    return value


def check_work(what: str, count: float, most: float, mend: str) -> None:
    """Refuse work that would take too long, before it begins.

    Parameters
    ----------
    what
        The work in words, as ``--batch, --prompt: 20,000 points``.
    count, most
        How much of it was asked for, and how much is done.
    mend
        What the user can do.

    Raises
    ------
    InputError
        If it is more.
    """
    if count > most:
        raise InputError(f"{what}; expected at most {plain(most)}; {mend}")


def plain(value: float) -> str:
    """A number for people: whole ones with commas, large and small ones in powers of ten."""
    if value == int(value) and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:.4g}"


def table() -> str:
    """All ranges as a table in Markdown."""
    lines = ["| option | smallest | largest | unit |", "|---|---:|---:|---|"]
    for name, allowed in RANGES.items():
        unit = allowed.unit or "-"
        lines.append(f"| `{name}` | {plain(allowed.least)} | {plain(allowed.most)} | {unit} |")
    return "\n".join(lines) + "\n"

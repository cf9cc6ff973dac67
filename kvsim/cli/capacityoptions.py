"""What `kvsim capacity` may rent: limits, prices, memories besides the GPU's, prefill apart."""

from itertools import product
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from kvsim.cli.arguments import count, counts, either, gib, number, option, seconds, words
from kvsim.cli.cacheoptions import GB
from kvsim.cli.pairs import per_gpu
from kvsim.errors import InputError

if TYPE_CHECKING:
    from kvsim.planner.fleet.demand import ClassTarget
    from kvsim.planner.fleet.offers import Extras, FleetLimits, Rentable

HOST_SHARE = 0.25  # of a host's memory that one GPU's prefix blocks may take, if nothing is said
MOST_BARE_TTFT, MOST_BARE_TPOT = 100.0, 5.0  # larger bare numbers may be milliseconds [s]
POOLS = ("auto", "yes", "no")

HostCacheOption = Annotated[
    str | None,
    option("--host-cache", "GIB", "Host memory per GPU for prefix blocks; 0: none."),
]
NvmeCacheOption = Annotated[
    str | None, option("--nvme-cache", "GIB", "NVMe space per GPU for prefix blocks.")
]
PoolsOption = Annotated[
    str,
    option("--pools", "HOW", "Try prefill and decode apart: auto (with prefix blocks), yes, no."),
]


def extras(
    prefixes: bool,
    rentable: "list[Rentable]",
    given: dict[str, str | None],
    pools: str,
) -> "Extras":
    """What replicas may use besides GPU memory.

    Parameters
    ----------
    prefixes : whether the trace names prefix blocks.
    given : texts of host_cache, nvme_cache, nvme_read, nvme_write and nic.

    Raises
    ------
    InputError
        For an option that would do nothing, or a value that it cannot have.
    """
    from kvsim.planner.fleet.offers import Extras
    from kvsim.serving.rules import NIC_RATE

    if pools not in POOLS:
        raise InputError(f"--pools: got {pools[:40]!r}; expected auto, yes or no")
    for name in ("host_cache", "nvme_cache"):
        if given[name] is not None and not prefixes:
            raise InputError(
                f"--{name.replace('_', '-')}: the trace names no prefix blocks, so nothing would "
                "be stored; leave it out or use a trace that has hash blocks"
            )
    apart = pools == "yes" or (pools == "auto" and prefixes)
    drive = 0.0 if given["nvme_cache"] is None else gib("--nvme-cache", given["nvme_cache"])
    rates: dict[str, Any] = {}
    for name in ("nvme_read", "nvme_write"):
        text, called = given[name], f"--{name.replace('_', '-')}"
        if text is not None and not drive:
            raise InputError(f"{called}: does nothing without --nvme-cache; add it or leave it out")
        if text is not None:
            rates[name] = number(called, text) * GB
    if given["nic"] is not None and not apart:
        raise InputError(
            "--nic: does nothing where prefill and decode are not apart; add --pools yes"
        )
    nic = NIC_RATE if given["nic"] is None else number("--nic", given["nic"]) * GB
    if not prefixes:
        return Extras(apart=apart, nic=nic)
    host = min(x.deployment.hardware.host_memory for x in rentable) * HOST_SHARE
    if given["host_cache"] is not None:
        host = 0.0 if given["host_cache"] == "0" else gib("--host-cache", given["host_cache"])
    return Extras(host, drive, rates, apart, nic)


def longer_prompts(text: str) -> "tuple[ClassTarget, ...]":
    """Targets of longer prompts, as 8000=10s/200ms,32000=30s/none.

    Raises
    ------
    InputError
        If it is not of that form, or a length is there twice.
    """
    from kvsim.planner.fleet.demand import ClassTarget

    name, found = "--class-targets", {}
    for item in words(name, text):
        above, equals, times = item.partition("=")
        ttft, slash, tpot = times.partition("/")
        if not equals or not slash:
            raise InputError(
                f"{name}: got {item[:40]!r}; expected N=TTFT/TPOT, as 8000=10s/200ms, for prompts "
                f"above N tokens"
            )
        tokens = count(name, above, " before the =")
        if tokens < 1 or tokens in found:
            wrong = "is there twice; give it once" if tokens in found else "is below 1 token"
            raise InputError(f"{name}: {tokens} {wrong}")
        first = seconds(name, ttft, MOST_BARE_TTFT)
        found[tokens] = ClassTarget(tokens, first, seconds(name, tpot, MOST_BARE_TPOT))
    return tuple(found[tokens] for tokens in sorted(found))


def fleet_limits(
    gpus: list[str],
    share: float,
    max_gpus: str | None,
    max_host: str | None,
    max_power: str | None,
    configurations: str | None,
    headroom: str,
    failures: str,
) -> "FleetLimits":
    """The limits on the fleet."""
    from kvsim.planner.fleet.offers import FleetLimits

    most, of_kind = float("inf"), {}
    if max_gpus is not None and "=" in max_gpus:
        of_kind = per_gpu("--max-gpus", max_gpus, gpus)
    elif max_gpus is not None:
        most = float(count("--max-gpus", max_gpus, " or GPU=N,..."))
    kinds = float("inf") if configurations is None else count("--configurations", configurations)
    lost = count("--failures", failures)
    if most < 1 or kinds < 1 or not 0 <= lost <= 3:
        name, got, expected = (
            ("--max-gpus", max_gpus, "1 or more")
            if most < 1
            else ("--configurations", configurations, "1 or more")
            if kinds < 1
            else ("--failures", failures, "0 to 3")
        )
        raise InputError(f"{name}: got {got}; expected {expected}")
    spare = number("--headroom", headroom, share=True)
    return FleetLimits(
        gpus=most,
        gpus_of=of_kind,
        host=float("inf") if max_host is None else gib("--max-host", max_host),
        power=float("inf") if max_power is None else 1e3 * number("--max-power", max_power),
        configurations=kinds,
        headroom=spare,
        failures=lost,
        late=1 - share,
    )


def all_rentable(
    model: str,
    gpus: list[str],
    spread: tuple[str, str, str, str],
    weights: str,
    stack: str,
    host_memory: str | None,
    price: str | None,
    reserved: str | None,
    watts: str | None,
) -> "list[Rentable]":
    """Every GPU at all degrees of parallelism and weight formats that the model can have.

    Parameters
    ----------
    spread : what ``--tp``, ``--pp``, ``--dp`` and ``--ep`` say.

    Raises
    ------
    InputError
        If there is no price, or the model cannot be spread so; of several ways, by none of them.
    """
    from kvsim.cli.options import deployment
    from kvsim.planner.fleet.offers import Rentable

    prices = per_gpu("--price", either(price, ""), gpus) if price else {}
    committed = per_gpu("--reserved", either(reserved, ""), gpus) if reserved else {}
    power = per_gpu("--watts", either(watts, ""), gpus) if watts else {}
    names = ("--pp", "--dp", "--ep")
    ways = list(product(*(counts(*given) for given in zip(names, spread[1:], strict=True))))
    found, problem = [], None
    for gpu, form, degree, way in product(
        gpus, words("--weights", weights), words("--tp", spread[0]), ways
    ):
        pp, dp, ep = map(str, way)
        try:
            d = deployment(model, gpu, stack, degree, form, host_memory, (pp, dp, ep))
        except InputError as error:
            if len(ways) == 1 and way == (1, 1, 1):
                raise
            problem = problem or error
            continue
        each = prices.get(gpu, d.hardware.price)
        if each is None and gpu not in committed:
            raise InputError(
                f"--price: {gpu} has no price in its profile; add --price {quote(gpu)}=USD, per "
                f"GPU and hour"
            )
        found.append(
            Rentable(
                deployment=d,
                gpu=gpu,
                price=float("inf") if each is None else each * d.gpus,
                reserved=committed.get(gpu, float("inf")) * d.gpus,
                power=power.get(gpu, d.hardware.power or float("inf")) * d.gpus,
            )
        )
    if problem is not None and (not found or not _each_occurs(found, ways)):
        raise problem
    return found


def _each_occurs(found: "list[Rentable]", ways: list[tuple[int, ...]]) -> bool:
    """Whether every degree that was given is that of some deployment."""
    spreads = [x.deployment.parallelism for x in found]
    there = [{x.pp for x in spreads}, {x.dp for x in spreads}, {x.ep for x in spreads}]
    asked = zip(zip(*ways, strict=True), there, strict=True)
    return all(set(given) == some for given, some in asked)

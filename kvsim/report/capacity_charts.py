"""The pictures of ``kvsim capacity``: demand, cost beside others, waits, sensitivity."""

import numpy as np

from kvsim.planner.fleet.answer import CapacityAnswer
from kvsim.report.colours import PALETTE
from kvsim.report.json import Row
from kvsim.report.pictures import GREY, RED, Chart, draw_arrivals, draw_distribution

SAMPLE_POINTS = 400  # of a curve


def draw_fleet(row: Row, answer: CapacityAnswer) -> list[Chart]:
    """Draw all pictures of ``kvsim capacity``.

    Parameters
    ----------
    row
        Fields of the answer.
    answer
        Answer of the capacity planner.
    """
    return [
        _draw_demand("Demand over the trace", answer),
        _draw_costs(row),
        _draw_waits("Time to first token", answer, "ttft"),
        _draw_waits("Time per token", answer, "tpot"),
        _draw_sensitivity(row, 100 * answer.targets.share),
    ]


def _draw_demand(title: str, answer: CapacityAnswer) -> Chart:
    """Requests per second by class, and with a schedule the replicas that run."""
    traffic = answer.question.traffic
    demand = traffic.demand
    start = np.concatenate([[0.0], np.cumsum(demand.hours)])[:-1]
    if len(start) == 1:
        return draw_arrivals(title, traffic.requests.arrival)
    across, up = "hours from the first request", "requests per second"
    chart = Chart(title, across, up, 360, barmode="stack")
    for c in range(traffic.classes):
        turn, place = divmod(c, len(PALETTE))
        look = {"color": PALETTE[place], "opacity": 1 - 0.45 * turn}
        name = f"{traffic.prompt[c]:.0f} + {traffic.generate[c]:.0f} tokens"
        width, rate = demand.hours, demand.rate[:, c]
        chart.bars(name, start, rate, look, orientation="v", width=width, offset=0)
    if answer.question.schedule is not None:
        step = {"shape": "hv", "color": GREY}
        chart.line("replicas", start, answer.fleet.running.sum(axis=1), yaxis="y2", line=step)
        every = -(-int(answer.fleet.replicas.sum()) // 5)
        chart.second_axis("replicas", tickmode="linear", tick0=0, dtick=every)
    return chart


def _draw_costs(row: Row) -> Chart:
    rows = [{"name": "this fleet", "usd_per_hour": row["usd_per_hour"], "fleet": ""}]
    rows += [a for a in row["alternatives"] if a["usd_per_hour"] is not None]
    names, paid = [a["name"] for a in rows], [a["usd_per_hour"] for a in rows]
    title = "Cost against alternatives, and of replicas that are always busy"
    chart = Chart(
        title, "USD per hour", height=80 + 36 * len(rows), yaxis={"autorange": "reversed"}
    )
    colours = [PALETTE[2], *[PALETTE[5]] * (len(rows) - 1)]
    chart.bars(
        None,
        paid,
        names,
        {"color": colours},
        text=[f"{usd:.2f}" for usd in paid],
        customdata=[a["fleet"] for a in rows],
        hovertemplate="%{y}: %{x:.2f} USD/h<br>%{customdata}<extra></extra>",
        showlegend=False,
    )
    least = [row["search"]["bound_usd_per_hour"]] * len(rows)
    bound = {"dash": "dot", "color": PALETTE[1], "width": 3}
    return chart.line("always busy", least, names, line=bound)


def _draw_waits(title: str, answer: CapacityAnswer, name: str) -> Chart:
    """Share of requests within a time, of the whole trace and of each kind of replica."""
    played, times = answer.played, getattr(answer.played, name)
    parts = {"all requests": times}
    if len(answer.used) > 1:
        parts |= {answer.fleet.kinds[j].name: times[played.kind == j] for j in answer.used}
    known = {label: values[np.isfinite(values)] for label, values in parts.items()}
    share = np.linspace(0, 1, SAMPLE_POINTS)
    quantiles = {label: np.quantile(x, share) for label, x in known.items() if x.size}
    return draw_distribution(title, quantiles, target=getattr(answer.targets, name))


def _draw_sensitivity(row: Row, percentile: float) -> Chart:
    """Share of requests within both targets at other loads, and what such a load costs."""
    loads = {1.0: row["simulated"]} | {float(k): v for k, v in row["at_load"].items()}
    costs = {1.0: row["usd_per_hour"]}
    costs |= {float(k): v["usd_per_hour"] for k, v in row["fleet_at_load"].items()}
    some, paid = sorted(loads), sorted(k for k, usd in costs.items() if usd)
    title, up = (
        "Other loads: requests within both targets, and cost",
        "% of requests within both targets",
    )
    chart = Chart(title, "load, in times of the trace's", up, yaxis={"range": [0, 101]})
    kept = [100 * loads[x]["good_share"] for x in some]
    chart.line("within both targets", some, kept, PALETTE[0], mode="lines+markers")
    name, line = "USD/h of the cheapest fleet", {"color": PALETTE[1], "dash": "dash"}
    dollars = [costs[x] for x in paid]
    chart.line(name, paid, dollars, mode="lines+markers", yaxis="y2", line=line)
    chart.figure.add_hline(
        y=percentile,
        line_dash="dot",
        line_color=RED,
        annotation_text=f"target {percentile:g} %",
        annotation_position="bottom left",
    )
    return chart.second_axis("USD/h", tickmode="auto")

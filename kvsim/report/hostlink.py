"""GPUs without a link of their own: sums go through the host, whose rate is not the card's."""

from dataclasses import replace

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.prediction.generate import Prediction
from kvsim.report import units
from kvsim.report.json import Row

SLOWEST = 2e9
"""The slowest sums measured over PCIe: 8 L40S, 2 GB/s on most hosts and 20 GB/s on one
(aiconfigurator-core 0.12.0). [B/s]"""


def through_host(deployment: Deployment) -> bool:
    """Whether GPUs exchange their sums over the link that leads to the host."""
    links = deployment.hardware.links
    host = max(links["h2d"].bandwidth, links["d2h"].bandwidth)
    return deployment.tp > 1 and links["link"].bandwidth <= host


def with_slow_host(prediction: Prediction) -> Prediction:
    """The same where sums come through the host at the slowest rate that was measured."""
    d = prediction.deployment
    link, sums = d.hardware.links["link"], d.stack.sums
    shares = (sums.ring_share, sums.direct_share) if sums.direct_share else ()
    share = max(shares, default=d.stack.kernel("allreduce").memory)
    slow = replace(link, bandwidth=min(link.bandwidth, SLOWEST / share))
    hardware = replace(d.hardware, links=dict(d.hardware.links) | {"link": slow})
    return replace(prediction, deployment=replace(d, hardware=hardware))


def widened(ranges: Row, prediction: Prediction) -> Row:
    """Ranges of times that reach up to what a slow host makes of them. [s]"""
    if not ranges or not through_host(prediction.deployment):
        return ranges
    slow = with_slow_host(prediction)
    times = {"ttft_s": slow.ttft_s, "tpot_s": slow.tpot_s}
    return {
        name: each | {"high": max(each["high"], float(np.ravel(times[name])[0]))}
        for name, each in ranges.items()
    }


def said(prediction: Prediction) -> list[str]:
    """That a result rests on the host's rate, with the times of a slow one; nothing if not."""
    d = prediction.deployment
    if not through_host(d):
        return []
    slow = with_slow_host(prediction)
    times = [f"TTFT {units.seconds(float(slow.ttft_s[0]))}"]
    if prediction.generate > 1:
        times.append(f"TPOT {units.seconds(float(slow.tpot_s[0]))}")
    rate = d.hardware.links["link"].bandwidth
    return [
        f"rate of sums between GPUs, which go through the host: {rate / 1e9:.3g} GB/s; at "
        f"{SLOWEST / 1e9:.0f} GB/s, the slowest that was measured, {' and '.join(times)}. "
        f"nccl-tests measure it; a profile of your own takes it as link.bandwidth_Bps"
    ]

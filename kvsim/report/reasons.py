"""Why something takes the time it takes, in words."""

from kvsim.prediction.explain import LIMITS, SERVER

REASONS = {
    "GPU memory bandwidth": "every {step} reads weights and cache",
    "host memory bandwidth": "every {step} reads the cache there",
    "host-to-GPU link": "every {step} waits for cache or weights from the host",
    "GPU-to-host link": "writing the cache to the host takes longest",
    "GPU-to-GPU link": "the GPUs wait for each other's sums",
    "arithmetic": "the GPU computes all the time; a larger batch brings no more",
    "host arithmetic": "the CPU computes attention",
    "arithmetic that unpacks the cache": "the GPU widens packed numbers all the time",
    "kernel launches": "the host issues kernels more slowly than the GPU runs them",
    SERVER: "reading prompts and sending text take the host longer than the GPU takes",
    "fixed time": "small kernels spend their time starting",
}
"""What binds a round, and why that is."""

assert set(LIMITS.values()) <= set(REASONS)


PROMPTS = "most time goes into reading prompts"


def why(bound_by: str, generate: int, service: bool = False) -> str:
    """The limit of decoding, or of prefill where one token is generated, and its reason.

    Parameters
    ----------
    service : whether requests keep coming, so that the limit is that of prompts and rounds.
    """
    reason = REASONS[bound_by].format(step="token" if generate > 1 else "pass")
    if service and bound_by == "arithmetic":
        reason = PROMPTS
    return f"Limit: {bound_by}, as {reason}."

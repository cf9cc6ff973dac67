"""The settings that ``kvsim plan --trace`` chooses from."""

from kvsim.errors import InfeasibleError, InputError
from kvsim.machines.deployment import Deployment
from kvsim.planner.admit import Admission
from kvsim.planner.question import does_nothing
from kvsim.planner.workload import PlanLimits
from kvsim.serving.costs import StepCosts
from kvsim.serving.rules import Rules
from kvsim.traces.requests import Requests


def options_of(
    deployment: Deployment,
    requests: Requests,
    limits: PlanLimits,
    rules: Rules,
    admission: Admission,
) -> list[StepCosts]:
    """Step costs of all settings that the user admits and that leave room for a cache.

    Raises
    ------
    InputError
        If weights leave none.
    InfeasibleError
        If no technique is admitted.
    """
    mean = round(float(requests.prompt.mean())), max(round(float(requests.generate.mean())), 2)
    found: list[StepCosts] = []
    reason: InputError | None = None
    longest = int((requests.prompt + requests.generate).max())
    admission.check(deployment)
    for t in admission.candidates():
        if t.refuses(deployment):
            continue
        for some in admission.settings(t, deployment, *mean, differ=True):
            for settings in some.rows():
                if does_nothing(settings) and not admission.only:
                    continue
                known = admission.evidence(settings, deployment, longest)
                if admission.loss(known) > limits.loss or (settings.assumes and limits.assumed < 1):
                    continue
                costs = StepCosts(
                    technique=settings,
                    deployment=deployment,
                    rules=rules,
                    longest=longest,
                    longest_prompt=int(requests.prompt.max()),
                    gpu_memory=limits.gpu_memory,
                )
                try:
                    assert costs.capacity > 0
                except InputError as error:
                    reason = error
                    continue
                found.append(costs)
    if not found and reason is not None:
        raise reason
    if not found:
        raise InfeasibleError("no lossless technique can run here; --lossy admits the others")
    return found

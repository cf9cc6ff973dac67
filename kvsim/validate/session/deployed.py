"""A deployment for runs that no prediction is read of: techniques weigh copies by it."""

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.model import Model


def deployed(model: Model) -> Deployment:
    """A model on a common card under kvsim's own stack."""
    return Deployment(model, load_hardware("a6000"), load_stack("kvsim"))

"""Multi-token prediction: a module that shares the model's embedding and head."""

from kvsim.validate.parts.heads import DraftHeads
from kvsim.validate.small import SmallRun


def small_settings(run: SmallRun) -> list[str]:
    """Two drafts, the second from the first one's hidden state."""
    return ["gamma=2,acceptance=0.5"]


class Mtp(DraftHeads):
    """Drafts from the model's last hidden states.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2.
    """

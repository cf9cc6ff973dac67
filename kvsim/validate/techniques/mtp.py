"""Multi-token prediction: a module that shares the model's embedding and head."""

from kvsim.validate.parts.heads import DraftHeads

SMALL_SETTINGS = ("gamma=2,acceptance=0.5",)  # acceptance is counted, whatever is said here


class Mtp(DraftHeads):
    """Drafter with a prediction module on the model's last hidden states.

    References
    ----------
    .. [1] DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2.
    """

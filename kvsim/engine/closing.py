"""What ends a forward pass: logits, sampling, and the host's work for each request."""

from kvsim.engine import ops
from kvsim.graph import Number, Op, Point
from kvsim.machines.deployment import WEIGHTS, Deployment


def closing(deployment: Deployment, point: Point, prompts: Number = 0.0) -> tuple[Op, ...]:
    """Embedding look-up, last norm, LM head, sampling and the step's fixed time.

    Parameters
    ----------
    prompts : that are read beside the sequences of a point that decodes.
    """
    m = deployment.shard
    rows = (
        point.batch if point.prefill and not deployment.stack.memory.prompt_logits else point.tokens
    )
    logits = ops.gemm(deployment, "lm_head", rows, (m.hidden, m.vocab), WEIGHTS["fp16"])
    looked_up = 3 if m.learned_positions else 2  # rows of the embedding and of positions, their sum
    moved = rows * (m.vocab + 2 * m.hidden) + looked_up * point.tokens * m.hidden
    sample = Op(
        "sample",
        kernel="pointwise",
        bytes={"hbm": ops.HALF * moved},
        fixed=deployment.stack.time.step + deployment.stack.time.sequence * point.batch,
        # the host handles each sequence once it has its token, or issues the next pass then
        sync=deployment.stack.time.sequence > 0 or deployment.stack.eager,
    )
    return logits, sample, *_server(deployment, point, prompts)


def _server(deployment: Deployment, point: Point, prompts: Number) -> tuple[Op, ...]:
    """Work of the host for requests while the GPU computes: a pass takes no less.

    Per prompt it is read, tokenised, scheduled and issued outside CUDA graphs; per token decoded it
    is turned into text and sent.
    """
    time = deployment.stack.time
    if not (time.overlapped_sequence or time.overlapped_prompt):
        return ()
    read, decoded = (point.batch, 0.0) if point.prefill else (prompts, point.batch)
    busy = time.overlapped_prompt * read + time.overlapped_sequence * decoded
    return (Op("server", stream="cpu", fixed=busy, launches=0.0),)

"""What offloading shares: a cache in host memory that visits the GPU layer by layer.

A layer's cache is stored slot by slot, (slots, sequences x KV heads, dim), so that any range of
tokens is one contiguous copy. Two buffers on the GPU take turns: while one layer is attended to,
the next one arrives in the other.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsim.graph import Point
from kvsim.techniques.base import Technique
from kvsim.techniques.hostcache import Scheduled
from kvsim.validate.attention import Step, attend, visible
from kvsim.validate.decoder import Decoder
from kvsim.validate.impl.base import Implementation, Resident
from kvsim.validate.tally import Kind
from kvsim.validate.transfer import Mark, Transfers
from kvsim.validate.weights import LayerWeights

"""The four axes of a technique, each with defaults that change nothing.

*Selection* says which cached tokens stay and which of them a query reads, *storage* how keys and
values are stored, *placement* where they live and how they come to where attention runs, and
*drafting* who proposes tokens. Selection, storage and placement may differ by layer; drafting is
the whole model's. Each is asked about a :class:`~kvsim.techniques.layers.LayerPass`: one pass
through one layer of one model on one machine.
"""

from kvsim.techniques.drafting import Drafting
from kvsim.techniques.placement import Placement
from kvsim.techniques.selection import Evicts, Selection
from kvsim.techniques.storage import Storage

__all__ = ["Drafting", "Evicts", "Placement", "Selection", "Storage"]

"""Shares of the cache in host memory."""

from kvsim.errors import InputError
from kvsim.techniques.place import Place as Settings
from kvsim.validate.impl.bytoken import ByToken
from kvsim.validate.impl.cells import Cells, on_the_gpu
from kvsim.validate.impl.placing import Placing
from kvsim.validate.impl.selecting import Where


class Place(Placing):
    """Values alone in host memory."""

    def cells(self, kind: type[Cells], place: Where, slots: int) -> Cells:
        """Values at home, where all of them are."""
        assert isinstance(self.part, Settings)
        if not self.part.loads:
            return super().cells(kind, place, slots)
        m, where = self.run.model, self.run.decoder
        if float(self.part.v_host) != 1 or float(self.part.k_host) or not issubclass(kind, ByToken):
            raise InputError(
                "place: of caches in host memory only values that are stored token by token run "
                "composed; offload and kvpr run by themselves"
            )
        room = on_the_gpu(self.run.batch, m.kv_heads, m.head_dim, where.dtype, where.device)
        return kind(place.parts.storage, room, slots, self.run.tally, self.lanes().host)

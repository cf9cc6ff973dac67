"""Where in the list of fetched tokens a token is: a table, written for those in the list alone."""

from kvsim.validate.kernels.language import jit, tl


@jit
def fetched_place(index, places, chosen, room, row, mask):
    """Where in the list of fetched tokens each row is, from 1 on; 0 for those that are not.

    References
    ----------
    .. [1] P. Briggs, L. Torczon, "An efficient representation for sparse sets", 1993: the table
       needs no zeros, as an entry only counts where the list names the row.
    """
    head = tl.program_id(0).to(tl.int64)
    entry = tl.load(places + head * room + row, mask=mask, other=-1)
    known = mask & (entry >= 0) & (entry < chosen)
    named = tl.load(index + head * chosen + entry, mask=known, other=-1)
    return tl.where(known & (named == row), entry + 1, 0)


@jit
def spread(index, places, chosen, room, LISTED: tl.constexpr):
    """Write down at every fetched token where in the list it is."""
    head = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * LISTED + tl.arange(0, LISTED)
    token = tl.load(index + head * chosen + entry, mask=entry < chosen, other=-1)
    tl.store(places + head * room + token, entry, mask=(token >= 0) & (token < room))

"""Records that hold the state of a simulation, for Python and for compiled code.

Each class defines the fields of a NumPy structured dtype through its annotations. Compiled code
reads ``replica.clock`` as Python reads an attribute.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar, cast, get_type_hints, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim.graph import Array
from kvsim.serving.tables import COST_RESOURCES, COSTS
from kvsim.traces.requests import CLASSES

Integers = NDArray[np.int64]
Int32 = Annotated[int, "i4"]
Int8 = Annotated[int, "i1"]
PerCost = Annotated[Array, ("f8", (len(COSTS),))]
OnlyTime = Annotated[Array, ("f8", (1,))]  # the first of COSTS
TIER_LINKS = ("h2d", "d2h", "nvme_read", "nvme_write", "nic_in", "nic_out")
H2D, D2H, NVME_READ, NVME_WRITE, NIC_IN, NIC_OUT = range(len(TIER_LINKS))
PerLink = Annotated[Array, ("f8", (len(TIER_LINKS),))]
MEMORIES = ("gpu", "host", "nvme", "remote")
GPU, HOST, NVME, REMOTE = range(len(MEMORIES))
POOLS = 3  # of each replica; the remote store is one for all, behind theirs
PerMemory = Annotated[Array, ("i8", (len(MEMORIES),))]
PerResource = Annotated[Array, ("f8", (len(COST_RESOURCES),))]
Ends = Annotated[Array, ("i8", (CLASSES + 1,))]  # a queue's first request, and the last of a class

NO_INDEX = -1  # no request, no entry, no replica
NEVER = 2**62
LENGTH_ROUNDING = 1e-9  # lengths are whole up to this: rounds may yield fractions of a token
WAITING, RUNNING, SWAPPED, FINISHED, REFUSED, ABORTED = range(6)

GAP_BINS = 512
GAPS = 2048  # bins of the time between tokens
FINEST_GAP, GAP_RATIO = 1e-5, 1.01  # first bin [s], and each bin's width over the last one's

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Records(Protocol[R_co]):
    """A one-dimensional ``numpy.recarray``: a record by its index, a column by its field's name."""

    @property
    def size(self) -> int: ...  # noqa: D102
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[R_co]: ...
    @overload
    def __getitem__(self, index: int, /) -> R_co: ...
    @overload
    def __getitem__(self, index: slice | NDArray[np.integer], /) -> "Records[R_co]": ...
    @overload
    def __getitem__(self, index: str, /) -> Array: ...
    def __getattribute__(self, name: str, /) -> Any: ...  # a column, typed as NumPy's stubs do
    def __setattr__(self, name: str, value: ArrayLike, /) -> None: ...


class Limits:
    """Scheduling rules and memory limits, which are the same for all replicas."""

    max_seqs: int  # most sequences in a pass
    max_tokens: int  # most tokens in a pass
    part: int  # most tokens of one prompt in a pass [tokens]
    block_tokens: int  # tokens per KV block
    width: int  # tokens per sequence in the widest pass of a round [tokens]
    chunked: bool  # whether prefill is chunked
    decode_first: bool  # whether decoding has priority over prefill
    swap: bool  # whether preempted sequences are swapped to host memory
    whole_prompt: bool  # whether a prompt starts only if memory suffices for all of it
    whole_request: bool  # whether it also has to suffice for all answers
    ahead: bool  # whether a pass is scheduled while the one before it runs
    gpu: int  # memory for caches of each GPU [B]
    host: int  # host memory for the running sequences of each GPU [B]
    host_cache: int  # host memory for stored blocks and swapped sequences [B]
    parts: int  # KV blocks per block of the trace
    part_bytes: int  # memory of a shared KV block; 0 without prefix caching [B]
    steepest: int  # largest GPU memory that one more KV block of a sequence takes [B]
    host_steepest: int  # largest host memory that it takes [B]
    h2d: float  # rate at which each GPU swaps in [B/s]
    d2h: float  # rate at which each GPU swaps out [B/s]
    tiers: bool  # whether memories besides the GPU store shared blocks
    unit: int  # KV blocks that are stored and loaded together
    unit_bytes: int  # size of such a unit [B]
    ttl: float  # time after their last use at which stored blocks are dropped [s]
    load: int  # how stored blocks are used, an index into LOADS


class Request:
    """A request of the trace and its current state."""

    arrival: float  # time of arrival [s]
    rate: float  # tokens per decoding round
    started: float  # time when it was first scheduled [s]
    first: float  # time of the first token [s]
    last: float  # time of the last token [s]
    first_block: int  # index into ``World.places`` of its first block in the trace
    blocks: Int32  # full KV blocks of its prompt and answer that these blocks cover
    kept: Int32  # entry of its other blocks, left behind when it was preempted
    prompt: Int32  # prompt length [tokens]
    generate: Int32  # length of the answer [tokens]
    made: Int32  # tokens generated when it last left the batch [tokens]
    left: Int32  # remaining decoding rounds of a swapped sequence
    hits: Int32  # prompt tokens found in the prefix cache when it first started [tokens]
    preempted: Int32  # number of preemptions
    replica: Int32  # index of its replica
    link: Int32  # next request in its queue; if finished, the one that finished before it
    back: Int32  # previous request in its queue
    handed: bool  # whether it comes with its cache from a prefill replica
    status: Int8  # state of the request
    priority: Int8  # priority class, 0 to CLASSES - 1; the lowest goes first


class Turn:
    """A turn of a conversation: the turns before and after it, and how long its client waits."""

    think: float  # time after the previous turn's last token [s]
    abort_after: float  # time after its arrival at which the client disconnects [s]
    next: Int32  # first turn that follows this one, or NONE
    sibling: Int32  # next turn that follows the same one, or NONE
    awaited: bool  # whether the turn that it follows is not finished


class BlockPlace:
    """The position of a prefix block in its run.

    A run is a sequence of blocks that always occur together in requests. Where host memory or
    drives store blocks, every run is a single block.
    """

    block: int  # id of the run's first block
    before: Int32  # KV blocks of the run before this one
    left: Int32  # KV blocks of the request from this one to the end of the run


class Event:
    """The arrival or abort of a request, at a time that the simulation determines."""

    time: float  # time of the event [s]
    key: int  # twice the index of the request, plus 1 for an abort


class Sequence:
    """A running request in the batch. Fields that every round reads come first."""

    intercept: float  # cached tokens after round x of its replica are this + growth x [tokens]
    growth: float  # tokens per round
    finish: int  # round that completes it; NEVER during prefill
    todo: int  # prompt tokens to prefill; 0 in decoding [tokens]
    brim: float  # length for which its memory suffices; 0 if unknown [tokens]
    shared: int  # number of shared KV blocks in use
    held: int  # private GPU cache [B]
    host_held: int  # private cache in host memory [B]
    ready: float  # time when prompt tokens that are being loaded are available [s]
    request: Int32  # index of its request
    done: Int32  # prompt tokens prefilled or found in the cache [tokens]
    chunk: Int32  # prompt tokens to prefill in this pass [tokens]
    found: Int32  # leading shared KV blocks that were on the GPU at the start
    load_from: Int32  # first KV block that is loaded from another memory
    load_to: Int32  # end of these blocks
    named: Int32  # end of the KV blocks in the cache, except those still being loaded
    skip: Int32  # prompt tokens that are still being loaded [tokens]
    skip_at: Int32  # position of the first of these tokens [tokens]
    paused: bool  # whether it decodes, but not in this pass


class Replica:
    """The state of one replica and its totals over the run."""

    clock: float  # time up to which it has been simulated [s]
    index: int  # index of the replica
    first_sequence: int  # its batch is World.sequences[first_sequence:][:running]
    running: int  # sequences in the batch, in order of admission
    reading: int  # sequences of these in prefill
    first_reader: int  # no sequence before this position of the batch is in prefill
    rounds: int  # decoding rounds so far
    end: int  # round that completes the next sequence
    context: float  # cached tokens of all decoding sequences [tokens]
    growth: float  # cached tokens that a round adds [tokens]
    unread: int  # prompt tokens of all its requests that are not prefilled yet [tokens]
    next_ready: float  # time when the next sequence that waits for stored blocks has them [s]
    waiting: int  # requests in the waiting queue
    wait_ends: Ends  # ends of the waiting queue
    swapped: int  # requests whose cache is in host memory
    swap_ends: Ends  # ends of the queue of swapped requests
    done: int  # request that finished last; earlier ones by ``link``
    private: int  # private cache of running sequences [B]
    pinned: int  # shared KV blocks in use [B]
    cached: int  # unused KV blocks kept for later requests [B]
    host_private: int  # host memory of running sequences, as their technique states it [B]
    host_swapped: int  # host memory of swapped sequences [B]
    emitted: int  # number of generated tokens [tokens]
    preemptions: int  # number of preemptions
    passes: int  # number of decoding rounds and prefill passes
    peak: int  # largest cache in use so far [B]
    lowest: int  # smallest free memory so far; below 0 would be a fault [B]
    just_done: int  # number of sequences that the last step completed
    late: int  # memory of these, which a pass scheduled ahead does not know to be free [B]
    late_kept: int  # part of that memory that is kept in the cache [B]
    late_entry: int  # first entry of that part, or NO_INDEX
    began: float  # begin of the last pass [s]
    ended: float  # end of the last pass [s]
    bin_width: float  # width of the timeline's bins [s]
    link_free: PerLink  # time when all transfers on each link are complete [s]
    link_bytes: PerLink  # bytes transferred on each link so far, pending ones included [B]
    sent: float  # time when all caches handed over so far have been sent [s]
    found: PerMemory  # prompt tokens found in each memory when requests first started [tokens]
    estimate: PerCost  # cost of one prompt chunk, for estimates [s]
    recompute: OnlyTime  # time of recomputing stored blocks [s]
    # the pass that is being scheduled
    budget: int  # remaining token budget [tokens]
    decoding: int  # number of sequences that decode in it
    left_out: int  # number of sequences that decode, but not in this pass
    prompt_tokens: int  # prompt tokens in it [tokens]
    ousted: int  # number of sequences preempted for it
    copying: float  # time of swapping before it [s]
    force: bool  # whether decoding may preempt for it
    seen: float  # requests that arrived later are not known to it yet [s]
    held: bool  # whether a request that is not known yet waits
    grown: bool  # whether memory for its decoding sequences is allocated
    cost: PerCost  # cost of the pass, by COSTS [s]


class Pool:
    """The prefix blocks in one memory, with an LRU list of those not used by a running request.

    On the GPU an entry holds consecutive KV blocks of a run; in other memories it holds one storage
    unit, identified by its last block.
    """

    first: int  # its entries are World.entries[first:][:room]
    room: int  # number of its entries
    first_bucket: int  # first of its hash buckets
    mask: int  # number of its hash buckets, minus 1
    made: int  # number of entries that have ever been in use
    free: int  # first unused one of these, linked by ``chain``
    oldest: int  # least recently used entry without users
    newest: int  # most recently used entry without users
    count: int  # number of entries without users
    limit: int  # largest number of entries that the memory holds
    stored: int  # number of entries ever stored
    dropped: int  # number of entries ever evicted


class Entry:
    """Consecutive KV blocks in a pool that are stored, used and evicted together."""

    block: int  # id of its run; below NO_INDEX if private to one request; NO_INDEX if unused
    ready: float  # time when it is available in this memory [s]
    chain: Int32  # next entry in its hash bucket
    newer: Int32  # next entry in the LRU list
    older: Int32  # previous entry in the LRU list
    parts: Int32  # number of KV blocks
    first: Int32  # position of its first KV block in the run
    owner: Int32  # request that computed it
    users: Int32  # number of running sequences that use it


class Bin:
    """Totals of a replica over one interval of the timeline.

    ``running``, ``waiting``, ``cache`` and ``context`` are integrals over time, for example
    sequences times seconds; divide them by the length of the interval for means.
    """

    seconds: float  # time in which the replica computes [s]
    running: float  # decoding sequences x time [s]
    waiting: float  # requests x time [s]
    cache: float  # cache in use x time [B s]
    context: float  # tokens cached x time [tokens s]
    decoded: float  # sequences x rounds
    prompt: float  # prefilled tokens [tokens]
    rounds: float  # decoding rounds
    use: PerResource  # time each resource would need at its full rate [s]


class Sizes:
    """Memory of a sequence by its number of KV blocks; row b is for b blocks."""

    prompt: int  # on the GPU, in prefill [B]
    gpu: int  # on the GPU, in decoding [B]
    host: int  # in host memory [B]


class World(NamedTuple):
    """The complete state of a simulation."""

    limits: Limits
    requests: Records[Request]
    replicas: Records[Replica]
    sequences: Records[Sequence]
    pools: Records[Pool]  # of replica r, World.pools[POOLS * r + GPU] and so on; the last is REMOTE
    entries: Records[Entry]
    used: Array  # last use of each entry; empty if entries do not expire [s]
    buckets: NDArray[np.int32]  # hash buckets of the pools
    places: Records[BlockPlace]  # places of the blocks of all prompts
    sizes: Records[Sizes]
    bins: Records[Bin]  # of replica r, World.bins[BINS * r:][:BINS]
    gaps: Array  # histograms of times between tokens, GAPS bins for each replica
    turns: Records[Turn]  # turn of each request; empty if nothing depends on the run
    events: Records[Event]  # heap of pending events
    links: Any = None  # rate of each of LINKS [B/s]; None where only GPUs keep blocks

    @property
    def done(self) -> int:
        """Number of requests that are finished, aborted or refused."""
        return int(np.count_nonzero(self.requests.status >= FINISHED))


Told = Callable[[World], None]  # called now and then with the state of a simulation

TieredWorld = Annotated[World, "whose links lead to other memories that keep shared blocks"]


@cache
def layout(record: type) -> np.dtype[np.void]:
    """Return the structured dtype of a record's annotations.

    Parameters
    ----------
    record : a class whose annotations name the fields.

    Returns
    -------
    numpy.dtype
        The dtype, aligned as a C struct.
    """
    plain = {float: "f8", int: "i8", bool: "?"}
    fields: list[tuple[object, ...]] = []
    for name, kind in get_type_hints(record, include_extras=True).items():
        stored = plain[kind] if kind in plain else kind.__metadata__[0]
        fields.append((name, *stored) if isinstance(stored, tuple) else (name, stored))
    return np.dtype(fields, align=True)


def make(record: type[R], count: int, **values: ArrayLike) -> Records[R]:
    """Make records of zeros, with values in some of the fields.

    Parameters
    ----------
    record : a class whose annotations name the fields.
    count : number of records.
    values : numbers or arrays by field.

    Returns
    -------
    numpy.recarray
        The records. (count,)
    """
    found = np.zeros(count, layout(cast(type, record))).view(np.recarray)
    for name, value in values.items():
        found[name] = value
    return cast("Records[R]", found)

"""Records that hold the state of a simulation, for Python and for compiled code.

Each class defines the fields of a NumPy structured dtype through its annotations. Compiled code
reads ``replica.clock`` as Python reads an attribute.
"""

from collections.abc import Iterator
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

    max_seqs: int
    max_tokens: int
    part: int  # tokens of one prompt in a pass at most: it is read by one lane [tokens]
    block_tokens: int  # tokens of a KV block
    width: int  # tokens per sequence in the widest pass of a round [tokens]
    chunked: bool
    decode_first: bool
    swap: bool
    whole_prompt: bool  # a prompt begins only if memory suffices for all of it
    whole_request: bool  # and for its answer, beside those of all running sequences
    ahead: bool  # a pass is put together while the one before it runs
    gpu: int  # memory for caches of each GPU [B]
    host: int  # host memory for the running sequences of each GPU [B]
    host_cache: int  # host memory for stored blocks and swapped sequences [B]
    parts: int  # KV blocks of a block of the trace
    part_bytes: int  # memory of a KV block that is shared; 0 without prefix caching [B]
    steepest: int  # most that one more KV block of a sequence takes of the GPU [B]
    host_steepest: int  # and of the host [B]
    h2d: float  # rate at which each GPU swaps in [B/s]
    d2h: float  # and swaps out [B/s]
    tiers: bool  # whether any memory besides the GPU keeps shared blocks
    unit: int  # KV blocks that are stored and loaded together
    unit_bytes: int  # [B]
    ttl: float  # stored blocks are forgotten so long after their last use [s]
    load: int  # of LOADS: what to do with stored blocks


class Request:
    """A request of the trace and its current state."""

    arrival: float  # [s]
    rate: float  # tokens per decoding round
    started: float  # first scheduled [s]
    first: float  # first token [s]
    last: float  # last token [s]
    first_block: int  # index into ``World.places`` of the first of its blocks in the trace
    blocks: Int32  # full KV blocks of its prompt and answer that these name
    kept: Int32  # entry of the rest, which it left behind when it was preempted
    prompt: Int32  # [tokens]
    generate: Int32  # [tokens]
    made: Int32  # tokens generated when it was last taken out of the batch [tokens]
    left: Int32  # decoding rounds left of a swapped sequence
    hits: Int32  # prompt tokens found in the prefix cache, at the first start [tokens]
    preempted: Int32  # times it was preempted
    replica: Int32
    link: Int32  # next request in its queue; of a finished one, the one that finished before it
    back: Int32  # and the one before it in its queue
    handed: bool  # it comes with its cache, from a replica that read its prompt
    status: Int8
    priority: Int8  # its class, 0 to CLASSES - 1: the lowest goes first


class Turn:
    """A turn of a conversation: the turns before and after it, and how long its client waits."""

    think: float  # after the last token of the turn before it [s]
    abort_after: float  # the client hangs up so long after its arrival [s]
    next: Int32  # first turn that follows this one, or NONE
    sibling: Int32  # next turn that follows the same one, or NONE
    awaited: bool  # it follows a turn that is not finished


class BlockPlace:
    """The position of a prefix block in its run.

    A run is a sequence of blocks that always occur together in requests. Where host memory or
    drives store blocks, every run is a single block.
    """

    block: int  # id of the run's first block
    before: Int32  # KV blocks of the run that come before it
    left: Int32  # and from its first one on, of those that this request has


class Event:
    """The arrival or abort of a request, at a time that the simulation determines."""

    time: float  # [s]
    key: int  # 2 x request, and 1 more for an abort


class Sequence:
    """A running request in the batch. Fields that every round reads come first."""

    intercept: float  # tokens cached after round x of its replica: this + growth x [tokens]
    growth: float  # tokens per round
    finish: int  # round that completes it; NEVER while its prompt is read
    todo: int  # prompt tokens to read; 0 while it decodes [tokens]
    brim: float  # length up to which its memory suffices, as rounds left it; 0 unknown [tokens]
    shared: int  # shared KV blocks it uses
    held: int  # GPU cache of its own [B]
    host_held: int  # its part in host memory [B]
    ready: float  # when the prompt tokens that are to come from another memory are here [s]
    request: Int32
    done: Int32  # prompt tokens read or found [tokens]
    chunk: Int32  # prompt tokens it reads in this pass [tokens]
    found: Int32  # of the shared KV blocks, the leading ones, which the GPU held when it began
    load_from: Int32  # those from here to before load_to, which come from another memory
    load_to: Int32
    named: Int32  # and all before this one, but for those still to be loaded
    skip: Int32  # prompt tokens that are still to come from another memory [tokens]
    skip_at: Int32  # where they begin [tokens]
    paused: bool  # decodes, but not in this pass


class Replica:
    """The state of one replica and its totals over the run."""

    clock: float  # [s]
    index: int
    first_sequence: int  # its batch is World.sequences[first_sequence:][:running]
    running: int  # sequences in the batch, in order of admission
    reading: int  # of them, those whose prompt is being read
    first_reader: int  # none of them comes before this place of the batch
    rounds: int  # decoding rounds so far
    end: int  # round that completes the next sequence
    context: float  # tokens cached of all decoding sequences [tokens]
    growth: float  # and what a round adds to them [tokens]
    unread: int  # prompt tokens of all requests here that are not read yet [tokens]
    next_ready: float  # when the next sequence that waits for stored blocks has them [s]
    waiting: int  # requests that have not started, or start again
    wait_ends: Ends
    swapped: int  # requests whose cache is in host memory
    swap_ends: Ends
    done: int  # request that finished last; the others by ``link``
    private: int  # cache of running sequences, shared blocks apart [B]
    pinned: int  # shared KV blocks in use [B]
    cached: int  # KV blocks kept in case their tokens come again [B]
    host_private: int  # host memory of running sequences, as their technique states it [B]
    host_swapped: int  # and of swapped sequences [B]
    emitted: int  # tokens generated [tokens]
    preemptions: int
    passes: int  # rounds and prompt passes
    peak: int  # most cache in use [B]
    lowest: int  # least free memory ever found: below 0 would be a fault [B]
    just_done: int  # sequences that the last step completed
    late: int  # their memory, which a pass put together ahead does not know to be free [B]
    late_kept: int  # of it, what is kept [B]
    late_entry: int  # and the first entry of that, or NO_INDEX
    began: float  # when the last pass began [s]
    ended: float  # and when it ended [s]
    bin_width: float  # [s]
    link_free: PerLink  # when what was put on each link so far has passed [s]
    link_bytes: PerLink  # what has passed or is to pass [B]
    sent: float  # when the caches that it handed over so far have left [s]
    found: PerMemory  # prompt tokens found in each memory, at requests' first start [tokens]
    estimate: PerCost  # of one part of a prompt [s]
    recompute: OnlyTime  # of recomputing stored blocks [s]
    # the pass that is being put together
    budget: int  # tokens it may still take [tokens]
    decoding: int  # sequences that decode in it
    left_out: int  # sequences that decode, but not in it
    prompt_tokens: int  # [tokens]
    ousted: int  # sequences preempted for it
    copying: float  # seconds of copies before it [s]
    force: bool  # whether decoding may preempt for it
    seen: float  # requests that arrived later are not known to it yet [s]
    held: bool  # whether one of them waits
    grown: bool  # whether the memory of its decoding sequences is taken
    cost: PerCost  # what it costs, as COSTS [s]


class Pool:
    """The prefix blocks in one memory, with an LRU list of those that no running request uses.

    An entry is a number of consecutive KV blocks of a run on the GPU, and one storage unit, named
    by its last block, in other memories.
    """

    first: int  # its entries are World.entries[first:][:room]
    room: int
    first_bucket: int
    mask: int  # number of its buckets, less one
    made: int  # entries that have been in use
    free: int  # first of them that is unused, linked by ``chain``
    oldest: int  # least recently used entry without users
    newest: int
    count: int  # entries in the list from oldest to newest
    limit: int  # most entries its memory holds
    stored: int  # entries ever made
    dropped: int  # and given up


class Entry:
    """Consecutive KV blocks in a pool that are stored, used and evicted together."""

    block: int  # id of its run; below NO_INDEX if only one request has it; NO_INDEX if unused
    ready: float  # when it has arrived in this memory [s]
    chain: Int32  # next entry in its bucket
    newer: Int32
    older: Int32
    parts: Int32  # KV blocks
    first: Int32  # which of its run the first one is
    owner: Int32  # request that computed it
    users: Int32  # running sequences that use it


class Bin:
    """Totals of a replica over one interval of the timeline.

    ``running``, ``waiting``, ``cache`` and ``context`` are integrals over time, for example
    sequences times seconds; divide them by the length of the interval for means.
    """

    seconds: float  # the replica computes [s]
    running: float  # decoding sequences x time [s]
    waiting: float  # requests x time [s]
    cache: float  # cache in use x time [B s]
    context: float  # tokens cached x time [tokens s]
    decoded: float  # sequences x rounds
    prompt: float  # prompt tokens read [tokens]
    rounds: float
    use: PerResource  # time each resource would need at its full rate [s]


class Sizes:
    """Memory of a sequence by its number of KV blocks; row b is for b blocks."""

    prompt: int  # on the GPU, until its prompt is read [B]
    gpu: int  # on the GPU, while it decodes [B]
    host: int  # its part in host memory [B]


class World(NamedTuple):
    """The complete state of a simulation."""

    limits: Limits
    requests: Records[Request]
    replicas: Records[Replica]
    sequences: Records[Sequence]
    pools: Records[Pool]  # of replica r, World.pools[POOLS * r + GPU] and so on; last, REMOTE
    entries: Records[Entry]
    used: Array  # last use of each entry; empty where nothing is forgotten with time [s]
    buckets: NDArray[np.int32]
    places: Records[BlockPlace]  # of the blocks of all prompts
    sizes: Records[Sizes]
    bins: Records[Bin]  # of replica r, World.bins[BINS * r:][:BINS]
    gaps: Array  # tokens by the time since the one before, GAPS of each replica
    turns: Records[Turn]  # of each request; empty where nothing depends on the run
    events: Records[Event]  # a heap of those to come
    links: Any = None  # rate of each of LINKS [B/s]; None where only GPUs keep blocks


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

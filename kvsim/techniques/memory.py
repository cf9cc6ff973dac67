"""Resident memory: caches and weights of every layer, and buffers that layers share."""

from dataclasses import replace

import numpy as np

from kvsim.engine import attention, ops, recurrence
from kvsim.engine.buffers import (
    HOST_WEIGHTS,
    largest,
    layer_weights,
    merge,
    resident_once,
    scale,
    sequences_alive,
)
from kvsim.graph import Buffers, Number, Point
from kvsim.machines.deployment import Deployment
from kvsim.models.model import LayerShape
from kvsim.techniques.axes.base import LayerPass
from kvsim.techniques.steps import Counted, tile_point


def resident(deployment: Deployment, point: Point, layers: Counted) -> Buffers:
    """Return the memory of one GPU, and of its share of the host, during a pass. [B]

    Parameters
    ----------
    deployment : model, machine and software.
    point : the pass, of the whole batch.
    layers : shapes, numbers and parts of the layers.

    Returns
    -------
    Bytes by tier and by name.
    """
    if deployment.dp > 1:  # every rank has sequences of its own
        point = replace(point, batch=point.batch / deployment.dp)
    several = list({id(parts): parts for *_, parts in layers}.values())
    packed = any(parts.storage.stored.packs for parts in several)
    widest_part = min(several, key=lambda some: some.placement.tiles)
    own, scratch, in_turn = [], [], []
    widest = max((s for s, *_ in layers if s.keeps), key=lambda s: s.window or np.inf)
    for parts in several:
        at = LayerPass(deployment, tile_point(point, parts), widest, parts)
        in_turn += [piece.shared_buffers(at) for piece in at.pieces]
        scratch.append(_scratch(at.without_window()))
    weights: dict[LayerShape, float] = {}  # whatever the window
    for shape, count, parts in layers:
        at = LayerPass(deployment, point, shape, parts, tile_point(point, parts))
        if (around := shape.window_free) not in weights:
            weights[around] = layer_weights(deployment, around)
        each = layer_buffers(at, weights[around])
        own.append(scale(each, count * deployment.stage_share))
    most = scratch[0]
    for other in scratch[1:]:
        most = np.maximum(most, other)
    shared = resident_once(deployment, tile_point(point, widest_part), most, packed)
    return merge(shared, largest(*in_turn), *own)


def kept_share(deployment: Deployment, point: Point, layers: Counted) -> Number:
    """Return the number of cached tokens relative to a cache without selection.

    Parameters
    ----------
    deployment : model, machine and software.
    point : the pass, of the whole batch.
    layers : shapes, numbers and parts of the layers.
    """
    kept: Number = 0.0
    whole: Number = 0.0
    for shape, count, parts in layers:
        if shape.keeps:
            at = LayerPass(deployment, point, shape, parts)
            kept, whole = kept + count * at.kept_tokens, whole + count * at.cached
    return kept / np.maximum(whole, 1.0)


def layer_cache(at: LayerPass) -> Buffers:
    """Return the memory of one layer's cache and buffers, by tier and name. [B]

    Parameters
    ----------
    at : the pass through the layer.
    """
    if at.shape.mixer == "recurrent":
        return {"gpu": {"state": recurrence.resident(at.d, at.p.batch, at.drafting.drafts)}}
    if not at.shape.keeps:
        return {}
    chosen_by: Buffers = {}
    if at.d.shard.indexer:
        chosen_by = {
            "gpu": {"index keys": attention.indexer_keys(at.d, at.p.batch, at.kept_tokens)}
        }
    place, drafts = at.placement, at.drafting.resident(at)
    return merge(
        chosen_by, place.cache(at), place.draft_room(at), at.selection.resident(at), drafts
    )


def layer_buffers(at: LayerPass, size: float) -> Buffers:
    """Return the memory of one layer's weights and cache, by tier and name. [B]

    Parameters
    ----------
    at : the pass through the layer.
    size : of the layer's weights. [B]
    """
    stack, stored = at.d.stack, at.storage.stored
    cache = layer_cache(at)
    away = layer_weights(at.d, at.shape, on_host=True)
    weights = at.placement.weights(stack.weights.copies * (size - away))
    if away:
        weights = merge(weights, {"host": {HOST_WEIGHTS: away}})
    if at.shape.home == "layer":
        both = merge({"gpu": cache.get("host", {})}, {"gpu": cache.get("gpu", {})})["gpu"]
        cache = {"host": both, "disk": cache.get("disk", {})}
    found = merge(weights, at.drafting.draft_weights(at), cache)
    if stack.cache.keeps_old and not at.p.prefill and at.shape.keeps:
        # torch.cat writes the cache anew; packed keys only grow in blocks
        tokens = at.p.batch * at.cached
        stays = at.d.shard.k_width * tokens * stored.k_number if stored.packs else 0.0
        old = np.maximum(cache.get("gpu", {}).get("kv", 0.0) - stays, 0.0)
        found = merge(found, {"gpu": {"kv before the step": old}})
    return found


def _scratch(at: LayerPass) -> Number:
    """Return the size of one layer's temporary copies of the cache during attention. [B]

    The grown copy of torch.cat, the heads repeat_kv writes out, an unpacked layer.
    """
    stack, m, p, stored = at.d.stack, at.d.shard, at.p, at.storage.stored
    more: Number = 0.0
    for piece in at.pieces:
        more = more + piece.scratch(at)
    wider = m.queries_per_kv if m.queries_per_kv > 1 else 0.0
    tokens = p.max_length if stack.cache.static else p.length
    if not (p.prefill or stack.cache.static):  # what was evicted is not copied
        tokens = np.minimum(tokens, at.kept_tokens)
    if not p.prefill and stored.packs and not stack.packed_cache.unpack_bytes:
        repeated = wider * stack.packed_cache.repeat_kv
        copies = repeated  # then keys or values are made contiguous, and values concatenated
        copies += 0.5 * max(1.0, repeated) if stack.packed_cache.passes >= 3 else 0.0
        copies += 0.5 if stack.packed_cache.passes >= 3 and not stack.cache.keeps_old else 0.0
        return more + copies * p.batch * stored.read(m.k_width, m.v_width, tokens)
    copies = 1.0 if stack.cache.append_passes >= 2 and not stack.cache.keeps_old else 0.0
    copies += wider * stack.attention.repeat_kv
    copies += 1.0 if stack.packed_cache.unpack_bytes and stored.packs else 0.0
    return more + copies * ops.kv_bytes(m, sequences_alive(at.d, p) * tokens)

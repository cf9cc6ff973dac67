"""The compiled scheduler beside vLLM's own class, request by request, on the same pass times.

    python -m benchmarks.scheduler FOLDER [TRACE ...]

FOLDER holds a config.json of a Llama whose context is as long as the longest request. The
environment needs vLLM (written against 0.33.0; no GPU is used). Each trace is played with
synchronous scheduling and as vLLM does it by default, where a pass is put together while the one
before runs; some with prefix caching, among them drawn conversations, whose turns come after the
answers before them. Asked: 99 % of requests with the same times to 1e-6.
"""

import os
import sys
from dataclasses import replace
from heapq import heappop, heappush
from importlib import import_module
from typing import Any

import numpy as np

from kvsim.machines.deployment import Deployment
from kvsim.machines.profiles import load_hardware, load_stack
from kvsim.models.configs import load_model
from kvsim.serving.costs import StepCosts, pass_seconds
from kvsim.serving.rules import Rules
from kvsim.serving.simulate import simulate
from kvsim.serving.world import find_repeated
from kvsim.techniques import parse
from kvsim.traces.read import load
from kvsim.traces.requests import Requests
from kvsim.traces.synthetic import parse_lengths
from kvsim.traces.workload import DrawnTraffic

TALKS = "talks"  # conversations of five turns, two a second, 1,000 tokens in and 120 out
CASES = (  # trace, requests, factor on its clock, GPU, settings
    ("sample:chat", 300, 1.0, "l40s", {}),
    ("sample:chat", 500, 1.6, "l40s", {}),
    ("sample:chat", 400, 1.0, "l40s", {"blocks": 6000}),
    ("sample:code", 300, 2.0, "l40s", {"max_tokens": 512}),
    ("sample:conversation", 400, 1.0, "h100", {"prefix_caching": True}),
    ("sample:conversation", 400, 3.0, "l40s", {"prefix_caching": True, "max_tokens": 1024}),
    ("sample:conversation", 400, 4.0, "l40s", {"prefix_caching": True, "blocks": 6000}),
    (TALKS, 400, 1.0, "l40s", {"prefix_caching": True}),
    (TALKS, 400, 1.0, "l40s", {"prefix_caching": True, "blocks": 2500, "max_tokens": 512}),
    ("sample:chat", 300, 1.6, "l40s", {"prefix_caching": True, "blocks": 5000}),
)
OWN_TRACE = ((0.5, {}), (1.5, {"max_seqs": 32}))
QUEUE = 2  # passes that vLLM's engine core has under way with asynchronous scheduling


def make_scheduler(folder: str, rules: Rules, blocks: int) -> Any:
    """vLLM's scheduler with so many KV blocks."""
    config, cache = import_module("vllm.config"), import_module("vllm.v1.kv_cache_interface")
    longest = 2**18
    scheduler = config.SchedulerConfig(
        max_num_seqs=rules.max_seqs, max_num_batched_tokens=rules.max_tokens,
        max_model_len=longest, enable_chunked_prefill=True, is_encoder_decoder=False,
        async_scheduling=rules.ahead,
    )  # fmt: skip
    memory = config.CacheConfig(
        block_size=rules.block_tokens, enable_prefix_caching=rules.prefix_caching
    )
    memory.num_gpu_blocks = blocks
    model = config.ModelConfig(
        model=folder, dtype="float16", skip_tokenizer_init=True, max_model_len=longest
    )
    whole = config.VllmConfig(
        scheduler_config=scheduler,
        model_config=model,
        cache_config=memory,
        device_config=config.DeviceConfig("cpu"),
    )
    layer = cache.FullAttentionSpec(
        block_size=rules.block_tokens,
        num_kv_heads=1,
        head_size=1,
        dtype=import_module("torch").float32,
    )
    kind = "AsyncScheduler" if rules.ahead else "Scheduler"
    made = import_module(f"vllm.v1.core.sched.{'async_' if rules.ahead else ''}scheduler")
    structured = import_module("vllm.v1.structured_output").StructuredOutputManager(whole)
    groups = [cache.KVCacheGroupSpec(["layer"], layer)]
    return getattr(made, kind)(
        vllm_config=whole,
        kv_cache_config=cache.KVCacheConfig(blocks, [], groups),
        structured_output_manager=structured,
        block_size=rules.block_tokens,
    )


class VllmRun:
    """vLLM's scheduler on a trace, each pass of which takes the time that kvsim gives it."""

    def __init__(self, scheduler: Any, requests: Requests, costs: StepCosts) -> None:
        self.scheduler, self.requests, self.costs = scheduler, requests, costs
        self.first, self.last = (np.full(len(requests), np.nan) for _ in range(2))
        self.arrival, self.made = requests.arrival.copy(), np.zeros(len(requests), int)
        self.said = dict[int, list[int]]()
        self.turn, self.after = find_repeated(requests)

    def words(self, i: int) -> list[int]:
        """Token ids of a prompt: the same where prefix blocks are, else in no other prompt."""
        if i in self.said:
            return self.said[i]
        r, found = self.requests, list[int]()
        if r.block_ids is not None and r.block_start is not None:
            for block in r.block_ids[r.block_start[i] : r.block_start[i + 1]].tolist():
                found += range(block * r.block_tokens, (block + 1) * r.block_tokens)
        missing = max(int(r.prompt[i]) - len(found), 0)
        unique = [(i + 2) * 2**32 + k for k in range(missing)]
        self.said[i] = found[: int(r.prompt[i])] + unique
        return self.said[i]

    def answer(self, i: int, made: int) -> int:
        """Token id that a request makes: what the next turn of its conversation repeats."""
        after = self.after[self.turn == i]
        return self.words(int(after[0]))[int(self.requests.prompt[i]) + made] if after.size else 0

    def add(self, i: int, clock: float) -> None:
        """A request arrives."""
        hashing = import_module("vllm.v1.core.kv_cache_utils")
        sha256 = import_module("vllm.utils.hashing").sha256
        hasher = None
        if self.costs.rules.prefix_caching:
            hashing.init_none_hash(sha256)
            hasher = hashing.get_request_block_hasher(self.costs.rules.block_tokens, sha256)
        sampling = import_module("vllm.sampling_params").SamplingParams(
            max_tokens=int(self.requests.generate[i]), ignore_eos=True
        )
        made = import_module("vllm.v1.request").Request(
            request_id=str(i), prompt_token_ids=self.words(i), sampling_params=sampling,
            pooling_params=None, arrival_time=clock, block_hasher=hasher,
        )  # fmt: skip
        self.scheduler.add_request(made)

    def schedule(self) -> tuple[Any, dict[str, list[int]], float]:
        """One pass: what vLLM says of it, the tokens it yields and its time. [s]"""
        said = self.scheduler.schedule()
        cached, chunks, ends, yields = list[int](), list[tuple[int, int]](), list[bool](), {}
        for name, count in said.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            start, known = request.num_computed_tokens - count, request.num_tokens
            if self.costs.rules.ahead:
                unread = request.is_prefill_chunk
            else:
                unread = request.num_computed_tokens < known
            yields[name] = [] if unread else [self.answer(int(name), self.made[int(name)])]
            self.made[int(name)] += not unread
            if count == 1 and not unread and start >= request.num_prompt_tokens:
                cached.append(start)
            else:
                chunks.append((count, start))
                ends.append(not unread)
        took = pass_seconds(self.costs.tables, cached, chunks, np.array(ends, bool))
        return said, yields, took

    def finish(self, said: Any, yields: dict[str, list[int]], clock: float) -> int:
        """A pass ends; how many requests are done."""
        output = import_module("vllm.v1.outputs").ModelRunnerOutput(
            req_ids=list(yields), req_id_to_index={name: i for i, name in enumerate(yields)},
            sampled_token_ids=list(yields.values()), logprobs=None, prompt_logprobs_dict={},
            pooler_output=[],
        )  # fmt: skip
        done = 0
        for outputs in self.scheduler.update_from_output(said, output).values():
            for one in outputs.outputs:
                i = int(one.request_id)
                if one.new_token_ids and np.isnan(self.first[i]):
                    self.first[i] = clock
                if one.finish_reason is not None:
                    self.last[i] = clock
                    done += 1
        return done

    def next_turns(self, yields: dict[str, list[int]], clock: float) -> list[int]:
        """Turns whose conversations go on after those that a pass has finished."""
        r = self.requests
        done = [int(name) for name in yields if self.last[int(name)] == clock]
        if r.parent is None or not done:
            return []
        found = np.flatnonzero(np.isin(r.parent, done))
        think = 0.0 if r.think is None else r.think[found]
        self.arrival[found] = np.maximum(self.arrival[found], clock + think)
        return found.tolist()

    def play(self) -> None:
        """Play until all requests are done; with asynchronous scheduling as vLLM's core does."""
        clock, done, coming = 0.0, 0, list[tuple[float, int]]()
        parent = self.requests.parent
        alone = range(len(self.arrival)) if parent is None else np.flatnonzero(parent < 0).tolist()
        for i in alone:
            heappush(coming, (float(self.arrival[i]), i))
        ahead, under_way = self.costs.rules.ahead, list[tuple[Any, dict[str, list[int]], float]]()
        while done < len(self.arrival):
            while coming and coming[0][0] <= clock:
                self.add(heappop(coming)[1], clock)
            if not self.scheduler.requests and not under_way:
                clock = max(clock, coming[0][0])
                continue
            if self.scheduler.requests:
                said, yields, took = self.schedule()
                if yields or not ahead:
                    under_way.append((said, yields, took if under_way else clock + took))
            if under_way and (not ahead or len(under_way) == QUEUE or not yields):
                said, yields, clock = under_way.pop(0)
                done += self.finish(said, yields, clock)
                for i in self.next_turns(yields, clock):
                    heappush(coming, (float(self.arrival[i]), i))
                under_way = [(said, y, clock + took) for said, y, took in under_way]


def compare(folder: str, source: str, count: int, rate: float, gpu: str, settings: Any) -> None:
    """Print how many requests have the same times."""
    if source == TALKS:
        lengths = parse_lengths("lognormal:prompt=1000,generate=120")
        found = DrawnTraffic(lengths, rate=2.0, turns=5, think=10.0, hours=0.1).draw(1)
        found = found.head(count)
    else:
        found = load(source).requests.head(count).scaled(rate)
    where = Deployment(load_model("llama3.1-8b"), load_hardware(gpu), load_stack("vllm"))
    for ahead in (False, True):
        rules = replace(Rules(**settings).scale_to(where), ahead=ahead)
        longest = int((found.prompt + found.generate).max())
        costs = StepCosts(parse("full"), where, rules, longest, int(found.prompt.max()))
        blocks = rules.blocks or int(costs.capacity // costs.room.block_bytes)
        run = VllmRun(make_scheduler(folder, rules, blocks + 1), found, costs)
        run.play()
        own = simulate(found, costs, 1).progress
        same = np.abs((own["first"] - own["arrival"]) / (run.first - run.arrival) - 1) < 1e-6
        same &= np.abs((own["last"] - own["arrival"]) / (run.last - run.arrival) - 1) < 1e-6
        waits = (own["first"] - own["arrival"]).mean() / (run.first - run.arrival).mean()
        print(
            f"{source} {count} x{rate:g} {gpu} {settings} {'ahead' if ahead else 'synchronous'}: "
            f"{100 * same.mean():.1f} % equal, mean TTFT {waits:.4f} of vLLM's, "
            f"{int(own['preempted'].sum())} preempted",
            flush=True,
        )


if __name__ == "__main__":
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    folder, *traces = sys.argv[1:]
    own = [(x, 1000, rate, "h100", settings) for x in traces for rate, settings in OWN_TRACE]
    for case in (*CASES, *own):
        compare(folder, *case)

"""Every option once: its name, unit, range, default, help, commands, and what it goes with.

The command line's options, the keywords of ``kvsim.api``, the table in docs/limits.md, and the
command line that gives the same answer as a call from Python all come from ``TABLE``.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, TypeVar

from kvsim.console import on_command_line
from kvsim.errors import InfeasibleError, InputError
from kvsim.inputs import (
    Parser,
    Range,
    auto_or,
    count_or,
    duration,
    format_plain,
    parse_amount,
    parse_count,
    parse_counts,
    parse_flag,
    parse_joined,
    parse_model,
    parse_names,
    parse_number,
    parse_path,
    parse_paths,
    parse_per_gpu,
    parse_rate,
    parse_text,
    parse_token_counts,
    parse_token_lengths,
    parse_tokens,
    parse_total_or_per_gpu,
    parse_words,
    scaled_number,
    several,
    words_among,
    zero_or,
)
from kvsim.machines.hardware import DEFAULT_STACK, GIB, RELEASED

ENGINE_SHARE = 0.9
"""Share of GPU memory that serving engines use unless told otherwise."""

HOST_SHARE = 0.85
"""Share of host memory that plans fill: the rest is the system's, and what a process needs."""

MAX_ROWS = 5_000
"""Rows that one command prints; `kvsim sweep` takes more."""

MAX_RUN = 1_000_000
"""Sequences or tokens of a run on this machine."""

TP_CHOICES = ("1", "2", "4", "8", "16", "32")
"""Tensor-parallel GPUs that are compared."""

SERVING = "simulate capacity"
PLANNED = "plan capacity"
DEPLOYED = "predict grid plan simulate capacity explore"
HOSTED = "predict plan simulate explore"
STORED = "predict grid plan simulate"
VALIDATED = "validate|validate quality|validate layers|validate plan"
TRACES_READ = "simulate|traces inspect|traces convert"

DRIVES = {"capacity": "nvme_cache", "simulate": "nvme_cache disk"} | dict.fromkeys(
    ("predict", "grid", "plan"), "disk"
)
"""What has a drive, whose rates may be given."""

READ = {"simulate": "trace"}
TRACE_INSTEAD = dict.fromkeys(("plan", "simulate", "capacity"), "trace")
"""What a trace says by itself."""

DRAWN_INSTEAD = {**TRACE_INSTEAD, "plan": "trace offline"}
"""What only drawn requests have."""

parse_gib = scaled_number(GIB)
parse_gigabytes = scaled_number(1e9)


@dataclass(frozen=True, slots=True)
class CommandOption:
    """An option of some commands.

    Attributes
    ----------
    name
        The keyword in Python; the command line has hyphens for underscores.
    parse
        Turns what was given into the value meant.
    metavar, help
        What stands for the value in the help, and what the option is for.
    commands
        Commands that take it, separated by blanks, or by | where a name has two words.
    default
        The value if none is given, as a user would give it; None for none.
    range
        What a number may be.
    also
        Other spellings on the command line.
    required
        Whether the command line insists on it.
    position
        Whether it is an argument without a name on the command line.
    repeated
        Whether it may be given several times.
    hidden
        Whether the help leaves it out: an older spelling that goes on.
    needs
        By command, options of which one must be given for this one to do anything.
    excludes
        By command, options that this one does not go with.
    at
        By command, what differs there.
    """

    name: str
    parse: Parser
    metavar: str
    help: str
    commands: str
    default: object = None
    range: Range | None = None
    also: tuple[str, ...] = ()
    required: bool = False
    position: bool = False
    repeated: bool = False
    hidden: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)
    excludes: Mapping[str, str] = field(default_factory=dict)
    at: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """As it is typed, and as errors name it."""
        return self.name if self.position else f"--{self.name.replace('_', '-')}"

    @property
    def taken_by(self) -> list[str]:
        """The commands that take it."""
        return self.commands.split("|") if "|" in self.commands else self.commands.split()

    def value(self, given: object) -> Any:
        """Parse what was given for the option.

        Parameters
        ----------
        given
            A Python value, or its text as on the command line.

        Returns
        -------
        object
            The value meant, in the unit of the option's range.

        Raises
        ------
        InputError
            If it cannot be parsed, or is out of range.
        """
        return self.parse(self.flag, given, self.range)


Opt = CommandOption  # short, as the table has it on every row


def real(least: float, most: float, unit: str = "") -> Range:
    """Build a range of numbers that need not be whole.

    Parameters
    ----------
    least, most
        The smallest and the largest number allowed.
    unit
        Their unit, for messages.

    Returns
    -------
    Range
        The range.
    """
    return Range(least, most, unit, whole=False)


SEVERAL_COUNTS = {
    name: {"parse": parse_counts, "metavar": "N,..."} for name in ("plan", "capacity")
}
"""Where degrees of parallelism are compared."""

TABLE: Mapping[str, tuple[CommandOption, ...]] = {
    "Arguments": (
        Opt("name", parse_text, "[NAME]", "Show one entry in full, with its sources.",
               "models gpus techniques stacks", default="", position=True),
        Opt("spec", parse_path, "SPEC.toml", "The grid to compute.", "sweep", required=True,
               position=True),
        Opt("source", parse_text, "[PAPER|FILE.csv]",
               "The tables of a paper, or a file of your own.",
               "reproduce", default="all", position=True),
        Opt("file", parse_text, "FILE",
               "A trace, which may be compressed (gz, zst), or sample:NAME.",
               "doctor|traces inspect|traces convert|validate plan", required=True, position=True,
               at={"doctor": {"help": "A hardware profile, stack, config.json, trace, or table of "
                                      "measured rows."},
                   "validate plan": {"help": "The output of `kvsim plan --json`."}}),
        Opt("files", parse_paths, "FILE...", "Files of metrics, spans or logs.", "traces import|",
               required=True, position=True, repeated=True),
        Opt("target", parse_path, "OUT.parquet", "The file to write.",
               "traces convert|traces generate", required=True, position=True,
               at={"traces generate": {
                   "metavar": "OUT",
                   "help": "A .parquet, .csv, .jsonl or .jsonl.gz file."}}),
    ),
    "Deployment": (
        Opt("device", parse_text, "DEVICE", "cpu, cuda or cuda:N.", f"{VALIDATED}|calibrate",
               default="cpu", excludes={"calibrate": "from_run"},
               at={"calibrate": {"default": None,
                                 "help": "Measure this device: cpu, cuda or cuda:N."}}),
        Opt("model", parse_model, "NAME|PATH",
               "A Hugging Face id, an Ollama tag, a name of `kvsim models`, or a config.json.",
               f"{'|'.join(DEPLOYED.split())}|{VALIDATED}|calibrate", required=True,
               needs={"calibrate": "from_run"},
               at={"validate": {"required": False, "parse": parse_text,
                                "help": "A name of `kvsim models` (random weights), a folder, or a "
                                        "GGUF file; smollm2-135m by default."},
                   "validate quality": {"required": False, "default": "smollm2-135m",
                                        "parse": parse_text,
                                        "help": "A folder or GGUF file with weights."},
                   "validate layers": {"required": False, "default": "smollm2-135m",
                                       "parse": parse_text,
                                       "help": "A folder or GGUF file with weights."},
                   "validate plan": {"required": False, "parse": parse_text,
                                     "help": "A folder or GGUF file; by default the plan's model."},
                   "calibrate": {"required": False, "help": "With --from-run: the served model."}}),
        Opt("gpu", parse_text, "NAME|PATH",
               "A common name (see `kvsim gpus`), or a profile file.",
               f"predict|grid|plan|simulate|explore|{VALIDATED}|calibrate", required=True,
               needs={"calibrate": "from_run from_ops"},
               at={"plan": {"parse": parse_names, "metavar": "NAME|PATH,..", "also": ("--gpus",),
                            "help": "One or more GPUs (see `kvsim gpus`), or profile files."},
                   **{name: {"required": False, "default": "a6000"}
                      for name in VALIDATED.split("|")},
                   "calibrate": {"required": False,
                                 "help": "With --from-run or --from-ops: the GPU used."}}),
        Opt("gpus", parse_words, "NAME,...", "GPUs to consider.", "capacity",
               required=True, also=("--gpu",)),
        Opt("stack", parse_text, "NAME|PATH",
               "Software stack: a name of `kvsim stacks`, or a TOML file.",
               f"{DEPLOYED} reproduce calibrate", default=DEFAULT_STACK,
               needs={"reproduce": "fit", "calibrate": "from_run from_ops from_serving"},
               at={"reproduce": {"default": "fused"},
                   "calibrate": {"default": None, "help": "Stack to start from: the engine's if "
                                                          "there "
                                                          "is one, else vllm."}}),
        Opt("tp", parse_count, "N",
               "Tensor-parallel GPUs: 1, 2, 4 or 8; 16 or 32 over several machines.",
               f"{DEPLOYED} calibrate", default=1, needs={"calibrate": "from_run"},
               at={"plan": {"parse": words_among(*TP_CHOICES, "auto"), "metavar": "N,..|auto",
                            "help": "Tensor-parallel GPUs, 1 to 32; several are compared."},
                   "capacity": {"parse": parse_counts, "metavar": "N,...", "default": "1,2,4,8",
                                "help": "GPUs per replica to consider."}}),
        Opt("pp", parse_count, "N", "Pipeline-parallel stages.",
               "predict plan simulate capacity", default=1, at=SEVERAL_COUNTS),
        Opt("dp", parse_count, "N", "Data-parallel copies of attention that share the experts.",
               "predict plan simulate capacity", default=1, at=SEVERAL_COUNTS),
        Opt("ep", parse_count, "N", "Expert-parallel groups, up to --tp times --dp.",
               "predict plan simulate capacity", default=1, at=SEVERAL_COUNTS),
        Opt("total_gpus", parse_count, "N",
               "Compare all layouts over N GPUs (also --gpus N).", "plan",
               range=Range(1, 1024, "GPUs"), excludes={"plan": "offline tp pp dp ep"}),
        Opt("nodes", parse_count, "M", "Number of machines that hold the GPUs.",
               "plan", range=Range(1, 1024, "machines"), needs={"plan": "total_gpus"}),
        Opt("weights", parse_text, "FORMAT",
               "fp16, fp8, fp8-dynamic, fp8-block, int8, int4, int4-g32, awq, mxfp4, nvfp4, a GGUF "
               "type such as q4_k_m, or released: the format of the published checkpoint.",
               f"{DEPLOYED} calibrate", default=RELEASED, needs={"calibrate": "from_run"},
               at={"plan": {"parse": parse_words, "metavar": "F,..|auto",
                            "help": "One or more formats, as in `predict`."},
                   "capacity": {"parse": parse_words}}),
    ),
    "Workload": (
        Opt("trace", parse_text, "FILE", "A request trace or sample:NAME. Without one, give "
               "--prompt, --generate and --rate.", "plan simulate capacity",
               at={"plan": {"help": "Plan for a request trace, or sample:NAME."}}),
        Opt("technique", parse_joined, "SPEC,...",
               "NAME or NAME:KEY=VALUE,...; several may be given.",
               "predict|grid|simulate|explore|calibrate|validate|validate quality", default="full",
               repeated=True, also=("--techniques",), needs={"calibrate": "from_run"},
               excludes={"simulate": "compare", "validate": "plan per_layer"},
               at={"simulate": {"metavar": "SPEC", "help": "NAME or NAME:KEY=VALUE,...",
                                "repeated": False},
                   "predict": {"also": ("--techniques", "--compare"),
                               "help": "NAME or NAME:KEY=VALUE,...; several may be given; all "
                                       "compares those that engines run."},
                   "explore": {"default": "", "repeated": False,
                               "help": "Techniques to compare; by default all that can run."},
                   "calibrate": {"metavar": "SPEC", "help": "The technique used in the run.",
                                 "repeated": False},
                   **{name: {"metavar": "SPEC", "default": "",
                             "help": "NAME:KEY=VALUE,... + ...; may be repeated; all by default."}
                      for name in ("validate", "validate quality")}}),
        Opt("compare", parse_joined, "SPEC,...",
               "Compare several techniques, such as full,kivi:bits=4,kvpr.", "simulate"),
        Opt("batch", parse_counts, "N,...", "Batch sizes, such as 1,8.",
               f"predict|grid|plan|{VALIDATED}", default=1, range=Range(1, 10**6, "sequences"),
               excludes={"plan": "trace"},
               at={"grid": {"default": "1,2,4,8,16,32,64"},
                   "plan": {"parse": auto_or(parse_count), "metavar": "N|auto", "default": None,
                            "help": "Batch size; chosen automatically by default."},
                   "validate": {"parse": parse_count, "metavar": "N", "default": None,
                                "help": "Number of sequences; 2 by default."},
                   "validate plan": {"parse": parse_count, "metavar": "N", "default": None,
                                     "help": "Number of sequences; by default the plan's."},
                   **{name: {"parse": parse_count, "metavar": "N", "default": 8,
                             "help": "Number of text windows."}
                      for name in ("validate quality", "validate layers")}}),
        Opt("concurrency", parse_counts, "N,...",
               "Instead of --batch: clients that each send requests back to back, such as 1,64.",
               "predict", range=Range(1, 10**4, "clients"), excludes={"predict": "batch"}),
        Opt("prompt", parse_token_counts, "N,...",
               "Prompt tokens, such as 2048,4k (4k is 4,000, 4K is 4,096).",
               f"predict|grid|plan|simulate|capacity|{VALIDATED}",
               default=2048, range=Range(1, 10**7, "tokens"), excludes=TRACE_INSTEAD,
               at={**{name: {"parse": parse_token_lengths, "metavar": "LENGTH", "default": None,
                             "help": "Prompt tokens without a trace: a mean (3k), a range (1k-5k), "
                                     "median/p95 (2k/6k) or sample:NAME."}
                      for name in SERVING.split()},
                   "grid": {"default": "1024,2048,4096,8192,16384,32768"},
                   "plan": {"parse": parse_token_lengths, "metavar": "LENGTH", "default": 2048,
                            "help": "Prompt tokens: a mean (3k), a range (1k-5k), median/p95 "
                                    "(2k/6k) or sample:NAME."},
                   "validate": {"parse": parse_count, "metavar": "N", "default": None,
                                "range": Range(1, MAX_RUN, "tokens"),
                                "help": "Prompt tokens per sequence; 96 by default."},
                   "validate plan": {"parse": parse_count, "metavar": "N", "default": None,
                                     "range": Range(1, MAX_RUN, "tokens"),
                                     "help": "Prompt tokens per sequence; by default the plan's."},
                   "validate quality": {"parse": parse_count, "metavar": "N", "default": 1024,
                                        "range": Range(1, MAX_RUN, "tokens"),
                                        "help": "Prompt tokens of each window."},
                   "validate layers": {"parse": parse_count, "metavar": "N", "default": 256,
                                       "range": Range(1, MAX_RUN, "tokens"),
                                       "help": "Prompt tokens of each window."}}),
        Opt("generate", parse_token_counts, "N,...", "Tokens to generate.",
               f"predict|grid|plan|simulate|capacity|explore|{VALIDATED}", default=128,
               range=Range(1, 10**7, "tokens"), excludes=TRACE_INSTEAD,
               at={**{name: {"parse": parse_token_lengths, "metavar": "LENGTH", "default": None,
                             "help": "Tokens to generate, in the same forms."}
                      for name in SERVING.split()},
                   "grid": {"parse": parse_tokens, "metavar": "N"},
                   "plan": {"parse": parse_token_lengths, "metavar": "LENGTH",
                            "help": "Tokens to generate, in the same forms."},
                   "explore": {"parse": parse_tokens, "metavar": "N"},
                   "validate": {"parse": parse_count, "metavar": "N", "default": None,
                                "range": Range(1, MAX_RUN, "tokens"),
                                "help": "Tokens to generate; 16 by default."},
                   "validate plan": {"parse": parse_count, "metavar": "N", "default": None,
                                     "range": Range(1, MAX_RUN, "tokens"),
                                     "help": "Tokens to generate; by default the plan's."},
                   "validate quality": {"parse": parse_count, "metavar": "N", "default": 64,
                                        "range": Range(1, MAX_RUN, "tokens"),
                                        "help": "Scored tokens of each window."},
                   "validate layers": {"parse": parse_count, "metavar": "N", "default": 16,
                                       "range": Range(1, MAX_RUN, "tokens"),
                                       "help": "Scored tokens of each window."}}),
        Opt("lengths", parse_text, "SPEC",
               "lognormal:prompt=1024,generate=160 or empirical:FILE.",
               "traces generate|traces import|plan|simulate|capacity",
               excludes=DRAWN_INSTEAD,
               at={**{name: {"metavar": "equal", "help": "Give all requests the mean lengths."}
                      for name in ("plan", *SERVING.split())},
                   "traces import": {"help": "Lengths for access logs: lognormal:prompt=1024,"
                                             "generate=160."}}),
        Opt("offline", parse_flag, "",
               "Plan a single offline batch, without TTFT and TPOT targets.",
               "plan", default=False, excludes={"plan": "trace"}),
        Opt("jobs", parse_amount, "N",
               "Also print the hours and the price for N requests, such as 1M.",
               "plan", range=Range(1, 10**9, "requests"), needs={"plan": "offline"}),
        Opt("rate", parse_rate, "X", "Factor on the trace's rate, such as 4x (see --scale).",
               "plan|simulate|capacity|traces generate",
               range=real(1e-6, 1e6, "requests/s, or a factor"), needs={"plan": "trace"},
               at={"simulate": {"parse": several(parse_rate), "metavar": "R,..",
                                "help": "Requests per second; with a trace, a factor such as "
                                        "0.25x (see --scale). Several values are compared."},
                   "capacity": {"parse": parse_rate, "metavar": "R", "also": ("--req-s",),
                                "help": "Requests per second; with a trace, a factor such as "
                                        "0.25x (see --scale)."},
                   "traces generate": {"parse": parse_number, "metavar": "PER_S",
                                       "help": "Mean requests per second; with --like, by "
                                               "default the trace's."}}),
        Opt("req_s", several(parse_number), "R,..",
               "Requests per second; several are compared. A short trace is repeated for two "
               "minutes.",
               "simulate", excludes={"simulate": "rate"}),
        Opt("scale", parse_text, "clients|clock",
               "Multiply, by a trace's --rate 2x, its clients over the same time or its clock.",
               f"plan {SERVING}", default="clients",
               needs={"plan": "rate"} | dict.fromkeys(SERVING.split(), "trace")),
        Opt("users", parse_count, "N",
               "Clients that each wait for an answer, think, and send the next request.",
               SERVING, range=Range(1, 10**6, "users"),
               excludes=dict.fromkeys(SERVING.split(), "rate trace")),
        Opt("think", zero_or(duration(1e4)), "TIME", "Time between an answer and the next request.",
               SERVING, range=real(1e-3, 1e6, "s"),
               excludes=TRACE_INSTEAD),
        Opt("burst", parse_number, "CV",
               "Coefficient of variation of interarrival times; 1 is Poisson.",
               f"plan {SERVING}", range=real(0.01, 100),
               excludes=DRAWN_INSTEAD),
        Opt("hours", parse_number, "H",
               "Duration of the traffic; by default 10 min or 3,000 requests.",
               SERVING, range=real(1e-3, 1000, "h"),
               excludes=TRACE_INSTEAD),
        Opt("cached", parse_tokens, "N", "Tokens of a prefix shared by all prompts.",
               f"plan {SERVING}", range=Range(16, 10**7, "tokens"), excludes=DRAWN_INSTEAD),
        Opt("hit_rate", parse_number, "X", "Share of prompt tokens found in the prefix cache.",
               f"plan {SERVING}", range=real(0.01, 0.99), excludes=DRAWN_INSTEAD),
        Opt("turns", parse_count, "N",
               "Turns of a conversation; each prompt repeats the earlier ones.",
               f"plan {SERVING}", range=Range(2, 1000, "turns"), excludes=DRAWN_INSTEAD),
        Opt("per_class", parse_flag, "",
               "Also plan each third of the requests, by prompt length, on its own.", "plan",
               default=False, needs={"plan": "trace"}),
        Opt("replicas", several(parse_count), "N,..",
               "Replicas of the model; several values are compared.", "simulate", default=1,
               range=Range(1, 10**4, "replicas")),
        Opt("find", parse_text, "WHAT",
               "Find the limit within --ttft and --tpot: the highest rate, the fewest replicas, "
               "the lowest hit-rate, the smallest host-cache or the best prefill-replicas; with "
               "capacity, the rate, hit-rate or host-cache for fleets within --max-gpus.", SERVING,
               excludes={"simulate": "compare out"},
               needs={"capacity": "max_gpus max_power max_host"}),
        Opt("route", parse_text, "HOW",
               "round-robin, least-loaded, prefix-aware or cache-and-load; by default least-loaded,"
               " or cache-and-load where prefixes are kept.", SERVING),
        Opt("prefill_replicas", parse_count, "N",
               "Number of --replicas that run prefill; the others decode.", "simulate",
               range=Range(1, 10**4, "replicas")),
        Opt("transfer", parse_text, "HOW",
               "Send KV caches to decode replicas layer by layer or whole.", "simulate",
               needs={"simulate": "prefill_replicas"}),
        Opt("layers", parse_count, "N", "Use only the first N layers; 0 for all.", "validate",
               default=0, range=Range(0, 1000, "layers"), excludes={"validate": "plan quality"}),
        Opt("points", parse_text, "all|few", "With a measured --gpu: points to time.",
               "validate", default="all", excludes={"validate": "plan quality"}),
        Opt("acceptance", parse_text, "X|X@N|FILE",
               "Share of accepted drafts, optionally at N drafts per round, or a file.", "plan "
               "simulate capacity",
               at={"simulate": {"parse": parse_path, "metavar": "F.json",
                                "help": "Acceptance of drafts from an attention trace."}}),
        Opt("draft_model", parse_text, "METHOD=NAME",
               "A head of your own that drafts, such as eagle3=PATH; by default the published one.",
               "predict plan capacity"),
        Opt("draw_acceptance", parse_count, "SEED",
               "Draw the accepted tokens of each round instead of using their mean.", "simulate",
               range=Range(0, 2**63 - 1, "seed")),
        Opt("abort_after", duration(1e4), "TIME", "Clients hang up this long after arrival.",
               "simulate", range=real(1e-3, 1e9, "s")),
    ),
    "Trace generation": (
        Opt("like", parse_text, "FILE", "Fit all distributions to this trace.", "traces generate|"),
        Opt("arrivals", parse_text, "SPEC",
               "poisson, gamma:cv=2, onoff:on=10,off=30 or diurnal.", "traces generate|"),
        Opt("kind", parse_text, "KIND", "prometheus, otel or access; detected by default.",
               "traces import|"),
        Opt("every", duration(1e6), "TIME",
               "Interval between several texts of /metrics, such as 60s.",
               "traces import|"),
        Opt("prefixes", parse_text, "SPEC", "reuse:share=0.7,depth=0.5; none by default.",
               "traces generate|"),
        Opt("requests", parse_count, "N", "Number of requests.", "traces generate|",
               range=Range(1, 10**8, "requests")),
        Opt("duration", parse_number, "SECONDS",
               "Duration of the trace; with --like, by default that of the original.",
               "traces generate|", range=real(1e-3, 3.2e8, "s"),
               excludes={"traces generate": "requests"}),
        Opt("seed", parse_count, "N", "Random seed.",
               "traces generate|traces import", default=0, range=Range(0, 2**63 - 1)),
    ),
    "Targets and limits": (
        Opt("objective", parse_text, "WHAT", "Maximise throughput, or minimise latency or cost.",
               "plan", default="throughput"),
        Opt("ttft", duration(100), "TIME",
               "Target for the time to first token, such as 500ms, or none; 2s by default.",
               "plan simulate capacity", range=real(1e-6, 1e6, "s"),
               at={"simulate": {"help": "Target for the time to first token, such as 2s."}}),
        Opt("tpot", duration(5), "TIME",
               "Target for the time per output token, such as 50ms, or none; 100ms by default.",
               "plan simulate capacity", range=real(1e-6, 1e6, "s"),
               at={"simulate": {"help": "Target for the time per output token."}}),
        Opt("percentile", parse_number, "P", "Share of requests that must meet both targets [%].",
               "capacity plan simulate", default=90, range=real(50, 99.99, "%"),
               needs={"simulate": "ttft tpot"}, excludes={"plan": "offline"}),
        Opt("sure", parse_number, "X",
               "Required probability of meeting the targets, given the error of predictions.",
               "plan capacity", default=0.9, range=real(0.5, 0.99), excludes={"plan": "offline"},
               at={"capacity": {"range": real(0.01, 0.99), "parse": zero_or(parse_number),
                                "help": "Required probability of meeting the targets, given other "
                                        "days and prediction errors; 0 for this trace only."}}),
        Opt("class_targets", parse_text, "N=TTFT/TPOT,..",
               "Separate targets for prompts above N tokens, such as 8000=10s/200ms.", "capacity"),
        Opt("gpu_memory", parse_gib, "GIB", "GPU memory to use; by default 90 %.",
               "plan simulate", range=real(1e-3, 1e6, "GiB")),
        Opt("gpu_memory_utilization", parse_number, "X",
               "Share of GPU memory to use; 0.9 by default.",
               f"plan {SERVING}", range=real(0.01, 1),
               excludes={"simulate": "gpu_memory", "plan": "gpu_memory"},
               at={"capacity": {"default": ENGINE_SHARE,
                                "help": "Share of GPU memory to use."}}),
        Opt("host", parse_text, "NAME|PATH",
               "Host: desktop-ddr4, desktop-ddr5, threadripper, epyc, epyc-2s, apple-m2-ultra, or "
               "a TOML file.", f"{DEPLOYED}"),
        Opt("host_bandwidth", parse_gigabytes, "GB/S",
               "Host memory bandwidth; by default the profile's.", DEPLOYED,
               range=real(0.1, 1e5, "GB/s")),
        Opt("allreduce_bandwidth", parse_gigabytes, "GB/S",
               "All-reduce bandwidth between the GPUs (busbw of nccl-tests); by default the "
               "profile's.", DEPLOYED, range=real(0.1, 1e5, "GB/s"),
               needs=dict.fromkeys(("predict", "simulate"), "tp ep")),
        Opt("n_cpu_moe", count_or("all", "auto"), "N|all|auto",
               "Keep the routed experts of the first N layers in host memory; auto for as few as "
               "fit.",
               HOSTED, range=Range(0, 1000, "layers"),
               at={name: {"parse": count_or("all"), "metavar": "N|all",
                          "help": "Keep the routed experts of the first N layers in host memory."}
                   for name in ("simulate", "explore")}),
        Opt("n_gpu_layers", parse_count, "N",
               "Keep the last N layers on the GPU; the CPU computes the others.",
               HOSTED, range=Range(0, 1000, "layers")),
        Opt("override_tensor", parse_text, "REGEX=CPU,...",
               "Keep matching GGUF tensors in host memory, such as exps=CPU.", HOSTED),
        Opt("ubatch_size", parse_count, "N",
               "Prompt tokens in one pass of llama.cpp, 512 by default; weights in host memory are "
               "copied once for each.", HOSTED, range=Range(32, 65536, "tokens")),
        Opt("host_weights", words_among("auto", "cpu", "streamed"), "HOW",
               "Weights in host memory: cpu (computed there), streamed to the GPU, or auto "
               "(streamed in large passes, if the engine does so).", HOSTED, default="auto",
               needs=dict.fromkeys(HOSTED.split(), "n_cpu_moe n_gpu_layers override_tensor")),
        Opt("host_memory_utilization", parse_number, "X",
               "Share of host memory to use; 0.85 by default.", "plan", range=real(0.01, 1)),
        Opt("host_memory", parse_gib, "GIB", "Host memory; by default the profile's.",
               DEPLOYED, range=real(1e-3, 1e6, "GiB")),
        Opt("disk", parse_gigabytes, "GB",
               "Space on an NVMe drive for weights and caches; by default the profile's, usually "
               "none.", STORED, range=real(1, 1e6, "GB"), needs={"plan": "offline"}),
    ),
    "Techniques": (
        Opt("only", parse_words, "A,B", "Consider only these techniques.", PLANNED),
        Opt("without", parse_words, "A,B", "Exclude these techniques.", PLANNED),
        Opt("research", parse_flag, "", "Also consider techniques that no engine runs yet.", "plan",
               default=False, excludes={"plan": "offline engine"}),
        Opt("engine", parse_text, "NAME", "Consider only what this engine runs, with its times.",
               f"{PLANNED} calibrate", needs={"calibrate": "from_ops from_serving"},
               at={"calibrate": {"help": "Use the rows of this engine."}}),
        Opt("lossy", parse_flag, "", "Also consider techniques with an unknown loss of quality.",
               PLANNED, default=False, excludes={"plan": "max_loss", "capacity": "max_loss"}),
        Opt("max_loss", parse_number, "0..1",
               "Allow a relative loss of quality up to this, if there is evidence.", PLANNED,
               range=real(0, 1)),
        Opt("quality", parse_names, "FILE,..",
               "Measurements of `kvsim validate quality` on your model.", PLANNED),
    ),
    "Fleet": (
        Opt("price", parse_per_gpu, "GPU=USD,...", "Price per GPU and hour.", "capacity"),
        Opt("seller", parse_text, "NAME|any",
               "Seller whose prices to use, or any for the cheapest of each GPU; by default one "
               "that offers all the GPUs, else any.", "capacity"),
        Opt("reserved", parse_per_gpu, "GPU=USD,...", "Reserved price per GPU and hour.",
               "capacity"),
        Opt("max_gpus", parse_total_or_per_gpu, "N|GPU=N,...",
               "Maximum number of GPUs, in total or per kind.",
               "capacity", range=Range(1, 10**6, "GPUs")),
        Opt("max_host", parse_gib, "GIB", "Maximum host memory for caches, in total.", "capacity",
               range=real(1e-3, 1e9, "GiB")),
        Opt("max_power", scaled_number(1e3), "KW", "Maximum rated power of all GPUs.", "capacity",
               range=real(1e-3, 1e6, "kW")),
        Opt("watts", parse_per_gpu, "GPU=W,...",
               "Rated power per GPU; by default the profile's.", "capacity"),
        Opt("configurations", parse_count, "N", "Maximum number of different kinds of replica.",
               "capacity", range=Range(1, 100, "kinds of replica")),
        Opt("headroom", parse_number, "X",
               "Additional share of the load that must be served.", "capacity", default=0,
               range=real(0, 1)),
        Opt("failures", parse_count, "K",
               "Replicas that may be lost without missing a target.", "capacity", default=0,
               range=Range(0, 3, "replicas")),
        Opt("schedule", parse_flag, "", "Start and stop replicas during the day.", "capacity",
               default=False),
        Opt("start_up", duration(float("inf")), "TIME", "Paid time before a replica serves.",
               "capacity", default="5min", needs={"capacity": "schedule"}),
        Opt("windows", parse_count, "N",
               "Number of time windows of the schedule.",
               "capacity", range=Range(1, 288)),
        Opt("pools", parse_text, "HOW",
               "Disaggregated prefill and decode: auto (with prefix blocks), yes, no.", "capacity",
               default="auto"),
        Opt("spread", parse_number, "X",
               "Spread of log(measured / predicted); by default the ledger's.", "capacity",
               range=real(1e-6, 10)),
    ),
    "Engine": (
        Opt("max_seqs", parse_count, "N", "Sequences in a pass at most.",
               "plan simulate capacity calibrate", default=256,
               range=Range(1, 2**16, "sequences"),
               needs={"calibrate": "from_run"}, excludes={"plan": "offline batch"},
               at={"calibrate": {"help": "The engine's limit on sequences per pass."},
                   **{name: {"default": None, "help": "Maximum sequences per pass; by default the "
                                                   "engine's for this GPU."}
                      for name in ("plan", "capacity")},
                   "simulate": {"default": None, "parse": several(parse_count), "metavar": "N,..",
                                "help": "Maximum sequences per pass; by default the engine's for "
                                        "this GPU. Several are compared."}}),
        Opt("max_tokens", parse_count, "N", "Maximum tokens per pass.",
               "plan simulate capacity calibrate", default=2048, range=Range(1, 10**7, "tokens"),
               needs={"calibrate": "from_run"}, excludes={"plan": "offline"},
               at={"calibrate": {"help": "The engine's limit on tokens per pass."},
                   "plan": {"default": None,
                            "help": "Maximum tokens per pass; by default several values are "
                                    "tried, the engine's first."},
                   "capacity": {"default": None,
                                "help": "Maximum tokens per pass; by default several values are "
                                        "tried, the engine's first."},
                   "simulate": {"default": None, "parse": several(parse_count), "metavar": "N,..",
                                "help": "Maximum tokens per pass; by default the engine's for this "
                                        "GPU. Several are compared."}}),
        Opt("max_model_len", parse_count, "N", "Longest request that the engine accepts; "
               "by default the model's context.", "plan simulate capacity",
               range=Range(1, 10**7, "tokens"), excludes={"plan": "offline"}),
        Opt("block_tokens", parse_count, "N", "Tokens per KV block.",
               "simulate|calibrate|traces inspect|traces convert", default=16,
               range=Range(1, 2**16, "tokens"), needs={"calibrate": "from_run"},
               at={name: {"default": None, "help": "Tokens per prefix hash block of the trace."}
                   for name in ("traces inspect", "traces convert")}),
        Opt("blocks", parse_count, "N", "Number of KV blocks that your engine printed; computed "
               "by default.", "simulate calibrate", default=0, range=Range(0, 10**9, "KV blocks"),
               needs={"calibrate": "from_run"}),
        Opt("prefill", parse_text, "HOW", "chunked, or whole for whole prompts.", "simulate",
               default="chunked"),
        Opt("priority", parse_text, "WHO", "What a pass runs first: decode or prefill.",
               "simulate", default="decode"),
        Opt("preemption", parse_text, "HOW",
               "What happens to preempted requests: recompute or swap.",
               "simulate", default="recompute"),
        Opt("admission", parse_text, "WHEN",
               "Free memory required to begin: prompt, chunk (its first) or request (prompt and "
               "answer; TensorRT-LLM's default).",
               "simulate"),
        Opt("prefix_caching", parse_flag, "", "Enable prefix caching.",
               "simulate calibrate", default=False, needs={"calibrate": "from_run"},
               at={"calibrate": {"help": "The engine had prefix caching enabled."}}),
    ),
    "Prefix caches": (
        Opt("host_cache", several(zero_or(parse_gib)), "GIB",
               "Host memory for prefix blocks and swapped sequences.", SERVING, range=real(1e-3,
               1e6, "GiB"),
               at={"capacity": {"parse": zero_or(parse_gib),
                                "help": "Host memory per GPU for prefix blocks; 0 for none."}}),
        Opt("nvme_cache", several(zero_or(parse_gib)), "GIB",
               "NVMe space of each replica for prefix blocks.", SERVING,
               range=real(1e-3, 1e8, "GiB"),
               at={"capacity": {"parse": parse_gib,
                                "help": "NVMe space per GPU for prefix blocks."}}),
        Opt("remote_cache", parse_gib, "GIB",
               "Remote store for prefix blocks, shared by all replicas.",
               "simulate", range=real(1e-3, 1e9, "GiB")),
        Opt("cache_ttl", duration(1e7), "TIME",
               "Drop stored blocks this long after their last use.", "simulate",
               range=real(1e-3, 1e9, "s")),
        Opt("cache_block", parse_count, "N", "Tokens that are stored and loaded as one block.",
               "simulate", range=Range(1, 10**6, "tokens")),
        Opt("prefix_load", several(parse_text), "HOW",
               "How to use stored blocks: load, recompute, faster (of both), split (recompute the "
               "first while the others are loaded), or auto, the default: the one with the "
               "shortest mean TTFT.", "simulate"),
        Opt("nvme_read", parse_gigabytes, "GB/S", "Read rate of each replica's drive.",
               f"{STORED} capacity", also=("--nvme-GBps",), range=real(1e-3, 1e3, "GB/s"),
               needs=DRIVES),
        Opt("nvme_write", parse_gigabytes, "GB/S", "Write rate of each replica's drive.",
               f"{STORED} capacity", range=real(1e-3, 1e3, "GB/s"), needs=DRIVES),
        Opt("nic", parse_gigabytes, "GB/S", "Network rate of each replica, per direction.", SERVING,
               range=real(1e-3, 1e3, "GB/s")),
    ),
    "Trace format": (
        Opt("format", parse_text, "NAME", "Format of the trace; detected by default.",
               TRACES_READ, default=None, needs=READ,
               excludes=dict.fromkeys(TRACES_READ.split("|"), "columns")),
        Opt("columns", parse_joined, "ROLE=NAME,...",
               "Columns of other files: arrival=..,prompt=..,generate=..,blocks=..", TRACES_READ,
               needs=READ),
        Opt("time_unit", parse_text, "UNIT", "Unit of arrival times: s, ms, us, ns or date.",
               TRACES_READ,
               needs=READ),
        Opt("hash_block_tokens", parse_count, "N", "Tokens per prefix hash block of the trace.",
               "simulate", range=Range(1, 10**6, "tokens"), needs=READ),
        Opt("chars_per_token", parse_number, "X",
               "Characters per token, for traces that contain text.",
               TRACES_READ, range=real(1e-2, 1e3, "characters"), needs=READ),
        Opt("sort", parse_flag, "", "Sort by arrival.", TRACES_READ, default=False, needs=READ),
        Opt("skip_bad", parse_flag, "", "Omit invalid rows, and count them.",
               TRACES_READ, default=False, needs=READ),
    ),
    "Measurements": (
        Opt("from_run", parse_path, "LOG", "Fit to the log of a run; see docs/logs.md.",
               "calibrate"),
        Opt("from_ops", parse_paths, "F.csv", "Fit to measured operators; may be repeated.",
               "calibrate", repeated=True),
        Opt("from_serving", parse_path, "F.csv", "Fit host times to load tests.", "calibrate"),
        Opt("from_bundle", parse_path, "F.tar.gz", "A bundle of `make.py gpu --bundle`.",
               "calibrate|validate",
               excludes={"calibrate": "device from_run from_ops from_serving",
                         "validate": "plan quality model layers technique gpu batch prompt "
                                     "generate max_error"}),
        Opt("version", parse_text, "V", "With --from-ops: engine version; by default the newest.",
               "calibrate", needs={"calibrate": "from_ops"}),
        Opt("hold_out", parse_number, "SHARE",
               "With --from-ops: share of shapes held out in turn; 0 for none.", "calibrate",
               default=0.25,
               range=real(0, 0.5), needs={"calibrate": "from_ops"}),
        Opt("fit_first", parse_count, "N", "Fit to the first N requests and check on the others.",
               "calibrate", default=100, range=Range(5, 10**8, "requests"),
               needs={"calibrate": "from_run"}),
        Opt("plan", parse_text, "FILE", "As `kvsim validate plan FILE`.", "validate",
               hidden=True),
        Opt("quality", parse_flag, "", "As `kvsim validate quality`.", "validate",
               default=False, hidden=True, excludes={"validate": "plan"}),
        Opt("per_layer", parse_flag, "", "As `kvsim validate layers`.", "validate",
               default=False, hidden=True, needs={"validate": "quality"},
               excludes={"validate": "plan"}),
        Opt("bits", parse_number, "X", "Also run the best plan with X bits on average.",
               "validate|validate layers", range=real(2, 4, "bits"),
               needs={"validate": "per_layer"}, excludes={"validate": "plan"},
               at={"validate": {"hidden": True}}),
        Opt("text", parse_text, "FILE",
               "Text on which to measure the loss; by default Python's manual.", VALIDATED,
               needs={"validate": "quality plan"}, at={"validate": {"hidden": True}}),
    ),
    "Output": (
        Opt("out", parse_path, "F.toml", "File for the profile or stack.",
               "calibrate|simulate|sweep|explore|traces import|validate|validate quality|"
               "validate layers", needs={"validate": "quality"},
               at={"calibrate": {"required": True},
                   "simulate": {"metavar": "F.parquet|DIR",
                                "help": "File for the times of every request; with --compare, a "
                                        "folder."},
                   "sweep": {"metavar": "DIR", "required": True,
                             "help": "Folder for the results, one Parquet file per chunk."},
                   "explore": {"metavar": "F.html", "help": "File for the page.",
                               "default": "explore.html"},
                   "traces import": {"metavar": "F", "required": True,
                                     "help": "File for the trace: .parquet, .csv or .jsonl."},
                   "validate": {"metavar": "FILE", "hidden": True},
                   "validate quality": {"metavar": "FILE",
                                        "help": "Write the measurements as an attention trace."},
                   "validate layers": {"metavar": "FILE",
                   "help": "Write the losses to this file."}}),
        Opt("resume", parse_flag, "", "Keep the finished results of an earlier run in --out.",
               "simulate sweep", default=False, needs={"simulate": "out"},
               at={"sweep": {"help": "Keep the finished results in --out and compute the rest."}}),
        Opt("workers", parse_count, "N", "Number of processes on this machine; 1 by default.",
               "sweep",
               range=Range(1, 256, "processes"), excludes={"sweep": "scheduler"}),
        Opt("scheduler", parse_text, "tcp://..", "Use a Dask cluster instead of this machine.",
               "sweep"),
        Opt("check", parse_flag, "", "Verify that no request is lost or starts too early.",
               "simulate", default=False),
        Opt("fit", parse_path, "FILE",
               "Fit --stack to the rows marked fit and write it to this file.",
               "reproduce"),
        Opt("quick", parse_flag, "", "Take two minutes instead of ten, with larger errors.",
               "calibrate",
               default=False, needs={"calibrate": "device"}),
        Opt("max_error", parse_number, "X",
               "Exit with code 1 if the median error of times is above X.", "validate",
               range=real(1e-6, 1e3), excludes={"validate": "plan quality"}),
        Opt("emit", parse_words, "ENGINE,...",
               "Also print the settings for vllm, sglang, trtllm, lmcache, hf, llamacpp or k8s.",
               PLANNED),
        Opt("pareto", parse_flag, "",
               "Also list the plans between the lowest TPOT and the highest throughput.",
               "plan", default=False, excludes={"plan": "trace"}),
        Opt("explain", parse_flag, "", "Also explain where another technique would be chosen.",
               "plan",
               default=False, excludes={"plan": "trace"}),
        Opt("report", parse_path, "F.html", "Write an HTML page to this file.",
               "predict|plan|simulate|capacity|sweep|reproduce|calibrate|validate|traces inspect",
               excludes={"reproduce": "fit", "calibrate": "from_ops from_serving",
                         "validate": "plan quality"},
               at={"reproduce": {"metavar": "FILE", "help": "Write an HTML or Markdown page to "
               "this file."}}),
        Opt("verbose", parse_flag, "",
               "Print all evidence, errors by kernel, and what is not modelled.",
               "predict|plan|simulate|capacity", default=False,
               excludes=dict.fromkeys(("predict", "plan", "simulate", "capacity"), "json")),
        Opt("json", parse_flag, "", "Print JSON to standard output.",
               f"predict|plan|simulate|capacity|reproduce|calibrate|{VALIDATED}|doctor|models|gpus"
               f"|techniques|stacks|traces inspect|traces import|traces generate", default=False,
               excludes={"reproduce": "fit"}),
        Opt("yes", parse_flag, "", "Start even if it takes more than 10 minutes or 8 GB.",
               "plan simulate capacity", default=False),
        Opt("csv", parse_flag, "", "Print CSV to standard output.", "predict", default=False,
               excludes={"predict": "json"}),
    ),
}  # fmt: skip
"""All options in the groups, and the order, of the help."""

_SPELLED = {
    "--tp": "--tensor-parallel-size --tp-size",
    "--pp": "--pipeline-parallel-size --pp-size",
    "--dp": "--data-parallel-size --dp-size",
    "--ep": "--ep-size",
    "--gpus": "--num-gpus",
    "--weights": "--quantization",
    "--max-seqs": "--max-num-seqs --max-running-requests",
    "--max-tokens": "--max-num-batched-tokens --chunked-prefill-size",
    "--max-model-len": "--context-length --ctx-size --context",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--prefix-caching": "--enable-prefix-caching",
    "--host-cache": "--kv-offloading-size",
    "--hit-rate": "--prefix-hit-rate --cache-hit-rate --prefix-hit",
    "--prompt": "--input-len --isl",
    "--generate": "--output-len --osl",
    "--jobs": "--num-prompts",
    "--rate": "--request-rate --qps",
    "--concurrency": "--max-concurrency",
    "--n-gpu-layers": "-ngl --gpu-layers",
    "--n-cpu-moe": "-ncmoe",
    "--override-tensor": "-ot",
    "--ubatch-size": "-ub --ubatch",
}
SPELLINGS = {word: option for option, words in _SPELLED.items() for word in words.split()}
"""Options as vLLM, SGLang, llama.cpp and load generators call them, and their names here."""

COUNTED_BY = {
    "plan": "--total-gpus",
    "predict": "--tp",
    "simulate": "--tp",
    "capacity": "--max-gpus",
}
"""The option that says how many GPUs there are, where ``--gpus`` has a number."""

COUNT_BEFORE = re.compile(r"\s*(\d{1,3})\s*[x×]\s*(?=[a-z0-9])(.+)", re.IGNORECASE)
COUNT_AFTER = re.compile(r"(.*[\w)])(?:\s+|(?<=[\dg]))[x×]\s*(\d{1,2})\s*", re.IGNORECASE)
"""How many GPUs of a kind, as 2x4090 or "H100 x8"."""

PRESENTED = ("json", "csv", "report", "verbose")
"""Options that say how an answer is shown; Python has methods for them."""

OPTION_RANGES = {
    option.flag: option.range
    for options in TABLE.values()
    for option in options
    if option.range is not None
}
"""What numbers may be, by option."""


@cache
def options_of(command: str) -> dict[str, CommandOption]:
    """List the options of a command.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.

    Returns
    -------
    dict of CommandOption
        The options by keyword, in the order of the help.
    """
    return {
        option.name: replace(option, **option.at.get(command, {}))
        for options in TABLE.values()
        for option in options
        if command in option.taken_by
    }


def read_spellings(command: str, words: Iterable[str]) -> list[str]:
    """Replace options as engines call them, and numbers of GPUs, by the options of a command.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    words
        What was typed after it.

    Returns
    -------
    list of str
        The words as the command takes them; ``--gpu 2x4090`` becomes ``--gpu 4090`` and the option
        that counts GPUs.
    """
    taken = {
        flag for option in options_of(command).values() for flag in (option.flag, *option.also)
    }
    counter, found = COUNTED_BY.get(command), []
    pending = [part for word in words for part in _split_value(word)]
    while pending:
        word = pending.pop(0)
        meant = SPELLINGS.get(word, word)
        if meant == "--gpus" and counter and pending and pending[0].strip().isdecimal():
            found.append(counter)
            continue
        found.append(meant if meant in taken and word not in taken else word)
        if found[-1] in ("--gpu", "--gpus") and counter and pending:
            several = COUNT_BEFORE.fullmatch(pending[0])
            name, count = several.groups()[::-1] if several else (pending[0], "")
            after = COUNT_AFTER.fullmatch(name)
            if not count and after:
                name, count = after.groups()
            pending[0] = name
            said = count and not Path(name).exists()
            if said and (int(count) > 1 or counter == "--max-gpus"):  # one is the default
                pending[1:1] = [counter, count]
    return found


def _split_value(word: str) -> list[str]:
    """An option and its value where one word has both, if the option may need another name."""
    flag, equals, value = word.partition("=")
    return (
        [flag, value] if equals and (flag in SPELLINGS or flag in ("--gpu", "--gpus")) else [word]
    )


def check_range(name: str, value: float) -> None:
    """Refuse a number that is outside the range of its option.

    Parameters
    ----------
    name
        The option as it is typed, as ``--max-seqs``.
    value
        The number, in the unit of the range.

    Raises
    ------
    InputError
        Naming the option and its range.
    """
    OPTION_RANGES[name].check(name, value)


def check_work(what: str, count: float, most: float, mend: str) -> None:
    """Refuse work that would take too long, before it begins.

    Parameters
    ----------
    what
        The work in words, as ``--batch, --prompt: 20,000 points``.
    count, most
        How much of it was asked for, and how much is done.
    mend
        What the user can do.

    Raises
    ------
    InputError
        If it is more.
    """
    if count > most:
        raise InputError(f"{what}; expected at most {format_plain(most)}; {mend}")


def find_misuse(command: str, given: Iterable[str]) -> str:
    """Find what is wrong with the options given together.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    given
        Keywords of the options that a user gave.

    Returns
    -------
    str
        The fault, as an error message says it; empty if there is none.
    """
    options, there = options_of(command), set(given)
    for name in sorted(there, key=list(options).index):
        option = options[name]
        needed = option.needs.get(command, "").split()
        if needed and not there & set(needed):
            others = " or ".join(options[other].flag for other in needed)
            mend = f"add {others}, or omit {option.flag}"
            if (command, name) == ("plan", "rate"):
                mend += "; for the GPUs that R requests/s need, ask `kvsim capacity --rate R`"
            return f"{option.flag}: has no effect without {others}; {mend}"
        for other in option.excludes.get(command, "").split():
            if other in there:
                both = f"{option.flag} and {options[other].flag}"
                return f"{both}: both are given; expected one of them"
    return ""


class Inputs:
    """The parsed options of a command, as attributes; options not given have their defaults.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    given
        What the user gave, by keyword; None counts as not given.

    Raises
    ------
    InputError
        For values that an option cannot have, and for options that would do nothing.
    """

    def __init__(self, command: str, given: Mapping[str, object]) -> None:
        self.command = command
        self.given = {k: v for k, v in given.items() if v is not None and v is not False}
        fault = find_misuse(command, self.given)
        if fault:
            raise InputError(fault)
        options = options_of(command).items()
        self._values = {name: _read(command, option, given.get(name)) for name, option in options}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def line(self, without: str = "report") -> str:
        """Return the command line that asks the same.

        Parameters
        ----------
        without
            The option that is left out, as that which names the page.

        Returns
        -------
        str
            The command as it is typed, quoted for a shell.
        """
        return command_line(self.command, self.given, without)


def _read(command: str, option: CommandOption, given: object) -> object:
    """The value of an option; where one is expected, an error names a command for several."""
    if given is None:
        return None if option.default is None else option.value(option.default)
    try:
        return option.value(given)
    except InputError as problem:
        others = [name for name in option.taken_by if _takes(name, option.name, given)]
        if isinstance(given, str) and "," in given and others:
            mend = f"kvsim {others[0]} {option.flag} {given} compares them"
            raise InputError(f"{problem}; {mend}") from problem
        raise


def _takes(command: str, name: str, given: object) -> bool:
    """Whether an option of a command may have a value."""
    try:
        options_of(command)[name].value(given)
    except InputError:
        return False
    return True


def command_line(command: str, given: Mapping[str, object], without: str = "report") -> str:
    """Format a command as it is typed, each word quoted where a shell needs it.

    Parameters
    ----------
    command
        The command, as ``plan`` or ``traces inspect``.
    given
        Values by keyword, in the order of the line.
    without
        The option that is left out, as that which names the page.

    Returns
    -------
    str
        The command line.
    """
    options, words = options_of(command), ["kvsim", *command.split()]
    for name, value in given.items():
        if name == without or value is None or value is False:
            continue
        option, several = options[name], isinstance(value, list | tuple)
        if option.parse is parse_model and isinstance(getattr(value, "config", value), Mapping):
            value = "config.json"  # what the fields were read from, which the call does not say
        if option.position:
            words += map(_typed, value) if several else [_typed(value)]  # type: ignore[call-overload]
        elif value is True:
            words.append(option.flag)
        else:
            word = _typed(value)
            joined = word.startswith("-")  # else the value could be taken for an option
            words += [f"{option.flag}={word}"] if joined else [option.flag, word]
    return shlex.join(words)


def _typed(value: object) -> str:
    """A value as it is typed; several are separated by commas."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_typed(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str | Path):
        return ",".join(map(_typed, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


R = TypeVar("R")


def takes_options(command: str, *first: str) -> Callable[[Callable[[Inputs], R]], Callable[..., R]]:
    """Make a function of its inputs one of keywords, which the table of options declares.

    Errors name options on the command line, and keywords in Python.

    Parameters
    ----------
    command
        The command whose options are the keywords.
    first
        Keywords that may be given by position, in this order.
    """

    def decorate(answer: Callable[[Inputs], R]) -> Callable[..., R]:
        options = {k: v for k, v in options_of(command).items() if k not in PRESENTED}
        names = [*first, *(name for name in options if name not in first)]
        needed = [n for n in names if options[n].required and options[n].default is None]
        optional = bool(first) and first[0] not in needed  # then what follows it has a default too
        signature = Signature(
            [
                Parameter(
                    name,
                    Parameter.POSITIONAL_OR_KEYWORD if name in first else Parameter.KEYWORD_ONLY,
                    default=(
                        Parameter.empty
                        if name in needed and not (optional and name in first)
                        else options[name].default
                    ),
                )
                for name in names
            ]
        )

        @wraps(answer)
        def ask(*args: object, **keywords: object) -> R:
            given = signature.bind(*args, **keywords).arguments
            for name in needed:
                if given.get(name) is None:
                    raise TypeError(f"{command}: missing a required argument: {name!r}")
            try:
                inputs = Inputs(command, given)
                found = answer(inputs)
            except (InputError, InfeasibleError) as problem:
                if not on_command_line():
                    problem.args = (name_keywords(str(problem)), *problem.args[1:])
                raise
            if getattr(found, "command", None) == "":  # an answer says what gives the same
                found = replace(found, command=inputs.line())  # type: ignore[type-var]
            return found

        ask.__signature__ = signature  # type: ignore[attr-defined]
        about, line, outcome = (answer.__doc__ or "").partition("\n    Returns\n")
        ask.__doc__ = f"{about.rstrip()}\n\n{_parameters(options, names)}\n{line}{outcome}"
        return ask

    return decorate


def name_keywords(message: str) -> str:
    """Replace options in a message by the keywords of Python, as ``max_seqs``.

    Parameters
    ----------
    message
        A message of the command line.

    Returns
    -------
    str
        The message; words that are no options stay.
    """
    known = {option.flag for options in TABLE.values() for option in options}
    return re.sub(
        r"--[a-z][a-z-]*",
        lambda found: found[0][2:].replace("-", "_") if found[0] in known else found[0],
        message,
    )


def _parameters(options: Mapping[str, CommandOption], names: Iterable[str]) -> str:
    """The parameters of a function, as its documentation lists them."""
    lines = ["Parameters", "----------"]
    for name in names:
        option = options[name]
        unit = f" [{option.range.unit}]" if option.range is not None and option.range.unit else ""
        lines += [name, f"    {name_keywords(option.help)}{unit}"]
    return "\n".join(f"    {line}" if line else "" for line in lines)

"""`--help` of every command: options in groups, and two examples that run as they stand."""

from typing import Any

from typer.core import TyperCommand

EXAMPLES = {
    "plan": (
        "kvsim plan --model llama3.1-8b --gpu h100 --prompt 4k --ttft 500ms --tpot 50ms",
        "kvsim plan --model qwen2.5-32b --gpu a100-40g --weights auto --tp auto",
    ),
    "predict": (
        "kvsim predict --model llama3.1-8b --gpu h100 --technique full,kivi:bits=4 --batch 1,8",
        "kvsim predict --model llama2-7b --gpu a6000 --technique full --prompt 1k,8k --csv",
    ),
    "simulate": (
        "kvsim simulate --trace sample:chat --model llama3-8b --gpu h100 --ttft 1s --tpot 50ms",
        "kvsim simulate --trace sample:code --model llama2-7b --gpu a6000 --compare full,kivi",
    ),
    "capacity": (
        "kvsim capacity --trace sample:chat --model llama3-8b --gpus l40s --ttft 2s --tpot 100ms",
        "kvsim capacity --trace sample:code --model llama3-8b --gpus l40s,h100 --ttft 2s "
        "--tpot 100ms",
    ),
    "explore": (
        "kvsim explore --model llama3.1-8b --gpu h100 --out explore.html",
        "kvsim explore --model llama2-7b --gpu a6000 --technique full,offload,kivi --out e.html",
    ),
    "reproduce": (
        "kvsim reproduce kcache",
        "kvsim reproduce all --report errors.html",
    ),
    "calibrate": (
        "kvsim calibrate --device cuda:0 --quick --out mine.toml",
        "kvsim calibrate --from-run bench.json --model llama3-8b --gpu rtx4090 --out mine.toml",
    ),
    "validate": (
        "kvsim validate --model smollm2-135m --layers 2 --techniques kvpr:split=48",
        "kvsim validate --gpu mine.toml --device cuda:0 --report validate.html",
    ),
    "sweep": (
        "kvsim sweep grid.toml --out grid",
        "kvsim sweep grid.toml --out grid --resume",
    ),
    "doctor": ("kvsim doctor mine.toml", "kvsim doctor trace.csv --json"),
    "models": ("kvsim models", "kvsim models llama3.1-8b"),
    "gpus": ("kvsim gpus", "kvsim gpus h100"),
    "techniques": ("kvsim techniques", "kvsim techniques kivi"),
    "stacks": ("kvsim stacks", "kvsim stacks fused --json"),
}

GROUPS = {
    "What and where": "--model --gpu --gpus --stack --tp --pp --dp --ep --weights --device",
    "Workload": "--prompt --generate --batch --offline --trace --rate --per-class --technique "
    "--techniques --compare --replicas --route --prefill-replicas --transfer --layers --points "
    "--acceptance --draw-acceptance",
    "Goal and limits": "--objective --ttft --tpot --gpu-memory --gpu-memory-utilization "
    "--host-memory --percentile",
    "What may be chosen": "--only --without --engine --lossy --max-loss --quality",
    "Engine": "--max-seqs --max-tokens --block-tokens --blocks --prefill --priority --preemption "
    "--admission --prefix-caching",
    "Memories for prefix blocks": "--host-cache --nvme-cache --remote-cache --prefix-load "
    "--cache-block --cache-ttl --nvme-read --nvme-write --nic",
    "Reading a trace": "--format --columns --time-unit --hash-block-tokens --chars-per-token "
    "--sort --skip-bad",
    "Output": "--json --csv --report --out --emit --resume --check --max-error --text --fit "
    "--quick --pareto --explain --help",
}
"""Options by group, in the order of the help; others stand under Other."""
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
FEWEST = 8  # options from which groups help


class GroupedCommand(TyperCommand):
    """A command whose help has groups and examples."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options group by group, then the examples."""
        groups: dict[str, list[tuple[str, str]]] = {}
        arguments: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                group = next((GROUP_OF[x] for x in parameter.opts if x in GROUP_OF), "Other")
                groups.setdefault(group, []).append(record)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        if sum(map(len, groups.values())) < FEWEST:
            groups = {"Options": [record for some in groups.values() for record in some]}
        for group in ("Options", *GROUPS, "Other"):
            if group in groups:
                with formatter.section(group):
                    formatter.write_dl(groups[group])
        if self.name in EXAMPLES:
            with formatter.section("Examples"):
                for line in EXAMPLES[self.name]:
                    formatter.write_text(line)

"""What a quick run of the tests leaves out; `make.py test --all` leaves out nothing."""

import os
from collections.abc import Collection
from zlib import crc32

from tests.support.places import ROOT

LAUNCHED = (
    "eagle flexgen fp8 gear h2o kcache kvpr magicdec:draft ngram offload pyramidkv quantspec quest "
    "shadowkv snapkv streamingllm turboquant zipcache"
)
SLOW = (  # minutes of processor time together; `make.py test --all` runs them
    "tests/cli/test_calibrate_machine.py::test_bad_input_is_one_line[arguments1-",
    "tests/cli/test_calibrate_machine.py::test_killed",
    "tests/cli/test_calibrate_machine.py::test_neither",
    "tests/cli/test_capacity.py::test_the_fleet",
    "tests/cli/test_capacity.py::test_targets",
    "tests/cli/test_capacity.py::test_any_replica",
    "tests/cli/test_capacity.py::test_host_memory",
    "tests/cli/test_capacity.py::test_other_loads",
    "tests/cli/test_capacity.py::test_the_command_that_plays_a_fleet_shows_its_figures[conv",
    "tests/cli/test_cli.py::test_a_failing_write_leaves_nothing_half_written[None",
    "tests/cli/test_cli_quality.py::test_a_trace_is_printed",
    "tests/cli/test_simulate_files.py::test_a_run_that_is_stopped",
    "tests/cli/test_simulate_traces.py::test_accepted_drafts",
    "tests/docs/test_examples.py",
    "tests/evidence/test_fromrun.py::test_calibrating_never_hurts[host",
    "tests/evidence/test_fromrun.py::test_calibrating_never_hurts[slow",
    "tests/planner/test_sensitivity.py::test_beyond",
    "tests/planner/test_planner.py::test_two_gpus",
    "tests/planner/test_planner.py::test_limits_bind",
    "tests/report/test_every_page.py::test_a_page_is_right",
    "tests/report/test_every_page.py::test_lanes",
    "tests/report/test_explore.py",
    "tests/report/test_pages.py",
    "tests/robust/test_determinism.py",
    "tests/robust/test_environment.py",
    "tests/robust/test_injection.py::test_markup_is_text_on_the_page_of_capacity",
    "tests/robust/test_kills.py",
    "tests/test_packaging.py::test_a_checkout",
    "tests/test_packaging.py::test_sdist",
    "tests/test_scaffold.py::test_every_command_knows_them[e",
    "tests/test_scaffold.py::test_every_command_knows_them[plan",
    "tests/test_scaffold.py::test_every_command_knows_them[s",
    "tests/test_scaffold.py::test_the_tests",
    "tests/traces/test_traces_generate.py::test_prefix_reuse",
    "tests/validate/test_any_cpu.py",  # CI asks for it by its name
    "tests/validate/test_impl_overlap.py::test_no_wrong_token_in_a_thousand_steps",
    "tests/validate/test_impl_overlap.py::test_no_wrong_token_with_other",
    "tests/validate/test_impl_speculation.py::test_sampled",
    "tests/validate/test_kernels_triton.py::test_attention_over_any",
    *(
        f"tests/validate/test_launches.py::test_stated_kernels_are_those_dispatched[{name}"
        for name in LAUNCHED.split()
    ),
    "tests/validate/test_pretended_units.py::test_every",
    "tests/validate/test_smollm2.py::test_logits",
    "tests/validate/test_smollm2.py::test_one_bit",
    "tests/validate/test_smollm2.py::test_tokens_of",
    "tests/validate/test_timing.py::test_a_round_is_seen",
    "tests/validate/test_timing.py::test_memory_and_copies",
)

SAMPLED = {  # alike cases, of which a quick run takes one in so many, the same ones every time
    "tests/engine/test_timeline.py::test_techniques_match": 2,
    "tests/planner/test_planner.py::test_choice_is_the_best": 2,
    "tests/prediction/test_generate.py::test_largest": 2,
    "tests/prediction/test_generate.py::test_times": 2,
    "tests/robust/test_options.py::test_an_option_does_something[capacity": 36,
    "tests/robust/test_options.py::test_an_option_does_something[plan": 16,
    "tests/robust/test_options.py::test_an_option_does_something[simulate": 6,
    "tests/techniques/test_compositions.py::test_degenerate": 2,
    "tests/techniques/test_compositions.py::test_pairs": 2,
    "tests/techniques/test_contract.py": 2,
    "tests/techniques/test_limits.py::test_a_limit": 4,
    "tests/techniques/test_limits.py": 2,
    "tests/validate/test_impl_composed.py::test_compositions": 2,
    "tests/validate/test_impl_composed.py::test_lossless": 2,
    "tests/validate/test_impl_counts.py::test_ops": 2,
    "tests/validate/test_impl_lossless.py::test_the_whole_context": 2,
    "tests/validate/test_kernels_quantise.py::test_codes": 2,
    "tests/validate/test_session.py::test_a_cut_session": 16,
    "tests/validate/test_kernels_triton.py::test_attention_over_packed": 2,
}

OTHER_CPUS = (  # what tests/validate/test_any_cpu.py runs as two other processors would
    "tests/validate/test_impl_packed.py::test_kivi_is_its_algorithm_with_a_residual_that_rolls[kivi-4]",
    "tests/validate/test_impl_speculation.py::test_quantspec_is_greedy_decoding_of_its_target[4]",
    "tests/validate/test_impl_eviction.py::test_what_attention_says_is_kept[lengths0-h2o:heavy=9,recent=15-NaiveH2o]",
    "tests/validate/test_validate_decoder.py::test_logits_and_tokens_are_those_of_transformers[qwen3]",
)

TURNS = 20
"""Commits of which each runs, in CI, another part of what a quick run leaves out."""


def unknown_names(collected: Collection[str], named: list[str]) -> list[str]:
    """Return the names of this module that no test has any more.

    Parameters
    ----------
    collected
        Names of all collected tests. What a file lacks is seen if it was collected whole.
    named
        What the command line asks for, as paths or, with ``::``, single tests of a file.
    """
    files = {test.partition("::")[0] for test in collected}
    in_parts = [argument.partition("::")[0] for argument in named if "::" in argument]

    def is_gone(name: str) -> bool:
        file = name.partition("::")[0]
        if file in files and not any(path.endswith(file) for path in in_parts):
            return not any(test.startswith(name) for test in collected)
        return not (ROOT / file).is_file()

    return [name for name in (*SLOW, *SAMPLED, *OTHER_CPUS) if is_gone(name)]


def left_out(test: str, named: list[str]) -> bool:
    """Whether a quick run leaves a test out.

    Parameters
    ----------
    test
        Its name, as pytest has it: file, function and case.
    named
        What the command line asks for. A slow test, or one case of alike ones, that is asked for
        by its name is run.
    """
    if "KVSIM_LEFT_OUT" in os.environ:  # the part of a full run that a quick run lacks
        return not _left_out_of_quick_runs(test, [])
    if "KVSIM_ALL_TESTS" in os.environ or not _left_out_of_quick_runs(test, named):
        return False
    turn = os.environ.get("KVSIM_TWENTIETH")
    return turn is None or crc32(test.encode()) // 64 % TURNS != int(turn) % TURNS


def _left_out_of_quick_runs(test: str, named: list[str]) -> bool:
    if test.startswith(SLOW):
        return not any(argument.startswith(SLOW) for argument in named)
    parts = [share for prefix, share in SAMPLED.items() if test.startswith(prefix)]
    whole = any("::" in argument and test.startswith(argument) for argument in named)
    return bool(parts) and not whole and crc32(test.encode()) % parts[0] > 0

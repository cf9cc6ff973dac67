"""What has to be decided before any test module is imported."""

import gc
import os
from typing import Any

import pytest

# Triton chooses its interpreter when first imported; kernels on a GPU are `make.py gpu`'s to check
os.environ["TRITON_INTERPRET"] = "1"

# two runs of tests and the commands they start share the cores: threads that spin while they wait
# for work take ten times as long as one thread that has all of it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


YOUNG = (
    20_000  # objects made between two looks for cycles, thirty times as many as Python waits for
)


def pytest_configure() -> None:
    """Look for no cycles while modules are imported: they leave none, and looking takes longer."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Never look again at what is imported and collected by now."""
    gc.freeze()
    gc.set_threshold(YOUNG)
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries that count what is left at the end find nothing."""
    gc.unfreeze()


@pytest.fixture(autouse="KVSIM_ULPS" in os.environ)
def _another_cpu(monkeypatch: Any) -> None:
    """Runs round as they would elsewhere; see ``tests.support.ulps``."""
    from tests.support.ulps import move_inputs

    move_inputs(monkeypatch)


SLOW = (  # minutes of processor time together; `make.py test --all` runs them
    "tests/commands/test_calibrate_machine.py::test_bad_input_is_one_line[arguments1-",
    "tests/commands/test_calibrate_machine.py::test_killed",
    "tests/commands/test_calibrate_machine.py::test_neither",
    "tests/commands/test_capacity.py::test_the_fleet",
    "tests/commands/test_capacity.py::test_targets",
    "tests/commands/test_capacity.py::test_any_replica",
    "tests/commands/test_capacity.py::test_host_memory",
    "tests/commands/test_capacity.py::test_other_loads",
    "tests/commands/test_cli.py::test_a_failing_write_leaves_nothing_half_written[None",
    "tests/commands/test_cli_plan_trace.py::test_bad_input_gets_one_line[arguments9",
    "tests/commands/test_cli_plan_trace.py::test_the_plan_is_what",
    "tests/commands/test_cli_quality.py::test_a_trace_is_printed",
    "tests/commands/test_simulate_files.py::test_a_run_that_is_stopped",
    "tests/commands/test_simulate_traces.py::test_accepted_drafts",
    "tests/docs/test_notebooks.py",
    "tests/evidence/test_fromrun.py::test_a_run_of_a_known_stack",
    "tests/planner/test_fleet_play.py",
    "tests/planner/test_programme.py::test_best_first",
    "tests/planner/test_planner.py::test_two_gpus",
    "tests/planner/test_planner.py::test_limits_bind",
    "tests/planner/test_plan_trace.py::test_late",
    "tests/planner/test_plan_trace.py::test_nothing_simulated_is_better_on_the_chat_sample[latency",
    "tests/planner/test_plan_trace.py::test_nothing_simulated_is_better_on_the_chat_sample[throughput",
    "tests/planner/test_plan_trace.py::test_a_choice_per_class",
    "tests/report/test_every_page.py::test_a_page_is_right",
    "tests/report/test_every_page.py::test_lanes",
    "tests/report/test_explore.py",
    "tests/report/test_pages.py",
    "tests/robust/test_determinism.py",
    "tests/robust/test_environment.py",
    "tests/robust/test_injection.py::test_markup_is_text_on_the_page_of_capacity",
    "tests/robust/test_kills.py",
    "tests/sweep/test_sweep.py::test_a_pool",
    "tests/test_scaffold.py::test_every_command_knows_it",
    "tests/test_scaffold.py::test_contract",
    "tests/traces/test_traces_generate.py::test_prefix_reuse",
    "tests/validate/test_impl_overlap.py::test_no_wrong_token_in_a_thousand_steps[kvpr",
    "tests/validate/test_impl_overlap.py::test_no_wrong_token_in_a_thousand_steps[offload",
    "tests/validate/test_impl_overlap.py::test_no_wrong_token_in_a_thousand_steps[specache",
    "tests/validate/test_impl_overlap.py::test_no_wrong_token_with_other",
    "tests/validate/test_impl_speculation.py::test_sampled",
    "tests/validate/test_kernels_triton.py::test_attention_over_any",
    *(
        f"tests/validate/test_launches.py::test_stated_kernels_are_those_dispatched[{name}"
        for name in ("eagle", "flexgen", "fp8", "gear", "h2o", "kcache", "kvpr", "magicdec:draft")
    ),
    *(
        f"tests/validate/test_launches.py::test_stated_kernels_are_those_dispatched[{name}"
        for name in ("ngram", "offload", "pyramidkv", "quantspec", "quest", "shadowkv", "snapkv")
    ),
    *(
        f"tests/validate/test_launches.py::test_stated_kernels_are_those_dispatched[{name}"
        for name in ("streamingllm", "turboquant", "zipcache")
    ),
    "tests/validate/test_pretended_units.py::test_every",
    "tests/validate/test_session.py::test_a_unit_runs",
    "tests/validate/test_session.py::test_the_whole_command_stopped_at_random_moments_goes_on[1",
    "tests/validate/test_smollm2.py::test_logits",
    "tests/validate/test_smollm2.py::test_one_bit",
    "tests/validate/test_smollm2.py::test_quantspec_writes",
    "tests/validate/test_smollm2.py::test_tokens_of",
    "tests/validate/test_timing.py::test_a_round_is_seen",
    "tests/validate/test_timing.py::test_memory_and_copies",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave slow tests out, unless all are asked for or one of them is named."""
    named = any(argument.startswith(SLOW) for argument in config.args)
    if "KVSIM_ALL_TESTS" in os.environ or named:
        return
    slow = [item for item in items if item.nodeid.startswith(SLOW)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.nodeid.startswith(SLOW)]

"""`kvsim calibrate`: a machine measured, or a stack fitted to what others measured."""

from typing import Any

from kvsim.cli.command import Call, command


@command("calibrate")
def calibrate(call: Call) -> None:
    """Measure this machine, or fit a stack to runs or tables."""
    from kvsim.api.calibrations import FittedProfile
    from kvsim.api.calibrations import calibrate as fit
    from kvsim.report import calibrate as report
    from kvsim.report import calibrate_run

    result = fit(**call.options)
    call.write(result)
    if call.json:
        call.print_json(result.envelope())
    elif not isinstance(result, FittedProfile):
        calibrate_run.show_fit(result, call.options["out"])
    elif result.machine:
        report.show(result.row)
    else:
        _show_table(result.row, str(result.out))


def _show_table(answer: dict[str, Any], out: str) -> None:
    """The fit to a table of measurements."""
    print(f"{answer['engine']}: {answer['rows']:,} rows fitted, written to {out}")
    if "classes" not in answer:
        _show_numbers(answer["numbers"])
        print(f"held out by model: {_format_errors(answer).replace(' and', ',')}")
        return
    for row in answer["classes"]:
        told = "nothing held out"
        if row["median_error"] is not None:
            told = f"{_format_errors(row)} on shapes that no fit saw"
        print(f"{row['class']}: {row['rows']:,} rows, {told}")
        _show_numbers(row["numbers"])


def _format_errors(row: dict[str, Any]) -> str:
    median, p90 = 100 * row["median_error"], 100 * row["p90_error"]
    return f"{median:.2g} % at the median and {p90:.2g} % for nine in ten"


def _show_numbers(numbers: dict[str, dict[str, Any]]) -> None:
    for key, found in numbers.items():
        spread = "unknown" if found["error"] is None else f"{found['error']:.2g}"
        note = "" if found["known"] else "  not determined by these rows"
        print(f"  {key:34s} {found['value']:10.4g} +- {spread}{note}")

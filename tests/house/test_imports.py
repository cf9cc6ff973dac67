"""Modules import each other in one direction only."""

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Circles within a folder count too, and so do imports for type checkers and in functions."""
    graph = grimp.build_graph("kvsim")
    imports = {
        module: graph.find_modules_directly_imported_by(module) - {module}
        for module in graph.modules
    }
    imports["kvsim"].discard("kvsim.api")  # what `import kvsim` offers, imported when asked for
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail("modules import each other: " + " -> ".join(error.args[1]))

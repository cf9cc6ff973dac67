"""axe-core's rules of accessibility, run in a page.

It is a development dependency, installed with ``npm ci --prefix tests/support/axe``.
"""

from pathlib import Path

from tests.support.devtools import Browser

PLACE = Path(__file__).parent / "node_modules" / "axe-core" / "axe.min.js"
SCRIPT = PLACE.read_text(encoding="utf-8") if PLACE.exists() else None
WHY = "axe-core is not installed: npm ci --prefix tests/support/axe"
RUN = """axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations.map(
  (v) => `${v.id} (${v.impact}): ${v.nodes.length} x ${v.nodes[0].html.slice(0, 120)}`))"""


def broken(b: Browser) -> list[str]:
    """Every rule that the open page breaks, with the first element that does."""
    assert SCRIPT is not None, WHY
    b.run(f"{SCRIPT};0")
    return list(b.run(RUN))

"""Every Triton kernel compiled as it is launched, for four cards: shared memory and spills.

Asked: at most 99 KiB of shared memory in every program (what an RTX A6000 or 4090 has), and no
spilled register in a kernel for 16-bit numbers. Nothing is run, so no GPU is needed.
"""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "support" / "compile_kernels.py"
CARDS = ("80", "86", "89", "90")


def main() -> None:
    sys.exit(subprocess.run([sys.executable, str(SCRIPT), *CARDS], check=False).returncode)


if __name__ == "__main__":
    main()

"""What has to be decided before any test module is imported."""

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # Triton chooses its interpreter when first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

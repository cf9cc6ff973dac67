"""Every fault of a file at once: profiles, stacks, configurations, traces and measured rows.

The commands stop at the first fault of a file, because they need a sound one; `kvsim doctor` goes
on, so that a file is mended in one sitting. Nothing is checked here that is not checked where the
file is used: this room calls those checks until they have nothing more to say.

May import every room but the commands and kvsim.report.
"""

from kvsim.doctor.examine import Diagnosis, examine

__all__ = ["Diagnosis", "examine"]

"""The version, apart from the package that offers everything else."""

__version__ = "0.3.0"

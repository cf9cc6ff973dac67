"""Groups of commands, one file each; `kvsim.cli` puts them together."""

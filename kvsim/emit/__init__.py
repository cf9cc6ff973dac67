"""Settings to paste: the command line or file of an engine that runs what was planned."""

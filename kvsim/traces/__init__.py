"""Request traces: readers, statistics, generators; attention-and-acceptance traces."""

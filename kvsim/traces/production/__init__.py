"""Traffic from what production already keeps: metrics over time, spans, and access logs."""

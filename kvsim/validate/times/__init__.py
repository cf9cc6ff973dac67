"""Times of real runs, op by op and end to end, compared with predictions."""

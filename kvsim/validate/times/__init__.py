"""How long real runs take, op by op and end to end, held against predictions."""

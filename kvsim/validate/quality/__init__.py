"""What a technique does to a model's output: quality, attention kept, drafts accepted."""

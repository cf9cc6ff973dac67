"""Effects of a technique on a model's output: quality, attention kept, drafts accepted."""

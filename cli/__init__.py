"""The `baton` command: starts processes, shows what they do, and knows nothing of how."""

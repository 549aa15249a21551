"""Reading a checkpoint: its configuration, its files, its weights."""

"""Parts of checkpointing: files, values, matching. The entry is poplar/checkpoint.py."""

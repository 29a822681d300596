"""Parts of the profiler: one rank alone, then together. The entry is poplar/profiler.py."""

"""Parts of the allocator: what a step costs, the strategies, joint shard ratios. The entry is poplar/allocator.py."""

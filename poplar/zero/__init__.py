"""ZeRO in pure PyTorch: docs/zero.md says in which order to read."""

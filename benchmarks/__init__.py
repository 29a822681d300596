"""Measurements behind the figures in the project's documents. Run from the repository's root; see README.md here."""

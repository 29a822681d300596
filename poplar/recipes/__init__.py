"""Recipes that come with Poplar. ``poplar train`` without a recipe runs ``poplar.recipes.bytes_gpt:recipe``."""

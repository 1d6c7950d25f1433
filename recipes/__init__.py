"""Recipes as YAML, the programs that train them, and what a run will need."""

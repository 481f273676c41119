"""The paper's tables and figures: recipes, where each setting comes from, dry runs, comparisons and drawings."""

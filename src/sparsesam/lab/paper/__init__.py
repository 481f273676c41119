"""The paper's tables and figures: recipes, the source of each setting, dry runs, comparisons and figures."""

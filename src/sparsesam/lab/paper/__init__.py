"""What ``sparsesam paper`` does with the recipes: dry runs, tables, figures, and where each setting comes from."""

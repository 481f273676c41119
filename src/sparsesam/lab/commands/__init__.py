"""The subcommands of ``sparsesam``, a module for each."""

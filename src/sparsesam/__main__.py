"""``python -m sparsesam``, and ``torchrun … -m sparsesam``."""

from sparsesam.lab.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

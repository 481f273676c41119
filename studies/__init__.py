"""Studies of accuracy against cost; run with ``python -m studies.run TASK``, read with ``python -m studies.report``."""

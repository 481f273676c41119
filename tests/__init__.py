"""Models of tests are small: what is used again must not depend on their size."""

from sparsesam.ascent import prefix

prefix.SMALLEST_WORK = 0

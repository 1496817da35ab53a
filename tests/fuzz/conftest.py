"""`make fuzz EXAMPLES=20000` runs these tests for long; the suite runs a few examples."""

import os

from hypothesis import settings

settings.register_profile(
    "fuzz", max_examples=int(os.environ.get("EXAMPLES", "100")), deadline=None
)
settings.load_profile("fuzz")

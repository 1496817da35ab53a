"""`python -m service`, which is `vitserve`."""

import sys

from service.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

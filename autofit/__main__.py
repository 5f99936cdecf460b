"""`python -m autofit` is the `autofit` command."""

import sys

from autofit.cli import main

sys.exit(main())

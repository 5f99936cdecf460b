"""`python -m autofit` is the `autofit` command."""

import sys

from autofit.start import main

sys.exit(main())

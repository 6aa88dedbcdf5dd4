"""Puts this folder on the path: its cases and user networks are imported by name, as a user's modules are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

"""`python -m tests.engines HEAD --engine ENGINE --target DIR`: compare_engines.py as a command."""

from eagle.log import script
from tests.engines.compare_engines import main

if __name__ == "__main__":
    script(main)

"""``python -m clusterrun``."""

from clusterrun.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

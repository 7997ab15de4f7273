"""``python -m fsshard``: the command ``fsshard``, where its script is not on the PATH."""

from fsshard.cli.app import main

if __name__ == "__main__":  # spawned ranks import this module too
    raise SystemExit(main())

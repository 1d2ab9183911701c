"""`python -m pelton` runs the command `pelton`, where it is installed."""

import os
import shutil
import sys


def main() -> None:
    """Becomes the command, or ends with a text that says how to install it."""
    tool = shutil.which("pelton")
    if tool is None:
        text = "the command `pelton` is not in PATH. The wheel does not bring it: install it by ./run install"
        sys.exit(f"python -m pelton: {text}")
    os.execv(tool, ["pelton", *sys.argv[1:]])


if __name__ == "__main__":
    main()

"""`python -m pelton` runs the command `pelton`, where it is installed."""

import os
import shutil
import sys

tool = shutil.which("pelton")
if tool is None:
    sys.exit("python -m pelton: the command `pelton` is not in PATH. The wheel does not bring it: install it by ./run install")
os.execv(tool, ["pelton", *sys.argv[1:]])

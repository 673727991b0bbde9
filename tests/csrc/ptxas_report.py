"""Runs a command that compiles CUDA, and keeps what ptxas says of registers and spills; spills.py reads it.

python tests/csrc/ptxas_report.py nvcc ... -o OBJECT        writes OBJECT.ptxas
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# Of a report. All else that the compiler prints, such as warnings, is passed on.
REPORT = re.compile(r"ptxas info|\s+\d+ bytes stack frame|\s*Compile time = ")


def main(command: list[str]) -> int:
    done = subprocess.run([*command, "-Xptxas", "-v"], stderr=subprocess.PIPE, text=True, check=False)
    lines = done.stderr.splitlines(keepends=True)
    sys.stderr.writelines(line for line in lines if not REPORT.match(line))
    if done.returncode == 0 and "-o" in command:
        Path(command[command.index("-o") + 1] + ".ptxas").write_text(done.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

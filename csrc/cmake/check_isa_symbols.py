"""Fails if an object of the instruction-set files defines a weak or unique symbol (nm: W, V, u).

The linker keeps one definition of such a symbol for the whole library: if it kept the one that was compiled for
AVX-512, other code would crash on older CPUs.

    python check_isa_symbols.py nm avx2,avx512 a.cpp.o b.cpp.o ...
"""

import re
import subprocess
import sys
from pathlib import Path

nm, isas, *objects = sys.argv[1:]
wanted = {f"{isa}.cpp" for isa in isas.split(",")}
checked = {Path(name).stem: name for name in objects if "/csrc/cpu/" in name and Path(name).stem in wanted}
if set(checked) != wanted:
    sys.exit(f"expected the objects of {sorted(wanted)}, found {sorted(checked)}")
found = 0
for source, name in sorted(checked.items()):
    symbols = subprocess.check_output([nm, "-C", "--defined-only", name], text=True)
    for weak in re.findall(r"^[0-9a-f]+ [WVu] (.*)$", symbols, re.MULTILINE):
        print(f"{source} defines a symbol that could replace that of another file: {weak}")
        found += 1
print(f"{len(checked)} objects checked, {found} weak symbols")
sys.exit(found > 0)

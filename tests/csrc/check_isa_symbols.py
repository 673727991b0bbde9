"""Fails if an object of the instruction-set files defines a weak or unique symbol (nm: W, V, u).

The linker keeps one definition of such a symbol for the whole library. If it kept the one compiled for AVX-512, other
code would crash on older CPUs.

    python check_isa_symbols.py nm avx2,avx512 a.cpp.o b.cpp.o ...
"""

import re
import subprocess
import sys
from pathlib import Path

nm, isas, *objects = sys.argv[1:]
wanted = {isa for isa in isas.split(",") if isa}
checked = {}
for name in objects:
    match = re.fullmatch(r"(?:simd_)?(\w+)\.cpp\.\w+", Path(name).name)
    if match and match[1] in wanted:
        checked[match[1]] = name
if set(checked) != wanted:
    sys.exit(f"expected the objects of {sorted(wanted)}, found {sorted(checked)}")
found = 0
for isa, name in sorted(checked.items()):
    symbols = subprocess.check_output([nm, "-C", "--defined-only", name], text=True)
    for weak in re.findall(r"^[0-9a-f]+ [WVu] (.*)$", symbols, re.MULTILINE):
        print(f"{isa} defines a symbol that could replace the same symbol of another file: {weak}")
        found += 1
print(f"{len(checked)} objects checked, {found} weak symbols")
sys.exit(found > 0)

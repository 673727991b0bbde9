"""CUTLASS's layout algebra (CuTe) as the oracle for the operands of the tensor cores' instructions.

The wrappers of csrc/cuda/ptx and the simulated GPU read the same tables of NVIDIA's documentation, so an error in our
reading would be in both. CuTe's headers run on the host. They place matrices in the simulated GPU's shared memory, and
say what each register holds. The headers come from the package nvidia-cutlass, without what it depends on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from external.tally import Tally
from external.wheel import download, run

VERSION = "4.2.0"
SUITE = f"CUTLASS {VERSION}: CuTe's layouts"
NO_CUDA = "CuTe's headers need those of the CUDA Toolkit: no nvcc was found"


def cutlass_headers(folder: Path) -> Path:
    with download(f"nvidia-cutlass=={VERSION}", folder) as archive:
        archive.extractall(folder)
    return folder / "cutlass_library" / "source" / "include"


def operands(tally: Tally) -> None:
    """wgmma, mma, ldmatrix, stmatrix, the copy engine's boxes: every shape of the kernels, in both 16-bit types."""
    if shutil.which("nvcc") is None:
        return tally.skip(NO_CUDA)
    here = Path(__file__).parent / "cutlass_layouts"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("cmake", "-S", here, "-B", folder / "build", f"-DCUTLASS={cutlass_headers(folder)}")
        run("cmake", "--build", folder / "build", "-j")
        report = folder / "report.json"
        program = folder / "build" / "scaledot_cutlass_layouts"
        subprocess.run([program, "--gtest_brief=1", f"--gtest_output=json:{report}"])
        for test in json.loads(report.read_text())["testsuites"][0]["testsuite"]:
            with tally.case(test["name"]):
                assert not test.get("failures"), test["failures"][0]["failure"]


CHECKS = {"operands": operands}

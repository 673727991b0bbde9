"""Between a corpus in one text file, one input a line in base64, and a folder with a file for each input.

python corpus.py unpack corpus.txt FOLDER
python corpus.py pack FOLDER corpus.txt
"""

import base64
import hashlib
import sys
from pathlib import Path


def unpack(text: Path, folder: Path) -> None:
    if text.exists():
        for line in text.read_text().split():
            data = base64.b64decode(line)
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


def pack(folder: Path, text: Path) -> None:
    inputs = [path.read_bytes().rstrip(b"\0") for path in folder.iterdir()]  # missing bytes are 0
    lines = sorted(base64.b64encode(data).decode() for data in inputs)
    text.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines) if line))


if __name__ == "__main__":
    {"unpack": unpack, "pack": pack}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))

"""What a checkpoint holds, read without our reader."""

import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, by the safetensors library and the manifest's boxes."""
    manifest = json.loads((folder / "manifest.json").read_text())
    by_file = {name: safetensors.torch.load_file(folder / name) for name in manifest["files"]}
    names = [name for loaded in by_file.values() for name in loaded]
    assert len(names) == len(set(names))  # no box is in two files
    found = {}
    for name, tensor in manifest["tensors"].items():
        whole = torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for box in tensor["boxes"]:
            content = (folder / box["file"]).read_bytes()[box["offset"] :][: box["nbytes"]]
            data = torch.frombuffer(bytearray(content), dtype=whole.dtype).view(box["sizes"])
            place = zip(box["offsets"], box["sizes"], strict=True)
            whole[tuple(slice(o, o + n) for o, n in place)] = data
            assert any(torch.equal(data, other) for other in by_file[box["file"]].values())
        found[name] = whole
    return found


def flip(path: Path) -> None:
    """One bit in the middle of a file is another."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

"""Compiles the three stand-in libraries of this folder. Run as a script: `build.py FOLDER`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
NETWORK_SLOTS, TENSOR_SLOTS = 100, 20
NETWORK_MISSING = (25, 26)  # addPluginV2, addPluginV3
TENSOR_MISSING = (7, 8, 9, 10)  # broadcast and location
POINTER = 8  # bytes; also the offset of the real object in a Redirect, and a table starts with two destructors


def _table(kind: str, slots: int, missing: tuple[int, ...], self_in_rsi: tuple[int, ...] = ()) -> str:
    """x86-64 code for one virtual table.

    A thunk replaces `this` by the real object and jumps to the slot that has this method there, so arguments of any
    kind pass through untouched; no C++ signature is needed. Slots that the other side lacks answer null.
    `this` comes in `rsi` for methods that return a structure, because `rdi` then points to the room for the result.
    """
    code, entries = [], []
    for slot in range(slots):
        name = f"shim11_{kind}_{slot}"
        entries.append(f"  .quad {name}")
        if slot in missing:
            code.append(f"{name}:\n  xor %eax, %eax\n  ret")
            continue
        this = "rsi" if slot in self_in_rsi else "rdi"
        target = slot - sum(1 for gap in missing if gap < slot)
        offset = POINTER * (2 + target)
        code.append(f"{name}:\n  mov {POINTER}(%{this}), %{this}\n  mov (%{this}), %rax\n  jmp *{offset}(%rax)")
    label = f"shim11_{kind}_table"
    data = [f".globl {label}", f".hidden {label}", f"{label}:", "  .quad 0, 0", *entries]
    return "\n".join([".text", *code, '.section .data.rel.ro,"aw"', *data, ""])


def thunks() -> str:
    """The assembly for the network and tensor tables. Tensor slot 3 is getDimensions, which returns a structure."""
    network = _table("network", NETWORK_SLOTS, NETWORK_MISSING)
    tensor = _table("tensor", TENSOR_SLOTS, TENSOR_MISSING, self_in_rsi=(3,))
    return f'{network}{tensor}.section .note.GNU-stack,"",@progbits\n'


def build(folder: Path) -> Path:
    """Compiles into a folder, which is created.

    Args:
        folder: Where the three `.so.11` files go.

    Returns:
        The same folder.

    Raises:
        RuntimeError: When the compiler refuses; the message carries its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    assembly = folder / "thunks.s"
    assembly.write_text(thunks())
    core = folder / "libnvinfer.so.11"
    for library, sources in (
        ("libnvinfer.so.11", [HERE / "nvinfer.cpp", assembly]),
        ("libnvonnxparser.so.11", [HERE / "nvonnxparser.cpp", core]),
        ("libnvinfer_plugin.so.11", [HERE / "nvinfer_plugin.cpp"]),
    ):
        options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", f"-Wl,-soname,{library}"]
        command = ["g++", *options, "-o", str(folder / library), *map(str, sources), "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"g++ could not build {library}:\n{done.stderr}")
    return folder


if __name__ == "__main__":
    build(Path(sys.argv[1]))

"""The C form of the draws on cpu: built on first use, and never needed.

`philox.c` computes what `numbers.py` computes, bit for bit, in a tenth of the time or so. It is
compiled with the system's C compiler at the first draw of more than a few thousand numbers, kept in
the user's cache directory under a hash of everything that it depends on, and checked against the
torch form when it is loaded. Without a compiler, or when anything of this fails, the torch form
computes the same numbers; `kernel_status()` says which one is used, and why.

    VESCALE_RNG_KERNEL=0    never build or use it
    CC                      the compiler (else cc, gcc or clang)
    XDG_CACHE_HOME          where the cache is (else ~/.cache)

A call releases the GIL and keeps no state, so threads may draw at the same time. The file is written
under another name and renamed, so processes that build it at the same time don't see half of it.
"""

import ctypes
import hashlib
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy
import torch
from torch import Tensor

from .inversion import FORMATS, Format, invert, log2_series
from .logarithm import ln_series
from .philox import M0, M1, W0, W1

# Fewer elements than these are drawn without it when it isn't loaded yet: no program that draws only
# a few numbers waits a second for a compiler.
WORTH_BUILDING = 4096

_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-fast-math")
_TIMEOUT = 60  # seconds

_lock = threading.Lock()
_kernel: "Kernel | None" = None
_status = "not built yet: nothing large was drawn"
_tried = False


def kernel_status() -> str:
    """Whether draws on cpu use the compiled kernel, and if not why. The numbers are the same.

    >>> isinstance(kernel_status(), str)
    True
    """
    return _status


class Kernel:
    """The compiled functions, on contiguous cpu tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        number, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
        self._draw, self._normal, self._scale = (
            library.vescale_draw,
            library.vescale_normal64,
            library.vescale_scale,
        )
        self._draw.argtypes = (number, pointer, pointer, size, pointer)
        self._normal.argtypes = (pointer, size, pointer)
        self._scale.argtypes = (pointer, pointer, size, size, size, pointer)
        for function in (self._draw, self._normal, self._scale):
            function.restype = None

    def draw(self, kind: int, key: Tensor, runs: Tensor, out: Tensor) -> None:
        """out := the elements of a kind that are in `runs`: see numbers.py."""
        key, runs = key.contiguous(), runs.contiguous()
        self._draw(kind, key.data_ptr(), runs.data_ptr(), runs.shape[0], out.data_ptr())

    def normal64(self, bits: Tensor) -> Tensor:
        """int64 -> float64: inversion.invert."""
        bits = bits.contiguous()
        out = torch.empty(bits.shape, dtype=torch.float64)
        self._normal(bits.data_ptr(), bits.numel(), out.data_ptr())
        return out

    def scale(self, bits: Tensor, more: Tensor | None, low: int, last: int) -> Tensor:
        """int64 -> int64: ranges.scale."""
        bits, more = bits.contiguous(), None if more is None else more.contiguous()
        out = torch.empty(bits.shape, dtype=torch.int64)
        other = None if more is None else more.data_ptr()
        self._scale(bits.data_ptr(), other, bits.numel(), low, last, out.data_ptr())
        return out


def kernel(numel: int) -> Kernel | None:
    """The compiled kernel; None where the torch form has to do."""
    if _tried or numel < WORTH_BUILDING:
        return _kernel
    return _load()


def _load() -> Kernel | None:
    global _kernel, _status, _tried
    with _lock:
        if not _tried:
            try:
                _kernel, _status = _built()
            except Exception as error:  # whatever is wrong with a compiler or a disk: there's the torch form
                _status = f"torch: {type(error).__name__}: {error}"
            _tried = True
    return _kernel


def _built() -> tuple[Kernel | None, str]:
    if os.environ.get("VESCALE_RNG_KERNEL", "1") == "0":
        return None, "torch: VESCALE_RNG_KERNEL=0"
    compiler = _compiler()
    if compiler is None:
        return None, "torch: no C compiler (CC, cc, gcc, clang)"
    source = prelude() + Path(__file__).with_name("philox.c").read_text()
    found = "\0".join((source, *_FLAGS, *_identity(compiler), _cpu()))
    name = f"philox-{hashlib.sha256(found.encode()).hexdigest()[:24]}.so"
    with tempfile.TemporaryDirectory(prefix="vescale-") as scratch:
        folder = _cache() or Path(scratch)
        path = folder / name
        if not path.exists():
            _compile(compiler, source, path)
        made = Kernel(ctypes.CDLL(str(path)))  # stays mapped when the file is gone
    _check(made)
    return made, f"compiled: {path if folder != Path(scratch) else 'for this process only'}"


def _compiler() -> list[str] | None:
    asked = os.environ.get("CC")
    for words in [shlex.split(asked)] if asked else [["cc"], ["gcc"], ["clang"]]:
        path = shutil.which(words[0])
        if path:
            return [path, *words[1:]]
    return None


def _identity(compiler: list[str]) -> tuple[str, ...]:
    shown = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT)
    return (*compiler, shown.stdout)


def _cpu() -> str:
    """What -march=native depends on: a cache may be shared by different machines."""
    kept = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join([platform.machine(), *(line for line in first if line.startswith(kept))])


def _cache() -> Path | None:
    """The folder for compiled files, ours alone; None when there can't be one."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vescale"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, RuntimeError):  # no home, or one that can't be written
        return None
    # What others can write we don't load.
    private = state.st_uid == os.getuid() and not state.st_mode & 0o022
    return folder if private and os.access(folder, os.W_OK) else None


def _compile(compiler: list[str], source: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        text, made = Path(scratch) / "philox.c", Path(scratch) / "philox.so"
        text.write_text(source)
        errors = ""
        for native in (["-march=native"], ["-mcpu=native"], []):  # not every compiler knows its machine
            command = [*compiler, *_FLAGS, *native, str(text), "-o", str(made)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
            if ran.returncode == 0:
                os.replace(made, target)
                return
            errors = ran.stderr
        raise RuntimeError(f"{compiler[0]} failed: {errors.strip()[:500]}")


def _check(made: Kernel) -> None:
    """A kernel that isn't bit for bit the torch form is not used: a compiler may be wrong."""
    from .numbers import KINDS, from_torch
    from .ranges import scale

    key = torch.tensor([0x243F6A88, 0x85A308D3])
    runs = torch.tensor([(5, 300, 0, 1), (2**34 - 3, 7, 11, 90), (0, 1, 5, 40)])
    shape = (int((runs[:, 1] * runs[:, 3]).sum()),)
    for name, kind in KINDS.items():
        out = torch.empty(shape, dtype=kind.dtype)
        made.draw(kind.code, key, runs, out)
        _require(out, from_torch(key, runs, shape, name), name)
    bits = from_torch(key, runs, shape, "bits64")
    _require(made.normal64(bits), invert(bits, torch.float64), "normal64")
    for more, low, last in ((None, -5, 6), (bits.flip(0), 2**62, 2**63 + 11), (None, 3, -1)):
        _require(made.scale(bits, more, low, last), scale(bits, more, low, last), "scale")


def _require(found: Tensor, wanted: Tensor, name: str) -> None:
    if not torch.equal(found, wanted):
        raise RuntimeError(f"the compiled kernel makes other numbers of kind {name}")


def prelude() -> str:
    """The constants of philox.c, from the values that the torch form uses."""
    lines = [
        f"#define {name} {value:#x}u" for name, value in (("M0", M0), ("M1", M1), ("W0", W0), ("W1", W1))
    ]
    for form in FORMATS.values():
        lines += _constants(form)
    return "\n".join(lines) + "\n"


def _constants(form: Format) -> list[str]:
    bits = torch.iinfo(form.integer).bits
    wide = numpy.float32 if bits == 32 else numpy.float64
    real, suffix = ("float", "f") if bits == 32 else ("double", "")

    def number(value: float) -> str:
        return float(wide(value)).hex() + suffix

    arrays = {
        "LOG2": log2_series(form),
        "LN": ln_series(form),
        "NORMAL_P": form.p,
        "NORMAL_Q": form.q,
    }
    scalars = {"NORMAL_SCALE": form.scale, "UNIT_SCALE": form.scale / 2, "LN_TWO": math.log(2)}
    return [
        f"#define ROOT_HALF{bits} {form.root_half:#x}",
        f"#define MANTISSA{bits} {form.mantissa}",
        *(f"#define {name}{bits} {number(value)}" for name, value in scalars.items()),
        *(
            f"static const {real} {name}{bits}[] = {{{', '.join(map(number, values))}}};"
            for name, values in arrays.items()
        ),
    ]

"""The cases as files, for programs in other languages, and the judgement on what they wrote back.

    DIR/manifest.json              every case: its operator, options, and the dtype and shape of each tensor
    DIR/0007.inputs.npz            arguments by name; a plan's tensors as plan.row_of_slot, ...
    DIR/0007.expected.npz          what must come out
    DIR/0007.results.npz           what the program writes, under the names of the expected results

With "safetensors" the files end so. With "bin" the names are folders, `0007.inputs/tokens.bin`, of raw little-endian
elements in C order. NumPy has no bfloat16: in .npz files it is uint16, the bits.

Nothing in a file is run: arrays are read without pickle, and sizes, dtypes and shapes are those of the table, checked
before any memory is allocated.
"""

import io
import json
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

import moeroute
from moeroute.conformance.case import Case, Results, each_tensor
from moeroute.conformance.judging import Arithmetic, Finding, Judgement, Verdict, measured
from moeroute.conformance.table import cases, chosen
from moeroute.conformance.tolerance import settled
from moeroute.conformance.verification import one_thread, subnormals_kept
from moeroute.conformance.words import explain
from moeroute.plan import RoutingPlan

Format = Literal["npz", "safetensors", "bin"]
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 * 2**20
HEADER = 4096  # bytes that a format may add to an array
NPZ_DTYPES = {torch.bfloat16: "uint16"}
# The operator of CANN that has this meaning; of a routing map where the plan has `expert_of_slot`.
ACLNN = {
    "gating_topk": "aclnnMoeGatingTopK",
    "gating_topk_backward": "aclnnMoeGatingTopKBackward",
    "permute": "aclnnMoeTokenPermute",
    "permute_backward": "aclnnMoeTokenPermuteGrad",
    "unpermute": "aclnnMoeTokenUnpermute",
    "unpermute_backward": "aclnnMoeTokenUnpermuteGrad",
    "plan_from_segments": "aclnnMoeReRouting",
    "combine": "aclnnMoeFinalizeRoutingV2",
    "spread_quantized": "aclnnMoeInitRoutingV3",
}
ACLNN_OF_MAPS = {
    "permute": "aclnnMoeTokenPermuteWithRoutingMap",
    "permute_backward": "aclnnMoeTokenPermuteWithRoutingMapGrad",
    "unpermute": "aclnnMoeTokenUnpermuteWithRoutingMap",
    "unpermute_backward": "aclnnMoeTokenUnpermuteWithRoutingMapGrad",
}


class Refused(ValueError):
    """A folder or file that cannot be read or written as it should; the message says which and why."""


def export(
    folder: Path, format: Format = "npz", only: str = "", tell: Callable[[int, int], None] = lambda done, of: None
) -> int:
    """Write the cases whose name contains `only`; returns how many.

    Args:
        folder: is made where it is not there; files of the same names are replaced.
        format: "npz", "safetensors" (which needs the package of that name) or "bin".
        only: a part of the case's name.
        tell: called as cases are done, with how many of how many.
    """
    if format not in get_args(Format):
        raise Refused(f"the format must be one of {', '.join(get_args(Format))}; got {format!r}")
    wanted = chosen(only)
    if not wanted:
        raise Refused(f"no case's name contains {only!r}")
    store = _store(format)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    numbers = {case.name: i for i, case in enumerate(cases(), 1)}
    with subnormals_kept(), one_thread():
        for done, case in enumerate(wanted, 1):
            arguments = case.arguments()
            expected = _expected(case)
            stem = f"{numbers[case.name]:04d}"
            inputs = {name: tensor.contiguous() for name, tensor in each_tensor(arguments)}
            store.write(folder / f"{stem}.inputs", inputs)
            store.write(folder / f"{stem}.expected", expected)
            lines.append(_line(case, stem, store, arguments, inputs, expected))
            tell(done, len(wanted))
    about = {"moeroute": moeroute.__version__, "format": format, "byte_order": "little", "cases": lines}
    (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n")
    return len(lines)


def _expected(case: Case) -> Results:
    backend = None if case.through.startswith("moeroute") else "reference"
    found = case.run(case.arguments(), backend)  # type: ignore[arg-type]
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _line(
    case: Case, stem: str, store: "_Store", arguments: Mapping[str, Any], inputs: Results, expected: Results
) -> dict[str, Any]:
    """The manifest's entry."""

    def tensors(found: Results) -> list[dict[str, Any]]:
        return [{"name": n, "dtype": str(t.dtype)[6:], "shape": list(t.shape)} for n, t in found.items()]

    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, RoutingPlan):
            numbers = {f: getattr(value, f) for f in ("num_tokens", "num_rows", "num_experts", "topk")}
            options |= {f"{name}.{f}": number for f, number in numbers.items()}
        elif isinstance(value, torch.dtype):
            options[name] = str(value)[6:]
        elif isinstance(value, bool | int | float | str | None) or (
            isinstance(value, tuple) and all(isinstance(part, int) for part in value)
        ):
            options[name] = value
    plan = arguments.get("plan")
    of_map = isinstance(plan, RoutingPlan) and plan.expert_of_slot is not None
    host = case.operator.partition(".npu_")[2]
    aclnn = (ACLNN_OF_MAPS if of_map else ACLNN).get(case.operator, ACLNN.get(case.operator))
    if host:
        aclnn = "aclnn" + "".join(part.capitalize() for part in host.split("_"))
    return {
        "name": case.name,
        "operator": case.operator,
        "aclnn": aclnn,
        "tags": sorted(case.tags),
        "files": {kind: f"{stem}.{kind}{store.ending}" for kind in ("inputs", "expected", "results")},
        "options": options,
        "inputs": tensors(inputs),
        "expected": tensors(expected),
    }


def compare(
    folder: Path,
    arithmetic: Arithmetic = "bits",
    only: str = "",
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Judgement:
    """Judge the results that a program wrote beside the cases. A case without results is left out.

    Args:
        folder: as `export` made it.
        arithmetic: as for `judge`.
        only: a part of the case's name.
        tell: called as cases are done, with how many of how many.

    Raises:
        Refused: there is no manifest, or no results at all.
    """
    format, names = _manifest(folder / MANIFEST)
    store = _store(format)
    numbers = {case.name: (i, case) for i, case in enumerate(cases(), 1)}
    if unknown := [name for name in names if name not in numbers]:
        raise Refused(f"{folder / MANIFEST}: this version has no case {unknown[0]!r}: export again")
    verdicts: list[Verdict] = []
    left_out: dict[str, dict[str, int]] = {}
    wanted = [name for name in names if only in name]
    for done, name in enumerate(wanted, 1):
        number, case = numbers[name]
        path = folder / f"{number:04d}.results"
        if store.there(path):
            verdicts.append(_judged(case, store, path, arithmetic))
        else:
            reasons = left_out.setdefault(case.operator, {})
            reasons["has no results"] = reasons.get("has no results", 0) + 1
        tell(done, len(wanted))
    if not verdicts:
        raise Refused(
            f"{folder} has no results: write them as the manifest's files.results says, 0001.results{store.ending}"
        )
    return Judgement(str(folder), arithmetic, "files", tuple(verdicts), left_out)


def _manifest(path: Path) -> tuple[Format, list[str]]:
    """The format and the names of the cases; nothing else in it is believed."""
    if not path.is_file():
        raise Refused(f"{path} is not there: moeroute cases export makes it")
    if path.stat().st_size > LARGEST_MANIFEST:
        raise Refused(f"{path} has {path.stat().st_size:,} bytes, more than the {LARGEST_MANIFEST:,} that are read")
    try:
        found = json.loads(path.read_text())
        format, names = found["format"], [line["name"] for line in found["cases"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused(f"{path} is no manifest: {type(error).__name__}: {error}") from None
    if format not in get_args(Format) or not all(isinstance(name, str) for name in names):
        raise Refused(f"{path} is no manifest: format {format!r}")
    return format, names


def _judged(case: Case, store: "_Store", path: Path, arithmetic: Arithmetic) -> Verdict:
    start = time.perf_counter()
    with subnormals_kept(), one_thread():
        arguments, right = case.arguments(), _expected(case)
    try:
        results, complaints = store.read(path, right)
    except Refused as error:
        return Verdict(case.name, case.operator, case.tags, (Finding("error", (str(error),)),))
    words = list(complaints)
    if results:
        compared = results if arithmetic == "bits" else settled(case, arguments, results, right)
        words += explain(case, arguments, compared, right)
    findings = [Finding("values", tuple(words))] if words else []
    missing = [name for name in right if name not in results and not complaints]
    remarks = (f"not written, not judged: {', '.join(missing)}",) if missing else ()
    return measured(case, arguments, results, right, findings, remarks, start)


# ---------------------------------------------------------------------------- formats


class _Store:
    """How tensors are written and read. Reading gives the tensors of the expected names, dtypes and shapes, and
    sentences about those that have others."""

    ending = ""

    def there(self, path: Path) -> bool:
        return self.file(path).is_file()

    def file(self, path: Path) -> Path:
        return path.with_name(path.name + self.ending)

    def write(self, path: Path, tensors: Results) -> None:
        raise NotImplementedError

    def read(self, path: Path, like: Results) -> tuple[Results, list[str]]:
        raise NotImplementedError

    def sized(self, path: Path, like: Results) -> Path:
        """The file, if it is not larger than its tensors can be."""
        file = self.file(path)
        most = 2 * sum(tensor.numel() * tensor.element_size() + HEADER for tensor in like.values()) + 2**20
        if (size := file.stat().st_size) > most:
            raise Refused(f"{file.name} has {size:,} bytes; the results of this case have less than {most:,}")
        return file


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array = tensor.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _as_tensor(content: bytes, like: Tensor) -> Tensor:
    if not content:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(content), dtype=like.dtype).reshape(like.shape)


class _Npz(_Store):
    ending = ".npz"

    def write(self, path: Path, tensors: Results) -> None:
        np.savez(self.file(path), **{name: _as_array(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]

    def read(self, path: Path, like: Results) -> tuple[Results, list[str]]:
        file, found, complaints = self.sized(path, like), {}, []
        try:
            with zipfile.ZipFile(file) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                for name, expected in like.items():
                    entry = entries.get(f"{name}.npy")
                    if entry is None:
                        continue
                    most = expected.numel() * expected.element_size() + HEADER
                    if entry.file_size > most:
                        complaints.append(f"{name}: {entry.file_size:,} bytes where {most:,} are enough")
                        continue
                    with archive.open(entry) as stream:
                        content = io.BytesIO(stream.read(most + 1))
                    tensor = self._array(name, content, expected)
                    if isinstance(tensor, str):
                        complaints.append(tensor)
                    else:
                        found[name] = tensor
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
            raise Refused(f"{file.name}: {type(error).__name__}: {error}") from None
        return found, complaints

    def _array(self, name: str, content: io.BytesIO, like: Tensor) -> Tensor | str:
        """The header is compared before anything of its sizes is made."""
        version = np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(content)
        wanted = np.dtype(NPZ_DTYPES.get(like.dtype, str(like.dtype)[6:])).newbyteorder("<")
        if tuple(shape) != tuple(like.shape):
            return f"{name}: shape {list(shape)} instead of {list(like.shape)}"
        if dtype != wanted:
            return f"{name}: dtype {dtype} instead of {wanted}"
        if fortran and len(shape) > 1:
            return f"{name}: in Fortran order, where C order is expected"
        rest = content.read()
        if len(rest) != like.numel() * like.element_size():
            return f"{name}: {len(rest)} bytes instead of {like.numel() * like.element_size()}"
        return _as_tensor(rest, like)


class _Bin(_Store):
    def there(self, path: Path) -> bool:
        return path.is_dir()

    def write(self, path: Path, tensors: Results) -> None:
        path.mkdir(exist_ok=True)
        for name, tensor in tensors.items():
            (path / f"{name}.bin").write_bytes(_as_array(tensor).tobytes())

    def read(self, path: Path, like: Results) -> tuple[Results, list[str]]:
        found, complaints = {}, []
        for name, expected in like.items():
            file = path / f"{name}.bin"
            if not file.is_file():
                continue
            size = expected.numel() * expected.element_size()
            if file.stat().st_size != size:
                complaints.append(
                    f"{name}: {file.stat().st_size:,} bytes instead of {size:,} for {list(expected.shape)}"
                )
            else:
                found[name] = _as_tensor(file.read_bytes(), expected)
        return found, complaints


class _Safetensors(_Store):
    ending = ".safetensors"

    def write(self, path: Path, tensors: Results) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, self.file(path))

    def read(self, path: Path, like: Results) -> tuple[Results, list[str]]:
        from safetensors import SafetensorError
        from safetensors.torch import load

        file, found, complaints = self.sized(path, like), {}, []
        try:
            tensors = load(file.read_bytes())
        except (SafetensorError, ValueError, OSError) as error:
            raise Refused(f"{file.name}: {type(error).__name__}: {error}") from None
        for name, expected in like.items():
            if (tensor := tensors.get(name)) is None:
                continue
            if tensor.shape != expected.shape or tensor.dtype is not expected.dtype:
                complaints.append(
                    f"{name}: {tensor.dtype} {list(tensor.shape)} instead of {expected.dtype} {list(expected.shape)}"
                )
            else:
                found[name] = tensor
        return found, complaints


def _store(format: Format) -> _Store:
    if format == "npz":
        return _Npz()
    if format == "bin":
        return _Bin()
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        raise Refused("the format safetensors needs the package: pip install '.[cases]' in a clone") from None
    return _Safetensors()

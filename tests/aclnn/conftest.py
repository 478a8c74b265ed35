"""The C library, built once, and C++ programs compiled against it."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moeroute.aclnn.library import build

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    try:
        build._libpython()
    except SystemExit as missing:
        pytest.skip(str(missing))
    folder = tmp_path_factory.mktemp("aclnn")
    build.build(folder)
    return folder


@pytest.fixture(scope="session")
def compiled(prefix: Path) -> Callable[[str, str], Path]:
    """`compiled(name, text)`: the program of this source, linked as a user would."""

    def program(name: str, text: str) -> Path:
        source, result = prefix / f"{name}.cpp", prefix / name
        source.write_text(text)
        command = [str(COMPILER), "-std=c++11", "-Wall", "-Wextra", "-Werror", str(source), "-o", str(result)]
        command += [f"-I{prefix}/include", f"-I{ROOT}/examples/aclnn", f"-L{prefix}/lib", f"-Wl,-rpath,{prefix}/lib"]
        subprocess.run([*command, "-lascendcl", "-lnnopbase", "-lopapi", "-pthread", "-ldl"], check=True)
        return result

    return program


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    def ran(program: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, **environment},
        )

    return ran

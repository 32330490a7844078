"""Packs what SGLang 0.5.16 needs on a GPU host without a network.

    python -m tests.gpu.bundle PAIR [--out .gpu] [--wheels FOLDER] [--kernels FOLDER]

PAIR is a folder of `tests.engine.pair --shape gpu`. The host is to have Python 3.12, torch 2.11
with CUDA 13 and its compiler, triton, aiohttp, numba, numpy, prometheus-client, psutil, pytest
and uvloop. Everything else comes from PyPI by name and version: about 45 MB once packed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Final

from tests.gpu import fatbin

WHEELS: Final = """
    annotated-types==0.8.0
    apache-tvm-ffi==0.1.11
    compressed-tensors==0.20.1
    dill==0.4.1
    distro==1.9.0
    fastapi==0.121.3
    flashinfer-python==0.6.14
    gguf==0.19.0
    iniconfig==2.3.1
    jsonschema==4.26.0
    jsonschema-specifications==2025.9.1
    loguru==0.7.3
    msgspec==0.23.0
    openai==2.6.1
    orjson==3.13.0
    partial-json-parser==0.2.1.1.post7
    pluggy==1.7.0
    pybase64==1.5.1
    pydantic==2.14.4
    pydantic-core==2.50.5
    pytest==9.2.0
    pytest-asyncio==1.5.0
    pytest-timeout==2.4.0
    python-multipart==0.0.34
    pyzmq==27.3.0
    referencing==0.37.0
    rpds-py==2026.9.1
    setproctitle==1.3.8
    sglang==0.5.16
    sglang-kernel==0.4.5
    sniffio==1.3.1
    starlette==0.50.0
    tokenizers==0.22.2
    transformers==5.12.1
    typing-inspection==0.4.5
    uvicorn==0.54.0
""".split()  # noqa: SIM905 - a list to be read
"""transformers newer than 5.12 register a model type that SGLang 0.5.16 registers too."""

ABSENT: Final = re.compile(
    r"sglang/(multimodal_gen|test)/"
    r"|sglang/srt/(grpc|multimodal)/_core\."
    r"|sgl_kernel/(sm100/|flashmla_ops|infllm_ops|spatial_ops)"
    r"|flashinfer/data/cutlass/(examples|test|python)/"
)
"""Parts of wheels that a text model under FlashAttention-3 never touches."""

STAND_INS: Final = {
    "IPython/__init__.py": "",
    "IPython/display.py": "def HTML(*_): ...\n\n\ndef display(*_): ...\n",
    "deep_gemm/__init__.py": "",
    "soundfile.py": "",
    "xgrammar/__init__.py": (
        "from pydantic import BaseModel\n\n\n"
        "class StructuralTag(BaseModel): ...\n\n\n"
        "def get_model_structural_tag(*_, **__):\n"
        "    raise RuntimeError('a stand-in: start with --grammar-backend none')\n"
    ),
}
"""Imported when SGLang starts, never called here."""

LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama 3.1 8B; weights are made up on the host."""
EAGLE3: Final = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
}


def download(folder: Path) -> None:
    """Fetch the wheels of the host's platform."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = [f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 26, 24, 17)]
    tags += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", "--python-version=3.12", "--implementation=cp"),
            *(f"--platform={tag}" for tag in tags),
            *("--dest", str(folder), *WHEELS),
        ],
        check=True,
    )


def unpack(wheels: Path, site: Path) -> None:
    """Lay the wheels out as a folder for PYTHONPATH, without what is never used."""
    for requirement in WHEELS:
        name, _, version = requirement.partition("==")
        (wheel,) = wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if not ABSENT.match(name)]
            archive.extractall(site, members)
    for name, source in STAND_INS.items():
        file = site / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)


def wanted(code: bytes) -> bool:
    """Say whether a FlashAttention-3 kernel is one for bfloat16, head size 128, no soft cap."""
    if not code.startswith(b"\x7fELF"):
        return False  # compressed; none that is needed is
    if b"CollectiveMainloopFwd" not in code:
        return True  # helpers
    mainloop = rb"arch4Sm90ELb[01]ELb[01]ELb%dE"  # causal, local, soft cap
    return (
        re.search(rb"Li128ENS_10bfloat16_tEfNS_4" + mainloop % 0, code) is not None
        and re.search(mainloop % 1, code) is None
        and not any(other in code for other in (b"half_t", b"float_e4m3_t", b"Li192E"))
    )


def pack(tree: Path, archive: Path) -> None:
    """Write a sparse tar, compressed."""
    with archive.open("wb") as output:
        tar = subprocess.Popen(
            ["tar", "-C", str(tree), "--sparse", "-cf", "-", "site"], stdout=subprocess.PIPE
        )
        subprocess.run(["xz", "-T0", "-5"], stdin=tar.stdout, stdout=output, check=True)
        if tar.wait():
            raise SystemExit("tar failed")


def main() -> None:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("pair", type=Path)
    cli.add_argument("--out", type=Path, default=Path(".gpu"))
    cli.add_argument("--wheels", type=Path, help="folder that keeps the downloads")
    cli.add_argument(
        "--kernels",
        type=Path,
        help="kernels that SGLang would compile on the host, as they lie in TVM_FFI_CACHE_DIR",
    )
    options = cli.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch)
        wheels = options.wheels or tree / "wheels"
        download(wheels)
        unpack(wheels, tree / "site")
        library = tree / "site/sgl_kernel/flash_ops.abi3.so"
        kept, count = fatbin.keep(library, wanted, architecture=90)
        subprocess.run(["fallocate", "--dig-holes", str(library)], check=True)
        print(f"{library.name}: {kept} of {count} kernels kept")
        pack(tree, options.out / "site.tar.xz")
    for name, config in (("target", LLAMA), ("draft", EAGLE3)):
        (options.out / name).mkdir(exist_ok=True)
        (options.out / name / "config.json").write_text(json.dumps(config, indent=1))
    shutil.copytree(options.pair, options.out / "pair", dirs_exist_ok=True)
    if options.kernels is not None:
        shutil.copytree(options.kernels, options.out / "kernels", dirs_exist_ok=True)
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    print(f"{options.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

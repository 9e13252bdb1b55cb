"""Builds the CPU image and runs it, without a container daemon: what `make image-test` does.

Where no registry can be reached either, a Debian of its own stands in for the base image: every step of the Dockerfile
is run, but on another distribution. As root, on Debian, with buildah, podman, runc and debootstrap.

    python3 deploy/image/try.py [DIRECTORY]      # where a model and this machine's settings are put; default .image
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE, IMAGE, NAME = "localhost/opticnerve-stand-in", "localhost/opticnerve:cpu", f"opticnerve-try-{os.getpid()}"
TOOLS = ("buildah", "podman", "runc", "debootstrap")
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")

PODMAN = ("podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "--log-level=fatal")
# What the container of a pod may do: no root, no capabilities, and two mounts to write to. It has a network of its own,
# in which there is nothing else. The limits are what can be set on machines that are containers themselves.
RUN = (
    *PODMAN, "run", "--read-only", "--tmpfs=/tmp", "--tmpfs=/cache", "--cap-drop=all",
    "--security-opt=no-new-privileges", "--network=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096",
)  # fmt: skip


def main() -> int:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root and these tools: apt-get install --no-install-recommends {' '.join(TOOLS)}")
        return 2
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".image").resolve()
    directory.mkdir(exist_ok=True)
    make_base(directory)
    build(directory)
    check = look_at()
    models = directory / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    os.chown(models, 10001, 10001)
    run(*RUN, "--rm", f"--volume={models}:/models", IMAGE, "make-checkpoint", "--arch=qwen3_vl", "--out=/models/m")
    serve_and_stop(models, check)
    print("the image builds, starts, answers its probes, encodes, and drains on SIGTERM")
    return 0


def run(*command: str | Path, quiet: bool = False) -> str:
    """Show a command and run it; with `quiet`, what it prints. Ends the program where it fails."""
    print("$", *command, flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE if quiet else None, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout or ""


# --- the image


def make_base(directory: Path) -> None:
    """A minimal Debian as an image, made once."""
    if subprocess.run(["buildah", "inspect", BASE], capture_output=True).returncode == 0:
        return
    rootfs = directory / "rootfs"
    shutil.rmtree(rootfs, ignore_errors=True)
    run("debootstrap", "--variant=minbase", "--include=ca-certificates", "bookworm", rootfs, quiet=True)
    container = run("buildah", "from", "scratch", quiet=True).strip()
    run("buildah", "add", "--quiet", container, rootfs, "/", quiet=True)
    path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    run("buildah", "config", "--env", path, container)
    run("buildah", "commit", "--quiet", "--rm", container, BASE, quiet=True)
    shutil.rmtree(rootfs)


def build(directory: Path) -> None:
    """The Dockerfile with DEVICE=cpu; this machine's authorities and wheels are there for its steps alone."""
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    pip, uv = directory / "pip.conf", directory / "uv.toml"
    pip.write_text(f"[global]\ncert = {AUTHORITIES}\n")
    uv.write_text("system-certs = true\n" + ('find-links = ["/wheels"]\n' if wheels else ""))
    mounts = {str(AUTHORITIES): str(AUTHORITIES), str(pip): "/etc/pip.conf", str(uv): "/etc/uv/uv.toml"}
    arguments = {"DEVICE": "cpu", "CPU": BASE, "CUDA": BASE}
    if wheels:
        mounts[wheels] = "/wheels"
        arguments["TORCH_BACKEND"] = ""  # torch is among them
    run(
        "buildah", "bud", "--isolation=chroot", "--pull-never", "--layers", "--format=docker", "--quiet",
        *(f"--volume={source}:{target}:ro" for source, target in mounts.items()),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        f"--tag={IMAGE}", ".",
    )  # fmt: skip


def look_at() -> list[str]:
    """What the image says of itself, and that it holds no weights; its health check."""
    image = json.loads(run(*PODMAN, "image", "inspect", IMAGE, quiet=True))[0]
    config = image["Config"]
    print(f"  {image['Size'] / 1e6:.0f} MB, user {config['User']}, {config['Entrypoint']} {config['Cmd']}")
    print("  ", config["Labels"])
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["opticnerve-server"], "a shell would keep signals from the server"
    found = run(*RUN, "--rm", "--entrypoint=find", IMAGE, "/opt", "/cache", "-name", "*.safetensors", quiet=True)
    assert not found, f"weights in the image: {found}"
    run(*RUN, "--rm", "--entrypoint=touch", IMAGE, "/tmp/written", "/cache/written")  # Triton's kernels go there
    kind, *check = image["Healthcheck"]["Test"]
    assert kind == "CMD"
    return [str(word) for word in check]


# --- the server


@contextmanager
def server(models: Path) -> Iterator[subprocess.Popen[str]]:
    """A container that serves on the image's own ports; its log goes where this program's does."""
    command = [
        *RUN, f"--name={NAME}", f"--volume={models}:/models:ro", f"--volume={ROOT / 'deploy/demo'}:/photographs:ro",
        IMAGE, "serve", "--model=/models/m", "--drain-delay=2", "--frontends=1", "--preprocess-threads=1",
        "--max-queue-bytes=268435456", "--store-bytes=0",
    ]  # fmt: skip
    print("$", *command, flush=True)
    process = subprocess.Popen(command, text=True)
    try:
        yield process
    finally:
        subprocess.run([*PODMAN, "rm", "--force", NAME], capture_output=True)
        process.wait()


def serve_and_stop(models: Path, check: list[str]) -> None:
    inside = [*PODMAN, "exec", NAME]

    def healthy(*command: str) -> bool:
        return subprocess.run([*inside, *command], capture_output=True).returncode == 0

    probe = ("opticnerve", "health", "--server=127.0.0.1:50052")
    with server(models) as process:
        began = time.monotonic()
        eventually(lambda: healthy(*probe, "liveness"), "liveness")
        print(f"  alive after {time.monotonic() - began:.1f} s, startup is {healthy(*probe, 'startup')}")
        eventually(lambda: healthy(*check), "the image's health check")
        print(f"  ready after {time.monotonic() - began:.1f} s, startup is {healthy(*probe, 'startup')}")
        photographs = [f"/photographs/{name}.jpg" for name in ("astronaut", "retina", "rocket")]
        encode = [*inside, "opticnerve", "encode", "--server=127.0.0.1:50051", *photographs]
        run(*encode)

        call = subprocess.Popen(encode)
        time.sleep(1)  # it is under way, and takes three times as long
        began = time.monotonic()
        run(*PODMAN, "kill", "--signal=TERM", NAME)
        eventually(lambda: not healthy(*check), "not ready any more")
        print(f"  not ready {time.monotonic() - began:.1f} s after SIGTERM")
        assert call.wait(60) == 0, "the call that was under way must be answered"
        code = process.wait(60)
        print(f"  exit code {code}, {time.monotonic() - began:.1f} s after SIGTERM")
        assert code == 0


def eventually(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())

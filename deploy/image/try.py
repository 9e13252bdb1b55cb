"""Builds the CPU image and runs it, without a container daemon: what `make image-test` runs.

Where no registry can be reached either, a Debian of its own stands in for the base image, so every step of the
Dockerfile is run, but on another distribution. As root, on Debian, with buildah, podman, runc and debootstrap.

    python deploy/image/try.py [DIRECTORY]      # where the stand-in is kept; default .image
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BASE, IMAGE, NAME = "localhost/opticnerve-stand-in", "localhost/opticnerve:cpu", f"opticnerve-try-{os.getpid()}"
TOOLS = ("buildah", "podman", "runc", "debootstrap")
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")

# What a container of a Kubernetes pod is: no root, no capabilities, nothing to write to but two mounts.
RESTRICTED = (
    "--read-only", "--tmpfs=/tmp:rw,mode=1777", "--tmpfs=/cache:rw,mode=1777", "--cap-drop=all",
    "--security-opt=no-new-privileges", "--network=host",
)  # fmt: skip
# These limits are what runc may set on machines that are containers themselves.
PODMAN_RUN = (
    "podman", "--runtime=runc", "--cgroup-manager=cgroupfs", "run", "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=4096:4096", *RESTRICTED,
)  # fmt: skip


def main() -> int:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(f"needs root and {', '.join(TOOLS)}: apt-get install --no-install-recommends {' '.join(TOOLS)}")
        return 2
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else ".image").resolve()
    directory.mkdir(exist_ok=True)
    make_base(directory)
    build(directory)
    look_at()
    models = directory / "models"
    shutil.rmtree(models, ignore_errors=True)
    models.mkdir()
    os.chown(models, 10001, 10001)
    run(*PODMAN_RUN, "--rm", f"--volume={models}:/models", IMAGE, "make-checkpoint", "--arch=qwen3_vl", "--out=/models/m")
    serve_and_stop(models)
    print("the image builds, starts, answers its probes, encodes, and drains on SIGTERM")
    return 0


def run(*command: str | Path, quiet: bool = False) -> str:
    """Show a command and run it; what it prints. Ends the program where it fails."""
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
    mounts = {AUTHORITIES: AUTHORITIES, pip: "/etc/pip.conf", uv: "/etc/uv/uv.toml"} | ({wheels: "/wheels"} if wheels else {})
    arguments = {"DEVICE": "cpu", "CPU": BASE, "CUDA_DEVEL": BASE, "CUDA_RUNTIME": BASE}
    if wheels:
        arguments["TORCH_BACKEND"] = ""  # torch is among the wheels
    run(
        "buildah", "bud", "--isolation=chroot", "--pull-never", "--layers", "--format=docker", "--quiet",
        *(f"--volume={source}:{target}:ro" for source, target in mounts.items()),
        *(f"--build-arg={name}={value}" for name, value in arguments.items()),
        f"--tag={IMAGE}", ".",
    )  # fmt: skip


def look_at() -> None:
    """What the image says of itself, and that there is nothing in it that should not be."""
    image = json.loads(run("podman", "image", "inspect", IMAGE, quiet=True))[0]
    config = image["Config"]
    print(f"  {image['Size'] / 1e6:.0f} MB, user {config['User']}, {config['Entrypoint']} {config['Cmd']}")
    print("  ", config["Labels"])
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["opticnerve-server"], "a shell would keep signals from the server"
    assert not run(*PODMAN_RUN, "--rm", "--entrypoint=find", IMAGE, "/", "-xdev", "-name", "*.safetensors", quiet=True)


# --- the server


@contextmanager
def server(models: Path, ports: dict[str, int]) -> Iterator[subprocess.Popen[str]]:
    """A container that serves; its log goes to this program's."""
    listens = {"listen": "grpc", "health-listen": "health", "metrics-listen": "metrics"}
    command = [
        *PODMAN_RUN, f"--name={NAME}", f"--volume={models}:/models:ro", IMAGE, "serve", "--model=/models/m",
        *(f"--{flag}=0.0.0.0:{ports[name]}" for flag, name in listens.items()),
        "--drain-delay=2", "--store-bytes=0", "--frontends=1", "--preprocess-threads=1",
    ]  # fmt: skip
    print("$", *command, flush=True)
    process = subprocess.Popen(command, text=True)
    try:
        yield process
    finally:
        subprocess.run(["podman", "--runtime=runc", "rm", "--force", NAME], capture_output=True)
        process.wait()


def serve_and_stop(models: Path) -> None:
    ports = dict(zip(("grpc", "health", "metrics"), free_ports(3), strict=True))
    with server(models, ports) as process:
        health = f"127.0.0.1:{ports['health']}"
        began = time.monotonic()
        eventually(lambda: probe(health, "liveness"), "liveness")
        print(f"  alive after {time.monotonic() - began:.1f} s, startup {probe(health, 'startup')}")
        eventually(lambda: probe(health, "readiness") and probe(health, "startup"), "readiness and startup")
        print(f"  ready after {time.monotonic() - began:.1f} s")
        photographs = sorted(ROOT.glob("deploy/demo/*.jpg"))
        encode = [BIN / "opticnerve", "encode", "--server", f"127.0.0.1:{ports['grpc']}", *photographs]
        run(*encode)
        call = subprocess.Popen(encode, stdout=subprocess.PIPE, text=True)
        time.sleep(0.7)  # it is under way
        began = time.monotonic()
        run("podman", "--runtime=runc", "kill", "--signal", "TERM", NAME)
        eventually(lambda: not probe(health, "readiness"), "not ready any more")
        print(f"  not ready {time.monotonic() - began:.1f} s after SIGTERM")
        assert call.wait(60) == 0, "the call that was under way must be answered"
        code = process.wait(60)
        print(f"  exit code {code}, {time.monotonic() - began:.1f} s after SIGTERM")
        assert code == 0


def probe(address: str, service: str) -> bool:
    """What the kubelet asks, with the image's own health check command."""
    command = [BIN / "opticnerve", "health", "--server", address, service]
    return subprocess.run(command, capture_output=True).returncode == 0


def eventually(condition: object, what: str, seconds: float = 120.0) -> None:
    assert callable(condition)
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit(f"not within {seconds:g} s: {what}")
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())

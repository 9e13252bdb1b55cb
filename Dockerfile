# The server's image, without weights.
#   docker build -t opticnerve:0.1.0 .                              for NVIDIA GPUs
#   docker build --build-arg DEVICE=cpu -t opticnerve:0.1.0-cpu .   for demos and CI
# Attention beside torch's own, by the extras of pyproject.toml: --build-arg EXTRAS="server hub otel flash-attn flashinfer"

ARG DEVICE=cuda
ARG CUDA=nvidia/cuda:13.0.2-runtime-ubuntu24.04@sha256:6a0e31b59e70890446f2c17356d6efc0d54260090a8c63d6ca7c2ad049db95d2
ARG CPU=ubuntu:noble-20260113@sha256:cd1dba651b3080c3686ecf4e3c4220f026b521fb76978881737d24f200828b2b

# --- what the two kinds differ in

FROM ${CPU} AS build-cuda
ARG TORCH_BACKEND=cu130
ENV TORCH_BACKEND=${TORCH_BACKEND}

FROM ${CPU} AS build-cpu
ARG TORCH_BACKEND=cpu
ENV TORCH_BACKEND=${TORCH_BACKEND}

FROM ${CUDA} AS base-cuda
# Triton compiles a launcher for each kernel when it is first used.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

FROM ${CPU} AS base-cpu

# --- the environment, in layers from what changes least

FROM build-${DEVICE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/uv \
    && /opt/uv/bin/pip install --no-cache-dir uv==0.13.9
# Byte code is compiled here: the servers' file system is read-only, and importing torch without takes twice as long.
ENV PATH=/opt/uv/bin:$PATH UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 VIRTUAL_ENV=/opt/opticnerve
WORKDIR /src
COPY pyproject.toml constraints.txt ./
ARG EXTRAS="server hub otel"
# hadolint ignore=SC2046,SC2086
RUN --mount=type=cache,target=/root/.cache/uv \
    uv venv --python /usr/bin/python3 "$VIRTUAL_ENV" \
    && uv pip install ${TORCH_BACKEND:+"--torch-backend=$TORCH_BACKEND"} \
        --requirements pyproject.toml $(printf -- '--extra %s ' $EXTRAS) --constraint constraints.txt
COPY README.md LICENSE ./
COPY client client
COPY server server
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --no-deps .

# --- what is shipped

FROM base-${DEVICE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /cache --shell /usr/sbin/nologin opticnerve \
    && install -d -m 1777 /cache
COPY --from=build /opt/opticnerve /opt/opticnerve

# All that is written goes below HOME and to /tmp. Both may be mounts of a file system that is otherwise read-only, of which
# some runtimes give a mount the mode of what it covers, but not the owner.
ENV PATH=/opt/opticnerve/bin:$PATH \
    HOME=/cache \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OPTICNERVE_LISTEN=0.0.0.0:50051 \
    OPTICNERVE_HEALTH_LISTEN=0.0.0.0:50052 \
    OPTICNERVE_METRICS_LISTEN=0.0.0.0:9090
USER 10001:10001
WORKDIR /cache
EXPOSE 50051 50052 9090
STOPSIGNAL SIGTERM
# For Docker alone: Kubernetes asks the health port itself.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["opticnerve", "health", "--server", "127.0.0.1:50052", "readiness"]
ENTRYPOINT ["opticnerve-server"]
CMD ["serve"]

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="opticnerve" \
      org.opencontainers.image.description="The vision encoder of a vision-language model as a gRPC service" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

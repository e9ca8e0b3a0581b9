# An image that has the wheel installed.
#
#   docker build -t offloadd .                                       on NVIDIA's CUDA
#   docker build -t offloadd --build-arg BASE=rocm/pytorch:latest .  on AMD's ROCm, with the torch of that image

ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM rust:1.95.0-bookworm AS build
ENV RUSTUP_TOOLCHAIN=1.95.0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/python && /opt/python/bin/pip install --no-cache-dir maturin==1.16.0
WORKDIR /offloadd
COPY . .
RUN make wheel PYTHON=/opt/python/bin/python JOBS="$(nproc)"

# hadolint ignore=DL3006
FROM ${BASE}
ENV PATH=/opt/python/bin:$PATH
# Images with PyTorch keep their Python and their torch.
# hadolint ignore=DL3008
RUN if ! python3 -c 'import torch' 2>/dev/null; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/* \
        && python3 -m venv /opt/python && python3 -m pip install --no-cache-dir torch==2.11.0; \
    fi
RUN --mount=type=bind,from=build,source=/offloadd/target/wheels,target=/wheels python3 -m pip install --no-cache-dir /wheels/*.whl && offloadd --version

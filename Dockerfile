# The wheel, and an image that has it installed.
#
#   docker build -t offloadd .                                       on NVIDIA's CUDA
#   docker build -t offloadd --build-arg BASE=rocm/pytorch:latest .  on AMD's ROCm, with the torch of that image
#   docker build --target wheel --output type=local,dest=target/wheels .
#
# The wheel is built where glibc is 2.28, so that it runs wherever PyTorch's own wheels do.

ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM rust:1.95.0-bookworm AS rust

FROM almalinux:8 AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The newer compiler links what the system's libstdc++ lacks into the program.
# hadolint ignore=DL3041
RUN dnf install -y binutils diffutils gcc-toolset-14-gcc-c++ make python3.11 python3.11-pip && dnf clean all
COPY --from=rust /usr/local/rustup /usr/local/rustup
COPY --from=rust /usr/local/cargo /usr/local/cargo
ENV RUSTUP_HOME=/usr/local/rustup RUSTUP_TOOLCHAIN=1.95.0 CARGO_HOME=/usr/local/cargo
ENV PATH=/opt/rh/gcc-toolset-14/root/usr/bin:/usr/local/cargo/bin:$PATH
RUN ln -s /usr/bin/python3.11 /usr/local/bin/python3 && python3 -m pip install --no-cache-dir maturin==1.16.0
WORKDIR /offloadd
COPY . .
RUN make wheel PYTHON=python3 JOBS="$(nproc)" && ls target/wheels/*manylinux_2_28_x86_64.whl

FROM scratch AS wheel
COPY --from=build /offloadd/target/wheels /

# hadolint ignore=DL3006
FROM ${BASE}
ENV PATH=/opt/python/bin:$PATH
# Images with PyTorch keep their Python and their torch.
# hadolint ignore=DL3008
RUN if ! python3 -c 'import torch' 2>/dev/null; then \
        apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/* \
        && python3 -m venv /opt/python && python3 -m pip install --no-cache-dir torch==2.11.0; \
    fi
RUN --mount=type=bind,from=wheel,target=/wheels python3 -m pip install --no-cache-dir /wheels/*.whl && offloadd --version

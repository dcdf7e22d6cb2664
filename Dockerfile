# Holdfast for CPUs: docker build -t holdfast . && docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" holdfast quickstart
# For CUDA: --build-arg EXTRAS=cuda13, and `docker run --gpus all` on a host with NVIDIA's container toolkit; the CUDA
# libraries come with JAX's wheels, so the base stays the same.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG EXTRAS=board,figures
COPY constraints.txt /tmp/constraints.txt
RUN --mount=from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir -c /tmp/constraints.txt "$(echo /wheels/holdfast-*.whl)[${EXTRAS}]" && rm /tmp/constraints.txt
# Whoever runs it writes runs that are theirs: any user may write in the home, where prepared data is kept.
RUN useradd --home-dir /cache --create-home holdfast && mkdir /work && chmod 777 /work /cache
ENV HOME=/cache
USER holdfast
WORKDIR /work
ENTRYPOINT ["holdfast"]
CMD ["--help"]

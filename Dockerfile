# vitserve in a container (docs/deployment.md). The variant `cpu` also builds for arm64.

# The tag moves. To pin it, set PYTHON_IMAGE=python:3.11-slim@sha256:..., with the digest that
# `docker buildx imagetools inspect python:3.11-slim` shows. The release workflow does so.
ARG PYTHON_IMAGE=python:3.11-slim
# `cpu`, `cuda` (CUDA 13), or `cuda12` for hosts with older drivers.
ARG VARIANT=cpu

FROM ${PYTHON_IMAGE} AS dependencies
# For `strip`, and to compile the resize kernel.
RUN apt-get update && apt-get install --yes --no-install-recommends binutils gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml constraints.txt deploy/image/requirements.txt ./
ENV PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
# pip works from outside, because the service does not need it.
RUN python -m venv --without-pip /opt/venv
ARG VARIANT
# The index of torch, if it is not the variant's. Empty: the default index, whose Linux build is for
# CUDA 13.
ARG TORCH_INDEX_URL
# These extras are small and idle until they are used. The variant `cpu` adds openvino.
ARG EXTRAS="gpu hub redis otel grpc isolation"
# timm requires torchvision of the same build as torch. Dependencies of torch come below; for CUDA 12,
# only its index has all of them.
# hadolint ignore=SC2086
RUN case "${VARIANT}" in \
        cpu) index=https://download.pytorch.org/whl/cpu ;; \
        cuda12) index=https://download.pytorch.org/whl/cu126 ;; \
        *) index= ;; \
    esac \
    && index="${TORCH_INDEX_URL-${index}}" \
    && case " ${EXTRAS} " in *" timm "*) torchvision=torchvision ;; esac \
    && pip --python /opt/venv/bin/python install ${index:+--index-url "${index}"} \
        $([ "${VARIANT}" = cuda12 ] || echo --no-deps) torch ${torchvision:-}
# Hashes in requirements.txt pin the other packages, except for extras that `make locks` does not name.
# hadolint ignore=SC2086
RUN if [ "${VARIANT}" = cpu ]; then EXTRAS="${EXTRAS} openvino"; fi \
    && python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        extras = project["optional-dependencies"]; \
        print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")' \
        ${EXTRAS} >asked.txt \
    && pip --python /opt/venv/bin/python install --quiet --dry-run --report needed.json -r asked.txt \
    && python -c 'import json, re; needed = [each["metadata"]["name"] for each in json.load(open("needed.json"))["install"]]; \
        names = {re.sub("[-_.]+", "-", name).lower() for name in needed}; \
        locked = re.findall(r"^\w(?:.*\\\n)*.*$", open("requirements.txt").read(), re.M); \
        print(*(each for each in locked if each.partition("==")[0] in names), sep="\n")' >locked.txt \
    && pip --python /opt/venv/bin/python install --no-deps --require-hashes -r locked.txt \
    && pip --python /opt/venv/bin/python install -r asked.txt
COPY deploy/image/slim.py ./
RUN python slim.py /opt/venv

# A layer of its own, so that a change of code replaces megabytes instead of gigabytes.
FROM dependencies AS code
COPY README.md LICENSE setup.py ./
COPY examples examples
COPY deploy/grafana/dashboards deploy/grafana/dashboards
COPY deploy/prometheus deploy/prometheus
COPY model model
COPY service service
COPY vitserve vitserve
RUN pip --python /opt/venv/bin/python install --no-deps --no-warn-script-location --root /code .

FROM ${PYTHON_IMAGE} AS system
# torch.compile needs a C++ compiler and Python.h. Official Python images have Python.h; Debian's
# python3 does not. With an empty COMPILER, `VIT_COMPILE=on` refuses to start.
ARG COMPILER=g++
# Removes files for link-time optimisation, sanitisers and static programs.
# hadolint ignore=SC2086
RUN test -z "${COMPILER}" || { \
        packages="${COMPILER}" \
        && { test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
            || packages="$packages python3-dev"; } \
        && apt-get update && apt-get install --yes --no-install-recommends $packages \
        && apt-get clean && rm -rf /var/lib/apt/lists/* \
        && rm -f /usr/lib*/gcc/*/*/lto1 /usr/bin/*lto-dump* /usr/lib/gcc/*/*/libstdc++.a \
            /usr/lib/*-linux-gnu/libc.a /usr/lib/*-linux-gnu/libpython*.a /usr/lib/python3*/config-*/libpython*.a \
            /usr/lib/gcc/*/*/lib*san.a /usr/lib/*-linux-gnu/lib*san.so.*; }
# libseccomp filters the system calls of decoder processes; the extra `isolation` is its binding.
# The uid is fixed, so an operator can grant it access to a host folder.
RUN apt-get update && apt-get install --yes --no-install-recommends libseccomp2 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin vitserve \
    && install --directory --owner=vitserve --group=vitserve /cache /cache/tmp

# With these variables, the NVIDIA Container Toolkit refuses a host with too old a driver. Otherwise
# the service would fail repeatedly. CUDA 12.6 runs on drivers from 525 on; CUDA 13 needs 580.
FROM system AS system-cpu
FROM system AS system-cuda
ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"
FROM system AS system-cuda12
ENV NVIDIA_REQUIRE_CUDA="cuda>=12.0"

# hadolint ignore=DL3006
FROM system-${VARIANT}
WORKDIR /app
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /code /
COPY deploy/healthcheck.py ./
# TMPDIR is in the volume, because torch keeps 150 MB of precompiled headers there. OpenBLAS (from
# NumPy) has one thread, because its products are small; by default it starts one for each core.
ENV PATH=/opt/venv/bin:$PATH \
    VIT_HOST=0.0.0.0 \
    VIT_CACHE_DIR=/cache/vitserve \
    HF_HOME=/cache/huggingface \
    TMPDIR=/cache/tmp \
    OPENBLAS_NUM_THREADS=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
# Fails the build if slim.py removed a file that the service needs.
RUN for compile in off auto; do \
        VIT_CACHE_DIR=off VIT_COMPILE=$compile vitserve classify /opt/venv/lib/python3*/site-packages/service/cli/example.jpg || exit; done
# A build has no GPU, so the first start compiles and fills the volume.
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# A large model may compile for a long time before it is ready. A success ends the start period early.
HEALTHCHECK --interval=5s --timeout=5s --start-period=900s --retries=3 CMD ["python", "/app/healthcheck.py"]
ENTRYPOINT ["vitserve"]
CMD ["serve"]
# Last, because labels change with each build. `make image` takes them from the project, git and the
# clock; SOURCE is the URL of your repository.
ARG PYTHON_IMAGE
ARG VERSION=
ARG REVISION=
ARG CREATED=
ARG SOURCE=
LABEL org.opencontainers.image.title="vitserve" \
    org.opencontainers.image.description="Serves a Vision Transformer over HTTP: batched classification, attention maps, Prometheus metrics." \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.created="${CREATED}" \
    org.opencontainers.image.source="${SOURCE}" \
    org.opencontainers.image.base.name="${PYTHON_IMAGE}"

# vitserve in a container; docs/deployment.md says how to run it. The variant `cpu` builds for arm64 too.

# The tag moves. `docker buildx imagetools inspect python:3.11-slim` shows its digest: PYTHON_IMAGE=python:3.11-slim@sha256:...
# holds it, and a release's workflow does so.
ARG PYTHON_IMAGE=python:3.11-slim
# What the image is for: `cpu`, `cuda` (CUDA 13), or `cuda12` for hosts with older drivers.
ARG VARIANT=cpu

FROM ${PYTHON_IMAGE} AS dependencies
# For `strip`, and to compile the kernel that resizes pictures.
RUN apt-get update && apt-get install --yes --no-install-recommends binutils gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml constraints.txt deploy/image/requirements.txt ./
ENV PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
# pip works from outside: the service has no use for a copy of it.
RUN python -m venv --without-pip /opt/venv
ARG VARIANT
# Where torch comes from, if not from the variant's own index. Empty: the default index, whose Linux build is for CUDA 13.
ARG TORCH_INDEX_URL
# These extras are small, and quiet where they have nothing to do; the variant `cpu` adds openvino, which is neither.
ARG EXTRAS="gpu hub redis otel grpc isolation"
# timm brings torchvision, which has to be of the same build as torch. What torch needs comes below; of CUDA 12 only its index
# has all.
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
# What is still needed is held by the hashes in requirements.txt, but of extras that `make locks` does not name.
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

# Apart from its dependencies, so that a change of code replaces megabytes and not gigabytes.
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
# torch.compile needs a C++ compiler and Python.h; official Python images carry the latter, Debian's python3 does not.
# With COMPILER= there is neither, and `VIT_COMPILE=on` says so.
ARG COMPILER=g++
# What only link-time optimisation, sanitisers and static programs use is not kept.
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
# The filter of system calls of decoder processes is libseccomp's; the extra `isolation` is its binding.
# The uid is fixed, so that a host folder can be made readable or writable for it.
RUN apt-get update && apt-get install --yes --no-install-recommends libseccomp2 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin vitserve \
    && install --directory --owner=vitserve --group=vitserve /cache /cache/tmp

# The NVIDIA Container Toolkit refuses to start a container whose driver is too old, instead of a service that fails again
# and again. CUDA 12.6 runs on drivers that know 12.0, which are those from 525 on; CUDA 13 needs 580.
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
# TMPDIR too, as torch keeps 150 MB of precompiled headers in it. OpenBLAS, which NumPy brings, would start a thread a core in
# every process for products that are never large.
ENV PATH=/opt/venv/bin:$PATH \
    VIT_HOST=0.0.0.0 \
    VIT_PORT=8000 \
    VIT_CACHE_DIR=/cache/vitserve \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    CUDA_CACHE_PATH=/cache/cuda \
    TMPDIR=/cache/tmp \
    OPENBLAS_NUM_THREADS=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
# A file that slim.py should have left alone is missed here, and not by a user.
RUN for compile in off auto; do \
        VIT_CACHE_DIR=off VIT_COMPILE=$compile vitserve classify /opt/venv/lib/python3*/site-packages/service/cli/example.jpg || exit; done
# A build has no GPU to compile for: the first start compiles, and fills the volume.
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# The long start period is for a large model that is compiled before it is ready; a success ends it early.
HEALTHCHECK --interval=5s --timeout=5s --start-period=900s --retries=3 CMD ["python", "/app/healthcheck.py"]
ENTRYPOINT ["vitserve"]
CMD ["serve"]
# Last, as they change with each build. `make image` gives what the project, git and the clock know; SOURCE is your repository's URL.
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

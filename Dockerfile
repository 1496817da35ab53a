# vitserve in a container; docs/deployment.md says how to run it.

ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS dependencies
WORKDIR /build
COPY pyproject.toml constraints.txt ./
ENV PIP_CONSTRAINT=/build/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
# pip works from outside: the service has no use for a copy of it.
RUN python -m venv --without-pip /opt/venv
# Where torch comes from. Empty: the default index, whose Linux build is for CUDA.
# https://download.pytorch.org/whl/cpu holds the CPU's build, a fraction of the size.
ARG TORCH_INDEX_URL=
RUN pip --python /opt/venv/bin/python install ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} torch
# These extras are small, and quiet where they have nothing to do; the CPU's image adds openvino, which is neither.
ARG EXTRAS="gpu hub redis otel"
RUN python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        extras = project["optional-dependencies"]; \
        print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")' \
        ${EXTRAS} >requirements.txt \
    && pip --python /opt/venv/bin/python install -r requirements.txt

# Apart from its dependencies, so that a change of code replaces megabytes and not gigabytes.
FROM dependencies AS code
COPY README.md LICENSE ./
COPY model model
COPY service service
COPY vitserve vitserve
RUN pip --python /opt/venv/bin/python install --no-deps --no-warn-script-location --root /code .

FROM ${PYTHON_IMAGE}
# torch.compile needs a C++ compiler and Python.h; official Python images carry the latter, Debian's python3 does not.
RUN apt-get update \
    && packages=g++ \
    && { test -e "$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
        || packages="$packages python3-dev"; } \
    && apt-get install --yes --no-install-recommends $packages \
    && apt-get clean && rm -rf /var/lib/apt/lists/*
# The uid is fixed, so that a host folder can be made readable or writable for it.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache --shell /usr/sbin/nologin vitserve \
    && install --directory --owner=vitserve --group=vitserve /cache /cache/tmp
WORKDIR /app
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=code /code /
COPY deploy/healthcheck.py ./
# TMPDIR too, as torch keeps 150 MB of precompiled headers in it.
ENV PATH=/opt/venv/bin:$PATH \
    VIT_HOST=0.0.0.0 \
    VIT_PORT=8000 \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    CUDA_CACHE_PATH=/cache/cuda \
    TMPDIR=/cache/tmp \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
# The long start period is for a large model that is compiled before it is ready; a success ends it early.
HEALTHCHECK --interval=5s --timeout=5s --start-period=300s --retries=3 CMD ["python", "/app/healthcheck.py"]
ENTRYPOINT ["vitserve"]
CMD ["serve"]

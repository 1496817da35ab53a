#!/usr/bin/env bash
# Proves an offline bundle on the host that has it: checksums, then a picture classified by the container and by the wheels,
# neither with a network. `check.sh images` and `check.sh wheels` do one of the two. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
what=${1:-all}
sha256sum --quiet --check SHA256SUMS

if [[ $what != wheels ]]; then
  docker load --quiet --input images.tar.gz
  xargs docker image inspect --format '{{.Id}}' <images.txt
  docker compose config --quiet
  docker run --rm --network none --volume "$PWD/examples:/examples:ro" "$(head -n 1 images.txt)" classify /examples/dog.jpg
fi

if [[ $what != images ]]; then
  environment=$(mktemp -d)
  trap 'rm -rf "$environment"' EXIT
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/pip" install --quiet --disable-pip-version-check --no-index --find-links wheels \
    --constraint constraints.txt --requirement requirements.txt
  "$environment/bin/vitserve" classify examples/dog.jpg
fi

#!/usr/bin/env bash
# Writes a folder with which a host without a network runs vitserve, in a container or without: `make bundle`.
# Images are those of COMPOSE_FILE and COMPOSE_PROFILES, from the environment or from .env; vitserve's must have been built.
# Wheels are for the processor and the Python of PYTHON. Arguments: the folder, which must not exist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bundle=${1:?the folder to write}
python=${PYTHON:-.venv/bin/python}
extras=${BUNDLE_EXTRAS:-gpu,hub,openvino,redis,otel,grpc}

setting() { # Its value in the environment, else in .env, else the default.
  local value=${!1:-}
  [[ -n $value || ! -f .env ]] || value=$(sed -n "s/^$1=//p" .env | tail -n 1)
  echo "${value:-${2:-}}"
}
COMPOSE_FILE=$(setting COMPOSE_FILE docker-compose.yml:docker-compose.override.yml)
COMPOSE_PROFILES=$(setting COMPOSE_PROFILES)
export COMPOSE_FILE COMPOSE_PROFILES

mkdir -p "$(dirname "$bundle")"
mkdir "$bundle"
IFS=: read -ra files <<<"$COMPOSE_FILE"
cp -r "${files[@]}" constraints.txt deploy/bundle/{README.md,check.sh,docker-compose.offline.yml} "$bundle"
mkdir -p "$bundle"/{deploy/grafana,checkpoints,examples,wheels}
cp -r deploy/prometheus "$bundle/deploy"
cp -r deploy/grafana/{dashboards,provisioning} "$bundle/deploy/grafana"
cp examples/dog.jpg "$bundle/examples"

service=$(docker compose config --images vitserve | grep vitserve:)
mapfile -t images < <(echo "$service"; docker compose config --images | sort -u | grep -vxF "$service")
for image in "${images[@]}"; do
  docker image inspect "$image" >/dev/null 2>&1 || docker pull "$image"
done
echo "Saving ${images[*]} ..."
docker save "${images[@]}" | gzip >"$bundle/images.tar.gz"
printf '%s\n' "${images[@]}" >"$bundle/images.txt" # vitserve's is the first
docker run --rm --network none --entrypoint cat "$service" /usr/share/doc/vitserve/sbom.cdx.json >"$bundle/sbom.cdx.json"

tags=()
for name in VITSERVE_TAG PROMETHEUS_TAG GRAFANA_TAG COMPOSE_PROFILES; do
  value=$(setting "$name")
  [[ -z $value ]] || tags+=("$name=$value")
done
printf '%s\n' "COMPOSE_FILE=$COMPOSE_FILE:docker-compose.offline.yml" ${tags[@]+"${tags[@]}"} >"$bundle/.env"

echo "Collecting wheels ..."
# Where the image has its torch from, so that a bundle for hosts without a GPU has the CPU's build.
index=$(docker compose config --format json | "$python" -c 'import json, sys
print(json.load(sys.stdin)["services"]["vitserve"]["build"]["args"].get("TORCH_INDEX_URL") or "")')
wheel=("$python" -m pip wheel --quiet --disable-pip-version-check --constraint constraints.txt --wheel-dir "$bundle/wheels")
[[ -z $index ]] || "${wheel[@]}" --index-url "$index" torch
"${wheel[@]}" --find-links "$bundle/wheels" ".[$extras]"
echo "vitserve[$extras]" >"$bundle/requirements.txt"

(cd "$bundle" && find . -type f ! -name SHA256SUMS -print0 | sort -z | xargs -0 sha256sum >SHA256SUMS)
du -sh "$bundle"

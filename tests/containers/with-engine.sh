#!/usr/bin/env bash
# with-engine.sh COMMAND…: runs a command that needs a container engine, with Compose v2 and buildx.
#
# An engine that answers is used as it is. Where none does, root on Debian gets one of this folder's own, from Debian's
# packages; it ends with the command. Its images stay in build/engine, so that only the first build takes long. Where no
# engine can run, the status is 77.
#
# Where no registry answers either, stand-ins take the names of the base images: Debian's Python 3.11 and Redis 7.0,
# made by mmdebstrap. They show that our files work, and nothing about the images of a registry.
set -euo pipefail
cd "$(dirname "$0")/../.."

BASES=(python:3.11-slim-bookworm redis:7.2-bookworm)
SUITE=bookworm
PLUGINS_SUITE=trixie # the first release with Compose v2 and buildx
KEPT=$PWD/build/engine

say() { echo "with-engine.sh: $*" >&2; }
die() { say "$*"; exit 1; }
none() { say "$*"; exit 77; }
# Without them, pip takes the build with CUDA: docs/containers.md.
torch_for_cpus() { export TORCH_OPTIONS="${TORCH_OPTIONS---index-url https://download.pytorch.org/whl/cpu}"; }
quietly() { "$@" > "$KEPT/log" 2>&1 || { tail -5 "$KEPT/log" >&2; die "failed: $*"; }; }

[ $# -gt 0 ] || die "usage: with-engine.sh COMMAND…"
if docker compose version > /dev/null 2>&1 && docker info > /dev/null 2>&1; then torch_for_cpus; exec "$@"; fi
[ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || none "no container engine answers, and only root on Debian gets one here"

mkdir -p "$KEPT/config/cli-plugins"
# Two engines on the same data would spoil them. The engine inherits the lock, and has it for as long as it lives.
exec 9> "$KEPT/lock"
flock --nonblock 9 || die "an engine uses $KEPT; if its run was killed: kill $(pgrep -d ' ' -f "^dockerd .*--data-root $KEPT/data" || true)"
# The path of a socket must be short.
RUN=$(mktemp -d /tmp/engine-XXXXXX)
export DOCKER_HOST=unix://$RUN/socket DOCKER_CONFIG=$KEPT/config

packages() {
    command -v dockerd > /dev/null && command -v mmdebstrap > /dev/null && return
    say "installing docker.io and mmdebstrap"
    # Debian's package would start an engine of its own.
    local policy=/usr/sbin/policy-rc.d
    [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; trap "rm -f $policy" RETURN; }
    quietly apt-get -qq update
    DEBIAN_FRONTEND=noninteractive quietly apt-get -qq install --yes --no-install-recommends docker.io iptables iproute2 mmdebstrap
}

# The address from which apt takes Debian's packages.
mirror() {
    apt-get indextargets --format '$(RELEASE) $(COMPONENT) $(REPO_URI)' "Created-By: Packages" |
        awk -v suite=$SUITE '$1 == suite && $2 == "main" {print $3; exit}'
}

plugins() {
    [ -x "$DOCKER_CONFIG/cli-plugins/docker-buildx" ] && return
    say "unpacking Compose v2 and buildx of Debian's release $PLUGINS_SUITE"
    mkdir -p "$RUN/apt/lists/partial" "$RUN/apt/cache/archives/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) $PLUGINS_SUITE main" > "$RUN/apt/sources"
    local options=(-qq -o "Dir::Etc::sourcelist=$RUN/apt/sources" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$RUN/apt/lists" -o "Dir::Cache=$RUN/apt/cache" -o APT::Sandbox::User=root) name
    quietly apt-get "${options[@]}" update
    (cd "$RUN/apt" && quietly apt-get "${options[@]}" download docker-compose docker-buildx)
    for name in docker-compose docker-buildx; do
        dpkg-deb -x "$RUN/apt/$name"_*.deb "$RUN/apt/$name"
        install "$(find "$RUN/apt/$name" -type f -path "*cli-plugins/$name")" "$DOCKER_CONFIG/cli-plugins/$name"
    done
}

start() {
    say "starting $(dockerd --version)"
    FORWARDS=$(cat /proc/sys/net/ipv4/ip_forward) POLICY=$(iptables --list-rules FORWARD 2> /dev/null | head -1)
    setsid dockerd --host "$DOCKER_HOST" --pidfile "$RUN/pid" --data-root "$KEPT/data" --exec-root "$RUN/exec" > "$KEPT/dockerd.log" 2>&1 < /dev/null &
    local left=300
    until docker info > /dev/null 2>&1; do
        sleep 0.2
        [ $((left -= 1)) -gt 0 ] && kill -0 $! 2> /dev/null || { tail -5 "$KEPT/dockerd.log" >&2; none "the engine does not answer"; }
    done
}

# What the engine leaves behind when it ends: containers, networks, its bridge, rules, mounts.
stop() {
    if [ -s "$RUN/pid" ]; then
        docker ps --all --quiet | xargs --no-run-if-empty docker rm --force --volumes > /dev/null || true
        docker network prune --force > /dev/null || true
        docker image prune --force > /dev/null || true # those that a later build has replaced
        local pid left=300
        pid=$(cat "$RUN/pid")
        kill "$pid" || true
        while kill -0 "$pid" 2> /dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 0.2; done
        kill -9 "$pid" 2> /dev/null || true
        if ! [ -S /run/docker.sock ]; then # no other engine has them
            ip link delete docker0 2> /dev/null || true
            iptables-save | grep -vi docker | iptables-restore || true
            [ -z "$POLICY" ] || iptables $POLICY || true
            echo "$FORWARDS" > /proc/sys/net/ipv4/ip_forward || true
        fi
    fi
    [ -z "${WHEELS:-}" ] || kill "$WHEELS" || true
    awk -v top="$RUN/" -v kept="$KEPT/" 'index($5, top) == 1 || index($5, kept) == 1 {print $5}' /proc/self/mountinfo |
        sort -r | xargs --no-run-if-empty umount --lazy
    rm -rf "$RUN"
}

has() { docker image inspect "$1" > /dev/null 2>&1; }

# A folder of wheels, where pip's settings name one: it is served, because a build sees no folder of this machine.
wheels() {
    local folder bridge
    for folder in ${PIP_FIND_LINKS:-$(python3 -m pip config get global.find-links 2> /dev/null)}; do
        [ -d "$folder" ] || continue
        bridge=$(ip -4 -o address show docker0 | awk '{sub("/.*", "", $4); print $4}')
        setsid python3 -m http.server --bind "$bridge" --directory "$folder" 8998 > /dev/null 2>&1 < /dev/null 9>&- &
        WHEELS=$!
        FIND_LINKS="find-links = http://$bridge:8998/"$'\n'"trusted-host = $bridge"
    done
}

stand_ins() {
    say "no registry answers: making stand-ins of the base images with mmdebstrap, $SUITE"
    local files=$RUN/context/files index
    mkdir -p "$files/etc/ssl/certs"
    # As in Debian's image, dpkg does not wait for the disk after each file.
    quietly mmdebstrap --variant=minbase --dpkgopt=force-unsafe-io $SUITE "$RUN/system.tar" "$(mirror)"
    docker import "$RUN/system.tar" debian-stand-in:$SUITE > /dev/null
    rm "$RUN/system.tar"
    # They trust what this machine trusts, and take packages from where it does.
    cp -L /etc/ssl/certs/ca-certificates.crt "$files/etc/ssl/certs/"
    index=$(python3 -m pip config get global.index-url 2> /dev/null) && index="index-url = $index" || index=
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n%s\n%s\n' "$index" "${FIND_LINKS:-}" > "$files/etc/pip.conf"
    local install='apt-get update && apt-get install --yes --no-install-recommends'
    quietly docker build --tag "${BASES[0]}" --file - "$RUN/context" <<DOCKERFILE
FROM debian-stand-in:$SUITE
RUN $install ca-certificates netbase tzdata python3 python3-venv && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/python3 /usr/local/bin/python
COPY files/ /
DOCKERFILE
    # As in the registry's image, the user redis is 999 and owns /data.
    quietly docker build --tag "${BASES[1]}" --file - "$RUN/context" <<DOCKERFILE
FROM debian-stand-in:$SUITE
RUN groupadd --system --gid 999 redis && useradd --system --gid redis --uid 999 --no-create-home redis \
 && $install redis-server && rm -rf /var/lib/apt/lists/* && install --directory --owner=redis --group=redis /data
VOLUME /data
WORKDIR /data
DOCKERFILE
}

trap stop EXIT
trap 'exit 130' INT TERM
packages
plugins
start
wheels
[ -n "${WHEELS:-}" ] || torch_for_cpus
has "${BASES[0]}" && has "${BASES[1]}" || { timeout 60 docker pull --quiet "${BASES[0]}" && timeout 300 docker pull --quiet "${BASES[1]}"; } > /dev/null 2>&1 || stand_ins
"$@" 9>&-

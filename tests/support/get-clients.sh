#!/bin/sh
# Clients of the gateway that the environment of the tests does not have, each below build/clients, from PyPI and npm.
# Where that is not possible, the tests that need one say so and are skipped.
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/clients
mkdir -p "$folder"

environment() {
    name=$1
    shift
    if ! [ -e "$folder/$name/complete" ]; then
        echo "installing $name into build/clients"
        "${PYTHON:-python3}" -m venv --clear "$folder/$name"
        "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
        touch "$folder/$name/complete"
    fi
}

# The first release of the client as it is today; newer httpx does not take its arguments.
environment openai-1 openai==1.0.0 'httpx<0.28'
environment frameworks langchain-openai llama-index-embeddings-openai-like \
    llama-index-embeddings-text-embeddings-inference

if ! [ -e "$folder/npm/complete" ] && command -v npm >/dev/null; then
    echo "installing npm's openai into build/clients"
    rm -rf "$folder/npm"
    npm install --silent --no-audit --no-fund --prefix "$folder/npm" openai
    touch "$folder/npm/complete"
fi

#!/bin/sh
# schemathesis, which makes requests from the gateway's description, below build/schemathesis, from PyPI. It has an
# environment of its own, because it would decide the versions of much that the tests' environment has too. Where it can't
# be installed, the test that needs it says so and is skipped.
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/schemathesis
if ! [ -e "$folder/complete" ]; then
    echo "installing schemathesis into build/schemathesis"
    "${PYTHON:-python3}" -m venv --clear "$folder"
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check 'schemathesis>=4.32'
    touch "$folder/complete"
fi

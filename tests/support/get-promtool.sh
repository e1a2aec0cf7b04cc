#!/bin/sh
# Prometheus' promtool from Debian's package, unpacked into build/promtool: nothing is installed, and no service is started.
# As root; elsewhere the tests that need it say so and are skipped.
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/promtool
if [ -x "$folder/promtool" ] || command -v promtool >/dev/null || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    exit 0
fi
echo "unpacking promtool into build/promtool"
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"
apt-get update -qq
apt-get download -qq -o APT::Sandbox::User=root prometheus >/dev/null
dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components=3 ./usr/bin/promtool
rm prometheus_*.deb

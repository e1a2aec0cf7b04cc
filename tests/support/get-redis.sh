#!/bin/sh
# Debian's redis-server 7, which speaks TLS, unpacked into build/redis: nothing is installed, and no service is started.
# As root; elsewhere the tests that need it say so and are skipped.
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/redis
if [ -x "$folder/redis-server" ] || ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    exit 0
fi
echo "unpacking redis-server into build/redis"
rm -rf "$folder"
mkdir -p "$folder/archives/partial" "$folder/root"
apt-get update -qq
apt-get install -qq -y --download-only --no-install-recommends -o Dir::Cache::archives="$folder/archives" redis-server >/dev/null
for package in "$folder"/archives/*.deb; do
    dpkg -x "$package" "$folder/root"
done
cat > "$folder/redis-server" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
libraries=$(find "$root/usr/lib" -name '*.so.*' -printf '%h:' 2>/dev/null)
LD_LIBRARY_PATH=${libraries}${LD_LIBRARY_PATH:-} exec "$root/usr/bin/redis-server" "$@"
WRAPPER
chmod +x "$folder/redis-server"
